// Runs a fuzz target without libFuzzer: mutates the files of a corpus, from a seed.
//
//     idx_fuzz [-runs=N] [-seed=S] [-max_len=N] CORPUS...
//
// Without a corpus it starts from an empty input. A target is LLVMFuzzerTestOneInput, so that
// clang's -fsanitize=fuzzer can run it as well. An input that ends the program is left in the file
// crash-input.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);
extern "C" __attribute__((weak)) void __sanitizer_set_death_callback(void (*callback)());

namespace {

std::string current;

void leave_input() {
  const int file = ::open("crash-input", O_WRONLY | O_CREAT | O_TRUNC, 0600);
  if (file < 0) return;
  const ssize_t written = ::write(file, current.data(), current.size());
  static_cast<void>(written);
  ::close(file);
}

void at_signal(int signal) {
  leave_input();
  std::signal(signal, SIG_DFL);
  ::raise(signal);
}

class Mutator {
 public:
  Mutator(std::vector<std::string> corpus, std::uint64_t seed, std::size_t max_size)
      : corpus_(std::move(corpus)), random_(seed), max_size_(max_size) {}

  std::string next() {
    std::string input = corpus_[below(corpus_.size())];
    const std::size_t num_changes = below(5);  // now and then none
    for (std::size_t i = 0; i < num_changes; ++i) change(input);
    input.resize(std::min(input.size(), max_size_));
    return input;
  }

 private:
  std::size_t below(std::size_t count) { return count == 0 ? 0 : random_() % count; }

  void change(std::string& input) {
    static const std::vector<std::string> kPieces = {std::string(4, '\xff'),
                                                     std::string(8, '\0'),
                                                     "-1",
                                                     "9223372036854775807",
                                                     "1e308",
                                                     "18446744073709551616",
                                                     "NaN",
                                                     "null",
                                                     "\"",
                                                     "\\u0000",
                                                     "[",
                                                     "{",
                                                     "}",
                                                     "]",
                                                     ",",
                                                     "\n",
                                                     "\xc3\x28",
                                                     "%",
                                                     "=",
                                                     std::string(80, '[')};
    const std::size_t at = below(input.size() + 1);
    const std::size_t length = std::min(below(16) + 1, input.size() - at);
    switch (below(9)) {
      case 0:
        if (at < input.size()) input[at] = static_cast<char>(input[at] ^ (1 << below(8)));
        break;
      case 1:
        if (at < input.size()) input[at] = static_cast<char>(below(256));
        break;
      case 2:
        input.erase(at, length);
        break;
      case 3:
        input.insert(at, input.substr(at, length));
        break;
      case 4:
        input.insert(at, kPieces[below(kPieces.size())]);
        break;
      case 5:
        input.replace(at, length, kPieces[below(kPieces.size())]);
        break;
      case 6:
        input.resize(at);
        break;
      case 7:
        splice(input, at);
        break;
      default:
        replace_number(input, at);
        break;
    }
  }

  void splice(std::string& input, std::size_t at) {
    const std::string& other = corpus_[below(corpus_.size())];
    input = input.substr(0, at) + other.substr(below(other.size() + 1));
  }

  void replace_number(std::string& input, std::size_t from) {
    static const char* const kDigits = "0123456789";
    const std::size_t begin = input.find_first_of(kDigits, from);
    if (begin == std::string::npos) return;
    const std::size_t end = std::min(input.find_first_not_of(kDigits, begin), input.size());
    static const std::vector<std::string> kNumbers = {"0",
                                                      "1",
                                                      "2",
                                                      "255",
                                                      "256",
                                                      "65536",
                                                      "2147483648",
                                                      "4294967296",
                                                      "1125899906842624",
                                                      "9223372036854775807",
                                                      "9223372036854775808",
                                                      "99999999999999999999999"};
    input.replace(begin, end - begin, kNumbers[below(kNumbers.size())]);
  }

  std::vector<std::string> corpus_;
  std::mt19937_64 random_;
  std::size_t max_size_;
};

std::vector<std::string> read_corpus(const std::vector<std::string>& places) {
  std::vector<std::string> paths;
  for (const std::string& place : places) {
    if (std::filesystem::is_regular_file(place)) paths.push_back(place);
    if (!std::filesystem::is_directory(place)) continue;
    for (const auto& entry : std::filesystem::directory_iterator(place))
      paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());  // so that a seed means the same everywhere
  std::vector<std::string> corpus;
  for (const std::string& path : paths) {
    std::ifstream file(path, std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  if (corpus.empty()) corpus.emplace_back();  // starts from nothing
  return corpus;
}

void run(const std::string& input) {
  current = input;
  LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(current.data()), current.size());
}

}  // namespace

int main(int argc, char** argv) {
  std::uint64_t num_runs = 1000, seed = 1, max_size = 4096;
  std::vector<std::string> places;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const std::size_t equals = word.find('=');
    const std::string name = word.substr(0, equals);
    if (name == "-runs")
      num_runs = std::strtoull(word.c_str() + equals + 1, nullptr, 10);
    else if (name == "-seed")
      seed = std::strtoull(word.c_str() + equals + 1, nullptr, 10);
    else if (name == "-max_len")
      max_size = std::strtoull(word.c_str() + equals + 1, nullptr, 10);
    else
      places.push_back(word);
  }
  const std::vector<std::string> corpus = read_corpus(places);
  for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT})
    std::signal(signal, at_signal);
  if (__sanitizer_set_death_callback != nullptr) __sanitizer_set_death_callback(leave_input);
  for (const std::string& input : corpus) run(input);
  Mutator mutator(corpus, seed, max_size);
  for (std::uint64_t i = 0; i < num_runs; ++i) run(mutator.next());
  std::printf("%zu inputs of the corpus and %llu mutations of them\n", corpus.size(),
              static_cast<unsigned long long>(num_runs));
  return 0;
}
