#include "data/tokenizer_parts.h"

#include <fmt/format.h>

namespace headroom {
namespace {

class ByteTokenizer final : public Tokenizer {
 public:
  std::vector<std::int64_t> encode(std::string_view text) const override {
    std::vector<std::int64_t> tokens;
    tokens.reserve(text.size());
    for (const char byte : text) tokens.push_back(static_cast<unsigned char>(byte));
    return tokens;
  }

  std::string decode(const std::vector<std::int64_t>& tokens) const override {
    std::string text;
    for (const std::int64_t token : tokens) {
      if (token >= 0 && token < 256) text.push_back(static_cast<char>(token));
    }
    return text;
  }

  std::int64_t vocabulary() const override { return 256; }

  // A byte-level BPE whose pieces are the bytes, in their order, and which merges nothing.
  void save(const std::string& folder) const override {
    std::string vocabulary;
    for (unsigned byte = 0; byte < 256; ++byte) {
      std::string piece = piece_of_byte(static_cast<unsigned char>(byte));
      if (piece == "\"" || piece == "\\") piece.insert(0, "\\");
      vocabulary += fmt::format("{}\"{}\": {}", byte == 0 ? "" : ", ", piece, byte);
    }
    constexpr const char* kByteLevel =
        R"({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, )"
        R"("use_regex": false})";
    write_tokenizer_file(
        folder, "tokenizer.json",
        fmt::format(
            R"({{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], )"
            R"("normalizer": null, "pre_tokenizer": {0}, "post_processor": null, "decoder": {0}, )"
            R"("model": {{"type": "BPE", "dropout": null, "unk_token": null, )"
            R"("continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false, )"
            R"("byte_fallback": false, "vocab": {{{1}}}, "merges": []}}}})"
            "\n",
            kByteLevel, vocabulary));
    write_tokenizer_file(folder, "tokenizer_config.json",
                         "{\"tokenizer_class\": \"PreTrainedTokenizerFast\"}\n");
  }
};

}  // namespace

std::unique_ptr<Tokenizer> make_byte_tokenizer() { return std::make_unique<ByteTokenizer>(); }

}  // namespace headroom
