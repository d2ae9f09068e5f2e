#include "report/tensorboard.h"

#include <headroom/core/error.h>

#include <fmt/format.h>

#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>

namespace headroom {
namespace {

// The file is a sequence of TFRecords, each an Event message of a few fields: small enough to be
// written by hand.

std::uint32_t crc32c(const std::string& bytes) {
  static const std::array<std::uint32_t, 256> table = [] {
    std::array<std::uint32_t, 256> made{};
    for (std::uint32_t i = 0; i < 256; ++i) {
      std::uint32_t value = i;
      for (int bit = 0; bit < 8; ++bit)
        value = (value >> 1) ^ ((value & 1U) != 0 ? 0x82f63b78U : 0U);
      made[i] = value;
    }
    return made;
  }();
  std::uint32_t crc = 0xffffffffU;
  for (const char c : bytes)
    crc = table[(crc ^ static_cast<unsigned char>(c)) & 0xffU] ^ (crc >> 8);
  return crc ^ 0xffffffffU;
}

std::uint32_t masked_crc(const std::string& bytes) {
  const std::uint32_t crc = crc32c(bytes);
  return ((crc >> 15) | (crc << 17)) + 0xa282ead8U;
}

template <typename Number>
std::string little_endian(Number value) {
  std::string bytes(sizeof(value), '\0');
  std::memcpy(bytes.data(), &value, sizeof(value));
  return bytes;
}

std::string varint(std::uint64_t value) {
  std::string bytes;
  for (; value >= 0x80; value >>= 7) bytes += static_cast<char>((value & 0x7f) | 0x80);
  return bytes + static_cast<char>(value);
}

enum class Wire : std::uint32_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

std::string key(std::uint32_t field, Wire wire) {
  return varint((field << 3) | static_cast<std::uint32_t>(wire));
}
std::string text(std::uint32_t field, const std::string& value) {
  return key(field, Wire::kBytes) + varint(value.size()) + value;
}

std::string event_start() {
  const double now =
      std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  return key(1, Wire::kFixed64) + little_endian(now);
}

}  // namespace

TensorBoardWriter::TensorBoardWriter(const std::string& folder) {
  if (folder.empty()) return;
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(
                           std::chrono::system_clock::now().time_since_epoch())
                           .count();
  path_ = fmt::format("{}/events.out.tfevents.{}.{}", folder, seconds, ::getpid());
  file_.open(path_, std::ios::binary);
  if (!file_) throw ConfigError(fmt::format("cannot write '{}': {}", path_, std::strerror(errno)));
  write_record(event_start() + text(3, "brain.Event:2"));
}

void TensorBoardWriter::add_scalar(const std::string& tag, double value, std::int64_t step) {
  if (path_.empty()) return;
  const std::string scalar =
      text(1, tag) + key(2, Wire::kFixed32) + little_endian(static_cast<float>(value));
  write_record(event_start() + key(2, Wire::kVarint) + varint(static_cast<std::uint64_t>(step)) +
               text(5, text(1, scalar)));
}

void TensorBoardWriter::write_record(const std::string& event) {
  const std::string length = little_endian(static_cast<std::uint64_t>(event.size()));
  file_ << length << little_endian(masked_crc(length)) << event << little_endian(masked_crc(event))
        << std::flush;
  if (!file_) throw ConfigError(fmt::format("cannot write '{}': {}", path_, std::strerror(errno)));
}

}  // namespace headroom
