// Encodes and decodes text with a SentencePiece model, for headroom. A program of its own, because
// SentencePiece and LibTorch each bring a protobuf, and two of them do not live in one process.
//
//   headroom_sentencepiece MODEL vocabulary   prints the number of pieces
//   headroom_sentencepiece MODEL encode       text on standard input, tokens (int32) on standard
//   output headroom_sentencepiece MODEL decode       tokens on standard input, text on standard
//   output
// On failure it prints the reason instead, and returns 1.

#include <sentencepiece_processor.h>

#include <cstdint>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

namespace {

int fail(const std::string& reason) {
  std::cout << reason;
  return 1;
}

// Line by line: a model sees a line end as an end of text, and one call for a whole book would need
// many times its memory.
int encode(const sentencepiece::SentencePieceProcessor& processor) {
  std::vector<int> ids;
  std::vector<std::int32_t> tokens;
  for (std::string line; std::getline(std::cin, line);) {
    const auto status = processor.Encode(line, &ids);
    if (!status.ok()) return fail(status.ToString());
    tokens.assign(ids.begin(), ids.end());
    std::cout.write(reinterpret_cast<const char*>(tokens.data()),
                    static_cast<std::streamsize>(tokens.size() * sizeof(std::int32_t)));
  }
  return 0;
}

// Newer versions take a span (a pointer and a size) and deprecate the vector that older ones take.
// The last argument makes the compiler prefer the first of these where it compiles.
template <class Processor, class Ids>
auto text_of(const Processor& processor, const Ids& ids, std::string* text, int /*preferred*/)
    -> decltype(processor.Decode({ids.data(), ids.size()}, text)) {
  return processor.Decode({ids.data(), ids.size()}, text);
}
template <class Processor, class Ids>
auto text_of(const Processor& processor, const Ids& ids, std::string* text, long /*otherwise*/) {
  return processor.Decode(ids, text);
}

int decode(const sentencepiece::SentencePieceProcessor& processor) {
  std::vector<int> ids;
  for (std::int32_t token = 0; std::cin.read(reinterpret_cast<char*>(&token), sizeof(token));)
    ids.push_back(token);
  for (const int id : ids) {
    if (id < 0 || id >= processor.GetPieceSize())
      return fail("token " + std::to_string(id) + " is not in the model");
  }
  std::string text;
  const auto status = text_of(processor, ids, &text, 0);
  if (!status.ok()) return fail(status.ToString());
  std::cout << text;
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return fail("usage: headroom_sentencepiece MODEL vocabulary|encode|decode");
  std::ios::sync_with_stdio(false);
  sentencepiece::SentencePieceProcessor processor;
  const auto status = processor.Load(argv[1]);
  if (!status.ok()) return fail(status.ToString());
  const std::string task = argv[2];
  if (task == "encode") return encode(processor);
  if (task == "decode") return decode(processor);
  std::cout << processor.GetPieceSize();
  return 0;
}
