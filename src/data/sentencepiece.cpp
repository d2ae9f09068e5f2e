#include <headroom/core/error.h>
#include <headroom/data/tokenizer.h>

#include "core/input_file.h"
#include "data/tokenizer_parts.h"

#include <fmt/format.h>

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>

namespace headroom {
namespace {

// SentencePiece runs in a program of its own (see apps/sentencepiece), which lies beside this one.
std::string helper_path() {
  std::error_code error;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", error);
  const auto path = self.parent_path() / "headroom_sentencepiece";
  if (error || access(path.c_str(), X_OK) != 0) {
    throw ConfigError(fmt::format(
        "{} is missing: install libsentencepiece-dev and build again, or train by bytes",
        path.string()));
  }
  return path.string();
}

// A file in memory that holds `input`, ready to be read from its start.
int open_input(std::string_view input) {
  const int file = memfd_create("headroom-text", MFD_CLOEXEC);
  for (std::size_t done = 0; file >= 0 && done < input.size();) {
    const ssize_t count = write(file, input.data() + done, input.size() - done);
    if (count <= 0)
      throw DataError(fmt::format("the text of {} bytes does not fit into memory: {}", input.size(),
                                  std::strerror(errno)));
    done += static_cast<std::size_t>(count);
  }
  if (file < 0 || lseek(file, 0, SEEK_SET) != 0)
    throw DataError(fmt::format("no memory for the text: {}", std::strerror(errno)));
  return file;
}

std::string run_helper(const std::string& model, const char* task, std::string_view input) {
  const std::string helper = helper_path();
  const int in = open_input(input);
  int out[2];
  if (pipe(out) != 0)
    throw DataError(fmt::format("cannot start {}: {}", helper, std::strerror(errno)));
  const pid_t child = fork();
  if (child == 0) {
    dup2(in, 0);
    dup2(out[1], 1);
    close(out[0]);
    close(out[1]);
    execl(helper.c_str(), helper.c_str(), model.c_str(), task, nullptr);
    _exit(127);
  }
  close(in);
  close(out[1]);
  std::string output;
  char buffer[65536];
  for (ssize_t count = 0; (count = read(out[0], buffer, sizeof(buffer))) > 0;)
    output.append(buffer, static_cast<std::size_t>(count));
  close(out[0]);
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status) ||
      WEXITSTATUS(status) != 0) {
    throw DataError(fmt::format("{}: SentencePiece cannot {}: {}", model, task,
                                output.empty() ? "it ended without a reason" : output));
  }
  return output;
}

class SentencePiece final : public Tokenizer {
 public:
  explicit SentencePiece(std::string path)
      : path_(std::move(path)),
        vocabulary_(std::atoll(run_helper(path_, "vocabulary", {}).c_str())) {}

  std::vector<std::int64_t> encode(std::string_view text) const override {
    const std::string bytes = run_helper(path_, "encode", text);
    std::vector<std::int32_t> tokens(bytes.size() / sizeof(std::int32_t));
    std::memcpy(tokens.data(), bytes.data(), tokens.size() * sizeof(std::int32_t));
    return {tokens.begin(), tokens.end()};
  }

  std::string decode(const std::vector<std::int64_t>& tokens) const override {
    std::vector<std::int32_t> narrow;
    for (const std::int64_t token : tokens) {
      if (token >= 0 && token < vocabulary_) narrow.push_back(static_cast<std::int32_t>(token));
    }
    return run_helper(
        path_, "decode",
        {reinterpret_cast<const char*>(narrow.data()), narrow.size() * sizeof(std::int32_t)});
  }

  std::int64_t vocabulary() const override { return vocabulary_; }

  void save(const std::string& folder) const override {
    copy_tokenizer_file(path_, folder, "tokenizer.model");
  }

 private:
  std::string path_;
  std::int64_t vocabulary_;
};

}  // namespace

std::unique_ptr<Tokenizer> open_sentencepiece(const std::string& model_path) {
  constexpr std::int64_t kMostBytes = std::int64_t{1} << 30;
  const InputFile file(model_path);  // refuses what the helper would wait for
  if (file.size() == 0) file.fail("the file is empty");
  if (file.size() > kMostBytes)
    file.fail(fmt::format("{} bytes are too many for a SentencePiece model", file.size()));
  return std::make_unique<SentencePiece>(model_path);
}

}  // namespace headroom
