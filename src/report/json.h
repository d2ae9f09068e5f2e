#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace headroom {

/// A JSON value that is built up and printed. Keys keep the order in which they were set. Not a
/// number (NaN, infinity) prints as null.
class Json {
 public:
  static Json object();
  static Json array();

  Json();
  Json(const Json& other);
  Json(Json&& other) noexcept;
  Json& operator=(Json other) noexcept;
  ~Json();

  Json& set(const std::string& key, const Json& value);
  Json& set(const std::string& key, const std::string& value);
  Json& set(const std::string& key, const char* value);
  Json& set(const std::string& key, bool value);
  Json& set(const std::string& key, double value);
  Json& set(const std::string& key, std::int64_t value);
  Json& set(const std::string& key, int value) {
    return set(key, static_cast<std::int64_t>(value));
  }

  Json& push(const Json& value);
  Json& push(const std::string& value);
  Json& push(double value);
  Json& push(std::int64_t value);

  /// indent < 0: one line.
  std::string dump(int indent = 2) const;

 private:
  struct Value;
  std::unique_ptr<Value> value_;
};

}  // namespace headroom
