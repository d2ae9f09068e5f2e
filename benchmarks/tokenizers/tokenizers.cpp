// How fast tokenizers encode: megabytes of text per second on one core.
//     tokenizers_benchmark TEXT TOKENIZER...
// Each tokenizer (a folder or file, as --tokenizer takes it) encodes the text five times; the best
// time counts, as the others hold what the machine did besides.
#include <headroom/core/error.h>
#include <headroom/data/tokenizer.h>

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <iterator>
#include <limits>

namespace {

double seconds_to_encode(const headroom::Tokenizer& tokenizer, const std::string& text,
                         std::size_t& num_tokens) {
  const auto start = std::chrono::steady_clock::now();
  num_tokens = tokenizer.encode(text).size();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    fmt::print(stderr, "usage: tokenizers_benchmark TEXT TOKENIZER...\n");
    return 2;
  }
  std::ifstream file(argv[1], std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (text.empty()) {
    fmt::print(stderr, "{}: no text\n", argv[1]);
    return 3;
  }
  fmt::print("{:<40} {:>10} {:>12} {:>10} {:>12}\n", "tokenizer", "pieces", "bytes/token", "MB/s",
             "comes back");
  for (int i = 2; i < argc; ++i) {
    try {
      const auto tokenizer = headroom::open_tokenizer(argv[i]);
      double seconds = std::numeric_limits<double>::infinity();
      std::size_t num_tokens = 0;
      for (int run = 0; run < 5; ++run)
        seconds = std::min(seconds, seconds_to_encode(*tokenizer, text, num_tokens));
      const auto size = static_cast<double>(text.size());
      fmt::print("{:<40} {:>10} {:>12.2f} {:>10.1f} {:>12}\n", argv[i], tokenizer->vocabulary(),
                 size / static_cast<double>(num_tokens), size / 1e6 / seconds,
                 tokenizer->decode(tokenizer->encode(text)) == text ? "yes" : "no");
    } catch (const headroom::Error& error) {
      fmt::print(stderr, "{}\n", error.what());
      return static_cast<int>(error.exit_code());
    }
  }
  return 0;
}
