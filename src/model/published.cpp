#include "model/published.h"

#include <headroom/core/error.h>
#include <headroom/model/adapters.h>
#include <headroom/model/pretrained.h>
#include <headroom/model/safetensors.h>
#include "core/hashed_file.h"
#include "model/adapter_folder.h"
#include "model/published_parts.h"
#include "model/safetensors_writer.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>

namespace headroom {
namespace {

namespace fs = std::filesystem;
using Tensors = std::vector<std::pair<std::string, at::Tensor>>;

constexpr const char* kSizesKey = "model_config";

struct Match {
  std::string number;  // what "*" stands for
  std::string rest;    // of the name, with its dot
};

// "block*.mlp" fits "block12.mlp.c_fc.weight".
std::optional<Match> match(const std::string& row, const std::string& name) {
  Match found;
  std::size_t at = 0;
  for (const char c : row) {
    if (c != '*') {
      if (at >= name.size() || name[at] != c) return std::nullopt;
      ++at;
      continue;
    }
    while (at < name.size() && name[at] >= '0' && name[at] <= '9') found.number += name[at++];
    if (found.number.empty()) return std::nullopt;
  }
  if (at < name.size() && name[at] != '.') return std::nullopt;
  found.rest = name.substr(at);
  return found;
}

std::string filled(std::string theirs, const Match& match) {
  const std::size_t star = theirs.find('*');
  if (star != std::string::npos) theirs.replace(star, 1, match.number);
  return theirs + match.rest;
}

// Calls body(row or null, their names) for a parameter of ours.
template <typename Body>
void with_row(const PublishedForm& form, const std::string& ours, const Body& body) {
  for (const PublishedRow& row : form.rows) {
    const std::optional<Match> found = match(row.ours, ours);
    if (!found) continue;
    std::vector<std::string> names;
    for (const std::string& theirs : row.theirs) names.push_back(filled(theirs, *found));
    return body(&row, names);
  }
  body(nullptr, std::vector<std::string>{ours});
}

// Their names with the rows of each, of so many of ours.
std::vector<PublishedPart> parts_of(const PublishedRow* row, const std::vector<std::string>& names,
                                    std::int64_t num_rows) {
  std::vector<PublishedPart> parts;
  const auto count = static_cast<std::int64_t>(names.size());
  std::int64_t begin = 0;
  for (std::size_t i = 0; i < names.size(); ++i) {
    const bool are_equal = row == nullptr || row->rows.empty() || names.size() == 1;
    const std::int64_t size = are_equal ? num_rows / count : row->rows[i];
    parts.push_back({names[i], begin, size, row != nullptr && row->is_transposed});
    begin += size;
  }
  return parts;
}

bool holds(const fs::path& path, const std::string& text) {
  std::ifstream file(path, std::ios::binary);
  return file && std::string(std::istreambuf_iterator<char>(file), {}) == text;
}

thread_local bool is_uninitialized = false;

}  // namespace

std::vector<std::string> published_names(const PublishedForm& form, const std::string& ours) {
  std::vector<std::string> result;
  with_row(form, ours, [&](const PublishedRow*, const auto& names) { result = names; });
  return result;
}

std::vector<PublishedPart> published_parts(const PublishedForm& form, const std::string& ours,
                                           std::int64_t num_rows) {
  std::vector<PublishedPart> parts;
  with_row(form, ours, [&](const PublishedRow* row, const auto& names) {
    parts = parts_of(row, names, num_rows);
  });
  return parts;
}

Tensors published_tensors(const PublishedForm& form, const Chain& chain) {
  Tensors all;
  const std::string adapter = fmt::format(".{}.", kAdapterModule);
  for (const auto& [ours, parameter] : chain.named_tensors()) {
    if (ours.find(adapter) != std::string::npos) continue;
    const at::Tensor tensor = parameter.detach();
    with_row(form, ours, [&](const PublishedRow* row, const std::vector<std::string>& names) {
      at::Tensor whole = tensor;
      if (row != nullptr && !row->shape.empty()) whole = whole.view(row->shape);
      if (row != nullptr && row->is_transposed && whole.dim() == 2) whole = whole.t();
      if (names.size() == 1) {
        all.emplace_back(names.front(), whole);
        return;
      }
      for (const PublishedPart& part : parts_of(row, names, whole.size(0)))
        all.emplace_back(part.name, whole.narrow(0, part.first_row, part.num_rows));
    });
  }
  return all;
}

SavedModel PublishedFormat::save(const Chain& chain, const std::string& folder) const {
  const fs::path config = fs::path(folder) / "config.json",
                 weights = fs::path(folder) / "model.safetensors";
  OutputFile config_file(config.string());
  HashedFile weights_file(weights.string());
  config_file.write(form_.config);
  write_safetensors(weights_file, published_tensors(form_, chain));
  // Weights of another model must not stand beside this one's config.json, were we stopped here.
  if (!holds(config, form_.config)) {
    std::error_code ignored;
    fs::remove(weights, ignored);
  }
  config_file.commit();
  const std::string hash = weights_file.commit().sha256;
  sync_folder(folder, throw_as<ConfigError>);
  return {weights.filename().string(), hash};
}

PublishedForm make_own_form(const std::string& model_type, const std::string& sizes) {
  ConfigFile file;
  file.set_kind("headroom", model_type);
  std::string text = sizes;
  file.word(kSizesKey, text, "");
  PublishedForm form;
  form.config = file.text();
  return form;
}

std::string own_model_type(const std::string& family) { return "headroom-" + family; }

std::string own_sizes(ConfigFile& file) {
  std::string sizes;
  file.word(kSizesKey, sizes, "");
  return sizes;
}

void set_published_form(Chain& chain, PublishedForm form) {
  chain.set_format(std::make_shared<PublishedFormat>(std::move(form)));
}

void set_label_names(Chain& chain, const std::vector<std::string>& names,
                     std::optional<std::int64_t> padding_token) {
  const PublishedForm* found = find_published_form(chain);
  if (found == nullptr) return;
  PublishedForm form = *found;
  ConfigFile file = ConfigFile::of_text(form.config);
  file.set_label_names(names);
  if (padding_token) file.set_integer("pad_token_id", *padding_token);
  form.config = file.text();
  const auto* derived = dynamic_cast<const DerivedFormat*>(chain.format().get());
  if (derived != nullptr) {
    chain.set_format(derived->with_form(std::move(form)));
  } else {
    set_published_form(chain, std::move(form));
  }
}

std::vector<std::string> label_names_of(const std::string& folder) {
  if (is_adapter_folder(folder)) return label_names_of(base_of_adapters(folder));
  return ConfigFile::read((fs::path(folder) / "config.json").string()).label_names();
}

const PublishedForm* find_published_form(const Chain& chain) {
  const auto* derived = dynamic_cast<const DerivedFormat*>(chain.format().get());
  const auto* format = derived != nullptr
                           ? &derived->base()
                           : dynamic_cast<const PublishedFormat*>(chain.format().get());
  return format != nullptr ? &format->form() : nullptr;
}

const PublishedForm& published_form(const Chain& chain) {
  const PublishedForm* form = find_published_form(chain);
  if (form == nullptr) throw ConfigError("this chain is no model of the zoo");
  return *form;
}

UninitializedScope::UninitializedScope() : before_(std::exchange(is_uninitialized, true)) {}
UninitializedScope::~UninitializedScope() { is_uninitialized = before_; }
bool UninitializedScope::is_active() { return is_uninitialized; }

}  // namespace headroom
