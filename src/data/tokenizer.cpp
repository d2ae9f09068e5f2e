#include <headroom/data/tokenizer.h>

#include "data/tokenizer_parts.h"
#include "data/word_cache.h"

#include <mutex>
#include <utility>

namespace headroom {
namespace {

class ComposedTokenizer final : public Tokenizer {
 public:
  explicit ComposedTokenizer(TokenizerParts parts) : parts_(std::move(parts)) {
    std::vector<AddedToken> plain, normalized;
    for (AddedToken& token : parts_.added) {
      if (token.is_normalized) token.content = normalized_text(token.content);
      (token.is_normalized ? normalized : plain).push_back(token);
    }
    added_ = AddedTokens(std::move(plain));
    added_to_normalized_ = AddedTokens(std::move(normalized));
  }

  std::vector<std::int64_t> encode(std::string_view text) const override {
    // Threads at the same time have caches of their own, which are lost.
    const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    std::unique_ptr<WordCache> own;
    if (!lock) own = std::make_unique<WordCache>();
    WordCache& cache = lock ? cache_ : *own;
    std::vector<std::int64_t> tokens;
    tokens.reserve(text.size() / 4 + 1);
    const WordSink encode_word = [&](std::string_view word) {
      const std::vector<std::int32_t>& found =
          cache.find(word, [&](auto& fresh) { parts_.model->encode(word, fresh); });
      tokens.insert(tokens.end(), found.begin(), found.end());
    };
    for_each_part(text, added_, tokens, [&](std::string_view part) {
      if (parts_.normalizers.empty() && added_to_normalized_.empty())
        return split(parts_.splits, part, encode_word);
      const std::string normal = normalized_text(part);
      for_each_part(normal, added_to_normalized_, tokens,
                    [&](std::string_view rest) { split(parts_.splits, rest, encode_word); });
    });
    return tokens;
  }

  std::string decode(const std::vector<std::int64_t>& tokens) const override {
    std::string text;
    bool is_first = true;
    for (const std::int64_t token : tokens) {
      if (token < 0 || token >= vocabulary()) continue;
      const std::string& piece = parts_.pieces[static_cast<std::size_t>(token)];
      text += parts_.join.puts_spaces_between ? word_text(piece, is_first) : piece;
      is_first = false;
    }
    if (parts_.join.drops_first_space && !text.empty() && text[0] == ' ') text.erase(0, 1);
    return text;
  }

  std::int64_t vocabulary() const override {
    return static_cast<std::int64_t>(parts_.pieces.size());
  }

  SpecialTokens special_tokens() const override { return parts_.special; }

  std::vector<std::int64_t> with_special_tokens(
      const std::vector<std::int64_t>& first,
      const std::vector<std::int64_t>& second) const override {
    std::vector<std::int64_t> tokens;
    for (const std::int64_t item : second.empty() ? parts_.one_text : parts_.two_texts) {
      if (item == kFirstText) {
        tokens.insert(tokens.end(), first.begin(), first.end());
      } else if (item == kSecondText) {
        tokens.insert(tokens.end(), second.begin(), second.end());
      } else {
        tokens.push_back(item);
      }
    }
    return tokens;
  }

  void save(const std::string& folder) const override {
    for (const auto& [path, name] : parts_.files) copy_tokenizer_file(path, folder, name);
  }

 private:
  std::string normalized_text(std::string_view text) const {
    std::string result(text);
    for (const TextStep& step : parts_.normalizers) result = step(std::move(result));
    return result;
  }

  // Text between added tokens goes to `handle`; they themselves are appended.
  template <class Handle>
  static void for_each_part(std::string_view text, const AddedTokens& added,
                            std::vector<std::int64_t>& tokens, const Handle& handle) {
    for (std::size_t begin = 0; begin < text.size();) {
      const AddedTokens::Match match = added.find(text, begin);
      const std::size_t end = match.end > 0 ? match.begin : text.size();
      if (end > begin) handle(text.substr(begin, end - begin));
      if (match.end > 0) tokens.push_back(match.id);
      begin = match.end > 0 ? match.end : text.size();
    }
  }

  std::string word_text(const std::string& piece, bool is_first) const {
    const std::string& continuation = parts_.join.continuation;
    if (is_first) return piece;
    if (!continuation.empty() && piece.rfind(continuation, 0) == 0)
      return piece.substr(continuation.size());
    std::string text = " " + piece;
    if (!parts_.join.cleans_up) return text;
    for (const char* mark : {".", "?", "!", ",", "n't", "'m", "'s", "'ve", "'re"})
      text = replace_all(std::move(text), std::string(" ") + mark, mark);
    return text;
  }

  TokenizerParts parts_;
  AddedTokens added_, added_to_normalized_;
  mutable std::mutex mutex_;
  mutable WordCache cache_;
};

}  // namespace

std::vector<std::int64_t> Tokenizer::with_special_tokens(
    const std::vector<std::int64_t>& first, const std::vector<std::int64_t>& second) const {
  std::vector<std::int64_t> tokens = first;
  tokens.insert(tokens.end(), second.begin(), second.end());
  return tokens;
}

std::unique_ptr<Tokenizer> compose_tokenizer(TokenizerParts parts) {
  return std::make_unique<ComposedTokenizer>(std::move(parts));
}

}  // namespace headroom
