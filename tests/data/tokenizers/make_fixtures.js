// Writes the small tokenizers of this folder, and cases.json: texts with the tokens that Hugging
// Face's own library (npm: @anush008/tokenizers, built from its Rust sources) gives for them.
//     npm install @anush008/tokenizers && node make_fixtures.js
const fs = require('fs');
const path = require('path');
const { Tokenizer } = require('@anush008/tokenizers');

const training = `The quick brown fox jumps over the lazy dog. It isn't there, they're here; we've seen it
and I'd say it'll do. Memory is what a model has too little of: weights, gradients, states and
activations. A plan decides what to keep and what to make again, and 1234 numbers follow from it.
    for (int i = 0; i < 10; ++i) total += values[i];
Größe, café, naïve, Ångström; Москва и снег; 日本語の文字と中文; 한국어 글자; नमस्ते; مرحبا; 👍🏽 👩‍👩‍👧.
The model keeps the states, the model makes the values, the plan keeps the model in memory.
`;

const texts = [
  training, '', ' ', '  ', '\n', '\n\n', ' \n \n  x', 'a\r\n\r\n  b\t\tc', 'x   ', '   x',
  "it's IT'S they'Re we'LL 'x ''s don't", '1234567 12 3.14 ½ Ⅷ ①② ١٢٣', 'the  model\u00a0\u2003keeps',
  'e\u0301 o\u0308\u0323 \u1112\u1161\u11ab İstanbul ΑΣΣ ﬁne ß Å', '日本語のmodel中文、한국어!', '👍🏽👩‍👩‍👧‍👦🇩🇪',
  'x<|end|>y', '<|end|><|end|> the', ' [MASK] the [CLS]model', '_a_b__ #%&*! "quoted" (x)',
  'supercalifragilisticexpialidocious'.repeat(3), 'ab'.repeat(40), 'control\u0001\u200bchars\ufeff\u2028end',
  'a\u0085b\u3000c', "say 's and 'S and 'LL", '\u0590\u05be\u064b', 'Ⅷth 3rd 4ième', 'the'.repeat(60),
];

// GPT-2's alphabet.
const letters = [];
for (let byte = 0, next = 256; byte < 256; ++byte) {
  const printable = (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
  letters.push(String.fromCodePoint(printable ? byte : next++));
}

// Merges of the commonest pair, again and again.
function train(words, vocabulary, count) {
  let next = Object.keys(vocabulary).length;
  const merges = [];
  while (merges.length < count) {
    const pairs = new Map();
    for (const word of words) {
      for (let i = 0; i + 1 < word.length; ++i) {
        const pair = JSON.stringify([word[i], word[i + 1]]);
        pairs.set(pair, (pairs.get(pair) || 0) + 1);
      }
    }
    const best = [...pairs].sort((a, b) => b[1] - a[1])[0];
    if (!best || best[1] < 2) break;
    const [left, right] = JSON.parse(best[0]);
    merges.push([left, right]);
    if (!(left + right in vocabulary)) vocabulary[left + right] = next++;
    words = words.map((word) => {
      const result = [];
      for (let i = 0; i < word.length; ++i) {
        const joined = i + 1 < word.length && word[i] === left && word[i + 1] === right;
        result.push(joined ? left + right : word[i]);
        if (joined) ++i;
      }
      return result;
    });
  }
  return merges;
}

const added = (id, content, more) => ({
  id, content, single_word: false, lstrip: false, rstrip: false, normalized: false, special: true, ...more });
const whole = (parts) => ({
  version: '1.0', truncation: null, padding: null, added_tokens: [], normalizer: null,
  pre_tokenizer: null, post_processor: null, decoder: null, ...parts });

const gpt2Pattern = /'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+/gu;
const gpt2Words = training.match(gpt2Pattern).map(
    (word) => [...Buffer.from(word, 'utf8')].map((byte) => letters[byte]));
const byteVocabulary = Object.fromEntries(letters.map((letter, byte) => [letter, byte]));
const byteMerges = train(gpt2Words, byteVocabulary, 160);
const numPieces = Object.keys(byteVocabulary).length;
const byteLevel = (more) => ({
  type: 'ByteLevel', add_prefix_space: false, trim_offsets: true, use_regex: true, ...more });
const bpe = (more) => ({
  type: 'BPE', dropout: null, unk_token: null, continuing_subword_prefix: '', end_of_word_suffix: '',
  fuse_unk: false, byte_fallback: false, vocab: byteVocabulary,
  merges: byteMerges.map((pair) => pair.join(' ')), ...more });
const gpt2 = whole({
  added_tokens: [added(numPieces, '<|end|>')], pre_tokenizer: byteLevel(), decoder: byteLevel(),
  post_processor: byteLevel(), model: bpe() });

const gpt4Pattern = (digits) => "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|" + digits +
    '| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+';
const splitBy = (pattern) => ({ type: 'Sequence', pretokenizers: [
  { type: 'Split', pattern: { Regex: pattern }, behavior: 'Isolated', invert: false },
  byteLevel({ use_regex: false })] });
const begin = { SpecialToken: { id: '<|begin|>', type_id: 0 } };
const text = (id, type_id) => ({ Sequence: { id, type_id } });
const llama3 = whole({
  added_tokens: [added(numPieces, '<|end|>'), added(numPieces + 1, '<|begin|>')],
  pre_tokenizer: splitBy(gpt4Pattern('\\p{N}{1,3}')), decoder: byteLevel(), model: bpe(),
  post_processor: { type: 'Sequence', processors: [byteLevel(), {
    type: 'TemplateProcessing', single: [begin, text('A', 0)],
    pair: [begin, text('A', 0), begin, text('B', 1)],
    special_tokens: { '<|begin|>': { id: '<|begin|>', ids: [numPieces + 1], tokens: ['<|begin|>'] } } }] } });
const qwen2 = whole({
  added_tokens: [added(numPieces, '<|end|>', { lstrip: true }),
                 added(numPieces + 1, '[MASK]', { rstrip: true }),
                 added(numPieces + 2, 'keeps', { single_word: true, special: false }),
                 added(numPieces + 3, 'É', { normalized: true, special: false })],
  normalizer: { type: 'NFC' }, pre_tokenizer: splitBy(gpt4Pattern('\\p{N}')), decoder: byteLevel(),
  model: bpe() });
const prefixed = whole({
  added_tokens: [added(numPieces, '<|end|>')], decoder: byteLevel(), model: bpe(),
  normalizer: { type: 'Sequence', normalizers: [{ type: 'NFKD' }, { type: 'Lowercase' }] },
  pre_tokenizer: { type: 'Sequence', pretokenizers: [
    { type: 'Digits', individual_digits: true }, byteLevel({ add_prefix_space: true })] } });

function words() {
  const vocab = {};
  const put = (piece) => { if (piece && !(piece in vocab)) vocab[piece] = Object.keys(vocab).length; };
  ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]'].forEach(put);
  const plain = training.toLowerCase().normalize('NFD').replace(/\p{Mn}/gu, '');
  [...new Set(plain.replace(/\s/gu, ''))].forEach((letter, i) => {
    if (i % 9 !== 8) [letter, '##' + letter].forEach(put);
  });
  new Set(plain.match(/\p{L}+/gu)).forEach((word) => {
    const half = [...word].length >> 1;
    put([...word].slice(0, half).join(''));
    put('##' + [...word].slice(half).join(''));
  });
  return vocab;
}
const wordVocabulary = words();
const cls = { SpecialToken: { id: '[CLS]', type_id: 0 } };
const sep = (type_id) => ({ SpecialToken: { id: '[SEP]', type_id } });
const bert = (normalizer) => whole({
  added_tokens: ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]'].map((name, id) => added(id, name)),
  normalizer: { type: 'BertNormalizer', clean_text: true, handle_chinese_chars: true,
                strip_accents: null, lowercase: true, ...normalizer },
  pre_tokenizer: { type: 'BertPreTokenizer' },
  post_processor: {
    type: 'TemplateProcessing', single: [cls, text('A', 0), sep(0)],
    pair: [cls, text('A', 0), sep(0), text('B', 1), sep(1)],
    special_tokens: { '[CLS]': { id: '[CLS]', ids: [2], tokens: ['[CLS]'] },
                      '[SEP]': { id: '[SEP]', ids: [3], tokens: ['[SEP]'] } } },
  decoder: { type: 'WordPiece', prefix: '##', cleanup: true },
  model: { type: 'WordPiece', unk_token: '[UNK]', continuing_subword_prefix: '##',
           max_input_chars_per_word: 100, vocab: wordVocabulary } });

function marked() {
  const vocab = { '<unk>': 0, '<s>': 1, '</s>': 2 };
  for (let byte = 0; byte < 256; ++byte)
    vocab['<0x' + byte.toString(16).toUpperCase().padStart(2, '0') + '>'] = 3 + byte;
  const spaced = '▁' + training.replaceAll(' ', '▁');
  [...new Set(spaced)].forEach((letter, i) => {
    if (i % 9 !== 8 && !(letter in vocab)) vocab[letter] = Object.keys(vocab).length;
  });
  const known = spaced.split(/(?<=[^▁])(?=▁)/u).map((word) => [...word])
                    .filter((word) => word.every((letter) => letter in vocab));
  const merges = train(known, vocab, 120);
  return whole({
    added_tokens: ['<unk>', '<s>', '</s>'].map((name, id) => added(id, name)),
    normalizer: { type: 'Sequence', normalizers: [
      { type: 'Prepend', prepend: '▁' },
      { type: 'Replace', pattern: { String: ' ' }, content: '▁' }] },
    decoder: { type: 'Sequence', decoders: [
      { type: 'Replace', pattern: { String: '▁' }, content: ' ' }, { type: 'ByteFallback' },
      { type: 'Fuse' }, { type: 'Strip', content: ' ', start: 1, stop: 0 }] },
    model: { type: 'BPE', dropout: null, unk_token: '<unk>', continuing_subword_prefix: null,
             end_of_word_suffix: null, fuse_unk: true, byte_fallback: true, vocab,
             merges: merges.map((pair) => pair.join(' ')) } });
}

const tokenizers = {
  gpt2, llama3, qwen2, prefixed, bert: bert({}), bert_cased: bert({ lowercase: false }), llama2: marked() };

(async () => {
  const cases = { texts };
  for (const [name, tokenizer] of Object.entries(tokenizers)) {
    const file = path.join(__dirname, name + '.json');
    fs.writeFileSync(file, JSON.stringify(tokenizer) + '\n');
    const reference = Tokenizer.fromFile(file);
    cases[name] = [];
    for (const sample of texts) {
      const plain = await reference.encode(sample, null, { addSpecialTokens: false });
      const special = await reference.encode(sample, null, { addSpecialTokens: true });
      cases[name].push({ ids: plain.getIds(), with_special_tokens: special.getIds(),
                         decoded: await reference.decode(plain.getIds(), false) });
    }
  }
  fs.writeFileSync(path.join(__dirname, 'cases.json'), JSON.stringify(cases) + '\n');
})();
