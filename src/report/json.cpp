#include "report/json.h"

#include <nlohmann/json.hpp>

#include <utility>

namespace headroom {

struct Json::Value {
  nlohmann::ordered_json json;
};

Json::Json() : value_(std::make_unique<Value>()) {}
Json::Json(const Json& other) : value_(std::make_unique<Value>(*other.value_)) {}
Json::Json(Json&& other) noexcept = default;
Json& Json::operator=(Json other) noexcept {
  value_.swap(other.value_);
  return *this;
}
Json::~Json() = default;

Json Json::object() {
  Json json;
  json.value_->json = nlohmann::ordered_json::object();
  return json;
}

Json Json::array() {
  Json json;
  json.value_->json = nlohmann::ordered_json::array();
  return json;
}

Json& Json::set(const std::string& key, const Json& value) {
  value_->json[key] = value.value_->json;
  return *this;
}
Json& Json::set(const std::string& key, const std::string& value) {
  value_->json[key] = value;
  return *this;
}
Json& Json::set(const std::string& key, const char* value) { return set(key, std::string(value)); }
Json& Json::set(const std::string& key, bool value) {
  value_->json[key] = value;
  return *this;
}
Json& Json::set(const std::string& key, double value) {
  value_->json[key] = value;
  return *this;
}
Json& Json::set(const std::string& key, std::int64_t value) {
  value_->json[key] = value;
  return *this;
}

Json& Json::push(const Json& value) {
  value_->json.push_back(value.value_->json);
  return *this;
}
Json& Json::push(const std::string& value) {
  value_->json.push_back(value);
  return *this;
}
Json& Json::push(double value) {
  value_->json.push_back(value);
  return *this;
}
Json& Json::push(std::int64_t value) {
  value_->json.push_back(value);
  return *this;
}

std::string Json::dump(int indent) const {
  return value_->json.dump(indent, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace headroom
