#include <headroom/comm/communicator.h>

#include <headroom/core/error.h>

#include <fmt/format.h>

#include <charconv>
#include <cstdlib>
#include <optional>

namespace headroom {
namespace {

constexpr const char* kExample = "a rank needs RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT";

constexpr const char* kStoreFile = "HEADROOM_RENDEZVOUS_FILE";

// A variable that is set to nothing counts as not set.
std::optional<std::string> text_of(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

std::optional<std::int64_t> number_of(const char* name, std::int64_t least, std::int64_t most) {
  const std::optional<std::string> text = text_of(name);
  if (!text) return std::nullopt;
  std::int64_t value = 0;
  const auto [stop, error] = std::from_chars(text->data(), text->data() + text->size(), value);
  if (error != std::errc() || stop != text->data() + text->size() || value < least ||
      value > most) {
    throw ConfigError(
        fmt::format("the environment variable {}='{}' must be a whole number from {} to {}", name,
                    *text, least, most));
  }
  return value;
}

bool is_loopback(const std::string& address) {
  return address == "localhost" || address == "::1" || address.rfind("127.", 0) == 0;
}

}  // namespace

RankEnvironment RankEnvironment::read() {
  constexpr std::int64_t kMostRanks = 1 << 20;
  RankEnvironment environment;
  const auto rank = number_of("RANK", 0, kMostRanks);
  const auto size = number_of("WORLD_SIZE", 1, kMostRanks);
  if (!rank && !size) return environment;
  if (!rank || !size) {
    throw ConfigError(fmt::format("the environment variable {} is set, but {} is not: {}",
                                  rank ? "RANK" : "WORLD_SIZE", rank ? "WORLD_SIZE" : "RANK",
                                  kExample));
  }
  if (*rank >= *size)
    throw ConfigError(fmt::format(
        "the environment variables contradict each other: RANK={} of WORLD_SIZE={}", *rank, *size));
  environment.is_given = true;
  environment.rank = *rank;
  environment.size = *size;
  if (*size == 1) return environment;
  if (const auto file = text_of(kStoreFile)) {
    environment.store_file = *file;
    environment.local_size = *size;
    return environment;
  }
  const auto address = text_of("MASTER_ADDR");
  const auto port = number_of("MASTER_PORT", 1, 65535);
  if (!address || !port) {
    throw ConfigError(fmt::format("the environment says rank {} of {}, but {} is not set: {}",
                                  *rank, *size, address ? "MASTER_PORT" : "MASTER_ADDR", kExample));
  }
  environment.address = *address;
  environment.port = *port;
  environment.local_size =
      number_of("LOCAL_WORLD_SIZE", 1, *size).value_or(is_loopback(*address) ? *size : 1);
  const auto local_rank = number_of("LOCAL_RANK", 0, kMostRanks);
  if (local_rank && *local_rank >= environment.local_size && text_of("LOCAL_WORLD_SIZE")) {
    throw ConfigError(fmt::format(
        "the environment variables contradict each other: LOCAL_RANK={} of LOCAL_WORLD_SIZE={}",
        *local_rank, environment.local_size));
  }
  environment.has_store = text_of("TORCHELASTIC_USE_AGENT_STORE") == "True";
  if (environment.has_store) {
    environment.store_prefix =
        fmt::format("/worker/attempt_{}", text_of("TORCHELASTIC_RESTART_COUNT").value_or("0"));
  }
  return environment;
}

std::vector<std::pair<std::string, std::string>> RankEnvironment::variables() const {
  std::vector<std::pair<std::string, std::string>> result = {
      {"RANK", std::to_string(rank)},
      {"WORLD_SIZE", std::to_string(size)},
      {"LOCAL_RANK", std::to_string(rank)},
      {"LOCAL_WORLD_SIZE", std::to_string(local_size)}};
  if (!store_file.empty()) {
    result.emplace_back(kStoreFile, store_file);
    return result;
  }
  result.emplace_back("MASTER_ADDR", address);
  result.emplace_back("MASTER_PORT", std::to_string(port));
  if (has_store) result.emplace_back("TORCHELASTIC_USE_AGENT_STORE", "True");
  return result;
}

}  // namespace headroom
