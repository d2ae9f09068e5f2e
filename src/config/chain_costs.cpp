#include <headroom/config/chain_costs.h>

#include <headroom/core/error.h>
#include "core/input_file.h"
#include "core/nearest_name.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <utility>

namespace headroom {
namespace {

using nlohmann::json;

/// The planner's sums of times stay below this, so that adding three of them cannot overflow.
constexpr std::int64_t kMaxTotalNs = std::int64_t{1} << 61;

/// A product that is meant to be whole (0.1 * 30) must not become the next integer.
constexpr double kRoundingSlack = 1e-6;

/// Reads one JSON object, key by key, and says where it was when something is wrong.
class ObjectReader {
 public:
  ObjectReader(const json& object, std::string where, const std::vector<std::string>& known_keys)
      : object_(object), where_(std::move(where)) {
    if (!object.is_object())
      throw ConfigError(fmt::format("{} must be an object, not {}", where_, object.type_name()));
    for (const auto& item : object.items()) {
      if (std::find(known_keys.begin(), known_keys.end(), item.key()) != known_keys.end()) continue;
      const std::string key = item.key().substr(0, 64);
      throw ConfigError(fmt::format("{} has the unknown key '{}'; did you mean '{}'?", where_, key,
                                    nearest_name(key, known_keys)));
    }
  }

  std::int64_t integer(const char* key, std::int64_t max) const {
    const auto found = object_.find(key);
    if (found == object_.end()) return 0;
    if (!found->is_number())
      throw ConfigError(
          fmt::format("{}: {} must be a number, not {}", where_, key, found->type_name()));
    const double value = found->get<double>();
    if (!(value >= 0))
      throw ConfigError(
          fmt::format("{}: {} is {}, but must not be negative", where_, key, found->dump()));
    if (value > static_cast<double>(max))
      throw ConfigError(
          fmt::format("{}: {} is {}, above the limit of {}", where_, key, found->dump(), max));
    if (value != std::floor(value))
      throw ConfigError(
          fmt::format("{}: {} is {}, but must be a whole number", where_, key, found->dump()));
    return static_cast<std::int64_t>(value);
  }

  double real(const char* key, double absent) const {
    const auto found = object_.find(key);
    if (found == object_.end()) return absent;
    if (!found->is_number())
      throw ConfigError(
          fmt::format("{}: {} must be a number, not {}", where_, key, found->type_name()));
    return found->get<double>();
  }

  std::string text(const char* key, std::string absent) const {
    const auto found = object_.find(key);
    if (found == object_.end()) return absent;
    if (!found->is_string())
      throw ConfigError(
          fmt::format("{}: {} must be a string, not {}", where_, key, found->type_name()));
    return found->get<std::string>();
  }

  /// Calls `read(element, "where key[i]")` for every element of the list.
  template <typename Read>
  void each(const char* key, Read read) const {
    const auto found = object_.find(key);
    if (found == object_.end()) return;
    if (!found->is_array())
      throw ConfigError(
          fmt::format("{}: {} must be a list, not {}", where_, key, found->type_name()));
    std::size_t index = 0;
    for (const json& element : *found)
      read(element, fmt::format("{}: {}[{}]", where_, key, index++));
  }

 private:
  const json& object_;
  std::string where_;
};

StageOption read_option(const json& value, const std::string& where) {
  const ObjectReader reader(value, where,
                            {"kept_bytes", "forward_ns", "backward_ns", "forward_transient_bytes",
                             "backward_transient_bytes"});
  StageOption option;
  option.kept_bytes = reader.integer("kept_bytes", kMaxChainBytes);
  option.forward_ns = reader.integer("forward_ns", kMaxChainNs);
  option.backward_ns = reader.integer("backward_ns", kMaxChainNs);
  option.forward_transient_bytes = reader.integer("forward_transient_bytes", kMaxChainBytes);
  option.backward_transient_bytes = reader.integer("backward_transient_bytes", kMaxChainBytes);
  return option;
}

CarriedBytes read_carried(const json& value, const std::string& where) {
  const ObjectReader reader(value, where, {"stages_back", "bytes"});
  return {static_cast<int>(reader.integer("stages_back", kMaxChainStages)),
          reader.integer("bytes", kMaxChainBytes)};
}

StageCosts read_stage(const json& value, const std::string& where, std::size_t number) {
  const ObjectReader reader(
      value, where,
      {"name", "output_bytes", "grad_bytes", "forward_ns", "forward_transient_bytes",
       "param_grad_bytes", "carried", "carried_grad_bytes", "options"});
  StageCosts stage;
  stage.name = reader.text("name", fmt::format("stage {}", number));
  stage.output_bytes = reader.integer("output_bytes", kMaxChainBytes);
  stage.grad_bytes = reader.integer("grad_bytes", kMaxChainBytes);
  stage.forward_ns = reader.integer("forward_ns", kMaxChainNs);
  stage.forward_transient_bytes = reader.integer("forward_transient_bytes", kMaxChainBytes);
  stage.param_grad_bytes = reader.integer("param_grad_bytes", kMaxChainBytes);
  stage.carried_grad_bytes = reader.integer("carried_grad_bytes", kMaxChainBytes);
  reader.each("carried", [&](const json& carried, const std::string& at) {
    stage.carried.push_back(read_carried(carried, at));
  });
  reader.each("options", [&](const json& option, const std::string& at) {
    stage.options.push_back(read_option(option, at));
  });
  return stage;
}

BoundaryFormat read_format(const json& value, const std::string& where) {
  const ObjectReader reader(value, where,
                            {"name", "size_ratio", "encode_ns_per_byte", "decode_ns_per_byte",
                             "encode_overlap", "decode_overlap"});
  BoundaryFormat format;
  format.name = reader.text("name", "");
  format.size_ratio = reader.real("size_ratio", 0);
  format.encode_ns_per_byte = reader.real("encode_ns_per_byte", 0);
  format.decode_ns_per_byte = reader.real("decode_ns_per_byte", 0);
  format.encode_overlap = reader.real("encode_overlap", 0);
  format.decode_overlap = reader.real("decode_overlap", 0);
  return format;
}

void check(const std::string& where, const char* name, std::int64_t value, std::int64_t max) {
  if (value < 0)
    throw ConfigError(fmt::format("{}: {} is {}, but must not be negative", where, name, value));
  if (value > max)
    throw ConfigError(fmt::format("{}: {} is {}, above the limit of {}", where, name, value, max));
}

void validate_stage(const StageCosts& stage, const std::string& where) {
  check(where, "output_bytes", stage.output_bytes, kMaxChainBytes);
  check(where, "grad_bytes", stage.grad_bytes, kMaxChainBytes);
  check(where, "forward_ns", stage.forward_ns, kMaxChainNs);
  check(where, "forward_transient_bytes", stage.forward_transient_bytes, kMaxChainBytes);
  check(where, "param_grad_bytes", stage.param_grad_bytes, kMaxChainBytes);
  check(where, "carried_grad_bytes", stage.carried_grad_bytes, stage.grad_bytes);
  std::int64_t carried_bytes = 0;
  for (const CarriedBytes& carried : stage.carried) {
    if (carried.stages_back < 1)
      throw ConfigError(
          fmt::format("{}: stages_back is {}, but must be at least 1", where, carried.stages_back));
    check(where, "carried bytes", carried.bytes, stage.output_bytes);
    carried_bytes = std::min(carried_bytes + carried.bytes, kMaxChainBytes + 1);
  }
  check(where, "the sum of carried bytes", carried_bytes, stage.output_bytes);
  if (stage.options.empty())
    throw ConfigError(
        fmt::format("{} has no options; give at least one way to keep what backward needs", where));
  for (const StageOption& option : stage.options) {
    check(where, "kept_bytes", option.kept_bytes, kMaxChainBytes);
    check(where, "option forward_ns", option.forward_ns, kMaxChainNs);
    check(where, "backward_ns", option.backward_ns, kMaxChainNs);
    check(where, "option forward_transient_bytes", option.forward_transient_bytes, kMaxChainBytes);
    check(where, "backward_transient_bytes", option.backward_transient_bytes, kMaxChainBytes);
  }
}

void validate_formats(const ChainCosts& chain) {
  for (std::size_t i = 0; i < chain.boundary_formats.size(); ++i) {
    const BoundaryFormat& format = chain.boundary_formats[i];
    if (format.name.empty()) throw ConfigError(fmt::format("boundary_formats[{}] has no name", i));
    if (format.name == "full")
      throw ConfigError("the boundary format 'full' is always there and cannot be defined");
    for (std::size_t j = 0; j < i; ++j) {
      if (chain.boundary_formats[j].name == format.name)
        throw ConfigError(fmt::format("boundary format '{}' is defined twice", format.name));
    }
    const std::pair<const char*, double> values[] = {
        {"size_ratio", format.size_ratio},
        {"encode_ns_per_byte", format.encode_ns_per_byte},
        {"decode_ns_per_byte", format.decode_ns_per_byte},
        {"encode_overlap", format.encode_overlap},
        {"decode_overlap", format.decode_overlap}};
    for (const auto& [name, value] : values) {
      if (!(value >= 0) || !std::isfinite(value)) {
        throw ConfigError(
            fmt::format("boundary format '{}': {} is {}, but must be a number from 0 up",
                        format.name, name, value));
      }
    }
    for (const StageCosts& stage : chain.stages) {
      const auto bytes = static_cast<double>(stage.output_bytes);
      if (format.size_ratio * bytes > static_cast<double>(kMaxChainBytes)) {
        throw ConfigError(fmt::format(
            "boundary format '{}': size_ratio {} makes {} bytes of '{}' exceed the limit of {} "
            "bytes",
            format.name, format.size_ratio, stage.output_bytes, stage.name, kMaxChainBytes));
      }
      if ((format.encode_ns_per_byte + format.decode_ns_per_byte) * bytes >
          static_cast<double>(kMaxChainNs)) {
        throw ConfigError(fmt::format(
            "boundary format '{}': {} bytes of '{}' take longer than the limit of {} ns",
            format.name, stage.output_bytes, stage.name, kMaxChainNs));
      }
    }
  }
}

/// Bounds all stages kept at once, and with it every sum that the planner forms.
void validate_total_bytes(const ChainCosts& chain) {
  double total = 0;
  for (const StageCosts& stage : chain.stages) {
    std::int64_t most = 0;
    for (const StageOption& option : stage.options) most = std::max(most, option.kept_bytes);
    total += static_cast<double>(most) + static_cast<double>(stage.param_grad_bytes);
  }
  if (total >= static_cast<double>(std::int64_t{1} << 61)) {
    throw ConfigError(fmt::format(
        "the sizes of the {} stages add up to more than the planner can count (2^61 bytes)",
        chain.stages.size()));
  }
}

/// A schedule runs no stage forward more often than the chain is long, so this bounds every time
/// that the planner can meet.
void validate_total_time(const ChainCosts& chain) {
  const auto num_stages = static_cast<double>(chain.stages.size());
  double total = 0;
  for (const StageCosts& stage : chain.stages) {
    double slowest = 0;
    for (const StageOption& option : stage.options) {
      slowest = std::max(slowest, static_cast<double>(option.forward_ns) +
                                      static_cast<double>(option.backward_ns));
    }
    double convert = 0;
    for (const BoundaryFormat& format : chain.boundary_formats) {
      convert = std::max(convert, (format.encode_ns_per_byte + 2 * format.decode_ns_per_byte) *
                                      static_cast<double>(stage.output_bytes));
    }
    total += slowest + num_stages * (static_cast<double>(stage.forward_ns) + convert);
  }
  if (total >= static_cast<double>(kMaxTotalNs)) {
    throw ConfigError(
        fmt::format("the times of the {} stages add up to more than the planner can count (2^61 "
                    "ns); give them in ns",
                    chain.stages.size()));
  }
}

}  // namespace

std::int64_t BoundaryFormat::stored_bytes(std::int64_t full_bytes) const {
  return static_cast<std::int64_t>(
      std::ceil(size_ratio * static_cast<double>(full_bytes) - kRoundingSlack));
}

std::int64_t BoundaryFormat::encode_ns(std::int64_t full_bytes,
                                       std::int64_t next_forward_ns) const {
  const double hidden_ns = std::min(encode_overlap, 1.0) * static_cast<double>(next_forward_ns);
  return std::max<std::int64_t>(
      0, std::llround(encode_ns_per_byte * static_cast<double>(full_bytes) - hidden_ns));
}

std::int64_t BoundaryFormat::decode_ns(std::int64_t full_bytes) const {
  return std::llround(decode_ns_per_byte * static_cast<double>(full_bytes));
}

void validate(const ChainCosts& chain) {
  if (chain.stages.empty()) throw ConfigError("the chain has no stages; give at least one");
  if (chain.stages.size() > static_cast<std::size_t>(kMaxChainStages)) {
    throw ConfigError(fmt::format("the chain has {} stages, above the limit of {}; join some",
                                  chain.stages.size(), kMaxChainStages));
  }
  for (std::size_t i = 0; i < chain.stages.size(); ++i) {
    validate_stage(chain.stages[i], fmt::format("stage {} ('{}')", i + 1, chain.stages[i].name));
  }
  check("chain", "input_grad_bytes", chain.input_grad_bytes, kMaxChainBytes);
  validate_formats(chain);
  validate_total_bytes(chain);
  validate_total_time(chain);
}

ChainCosts parse_chain_text(std::string_view text, const std::string& source) {
  if (!json_depth_is_allowed(text))
    throw ConfigError(fmt::format("{}: its JSON is nested deeper than {}", source, kMostJsonDepth));
  json document;
  try {
    document = json::parse(text);
  } catch (const json::exception& error) {
    throw ConfigError(fmt::format("{} is not JSON: {}", source, error.what()));
  }
  const ObjectReader reader(document, source, {"stages", "input_grad_bytes", "boundary_formats"});
  ChainCosts chain;
  reader.each("stages", [&](const json& stage, const std::string& where) {
    chain.stages.push_back(read_stage(stage, where, chain.stages.size() + 1));
  });
  chain.input_grad_bytes = reader.integer("input_grad_bytes", kMaxChainBytes);
  reader.each("boundary_formats", [&](const json& format, const std::string& where) {
    chain.boundary_formats.push_back(read_format(format, where));
  });
  try {
    validate(chain);
  } catch (const ConfigError& error) {
    throw ConfigError(fmt::format("{}: {}", source, error.what()));
  }
  return chain;
}

ChainCosts read_chain_file(const std::string& path) {
  return parse_chain_text(read_json_text(path), shown_path(path));
}

}  // namespace headroom
