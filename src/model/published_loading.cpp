#include "model/published.h"

#include <headroom/core/error.h>
#include <headroom/model/safetensors.h>
#include "core/log.h"
#include "core/name_list.h"
#include "core/name_pattern.h"
#include "core/text.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <algorithm>
#include <set>

namespace headroom {
namespace {

constexpr double kHeadDeviation = 0.02;

// Older files call a norm's weight and bias gamma and beta.
std::string with_old_ending(const std::string& name) {
  for (const auto& [now, before] : {std::pair{"LayerNorm.weight", "LayerNorm.gamma"},
                                    std::pair{"LayerNorm.bias", "LayerNorm.beta"}}) {
    const std::size_t length = std::string(now).size();
    if (name.size() >= length && name.compare(name.size() - length, length, now) == 0)
      return name.substr(0, name.size() - length) + before;
  }
  return name;
}

/// What a folder's tensors are to a model.
class Loading {
 public:
  Loading(const PublishedForm& form, const Chain& chain, const std::string& folder)
      : form_(form), folder_(folder), reader_(folder), tensors_(published_tensors(form, chain)) {
    std::vector<std::string> missing;
    for (const auto& [name, view] : tensors_) {
      const SafetensorsEntry* entry = find(name);
      const bool is_replaced = form.replaces_head && entry != nullptr && is_head(name) &&
                               view.sizes() != at::IntArrayRef(entry->shape);
      if (is_replaced) entry = nullptr;
      entries_.push_back(entry);
      if (entry != nullptr) {
        check(*entry, view);
      } else if (is_head(name)) {
        missing_head_.push_back(name);
      } else {
        missing.push_back(name);
      }
    }
    if (!missing.empty()) throw DataError(fmt::format("'{}' lacks {}", folder, name_list(missing)));
    for (const auto& [second, first] : form.ties) {
      if (const SafetensorsEntry* entry = find(second); entry != nullptr)
        ties_.emplace_back(entry, first);
    }
    refuse_others();
  }

  void run() {
    const torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      const auto& [name, view] = tensors_[i];
      if (entries_[i] != nullptr) {
        reader_.read(*entries_[i], view);
      } else if (view.dim() >= 2) {
        at::Tensor(view).normal_(0.0, kHeadDeviation);  // norms and biases have their values
      }
    }
    for (const auto& [entry, first] : ties_) check_tie(*entry, first);
    if (!missing_head_.empty()) {
      log_info(fmt::format("'{}' has no {}{}: initialised at random, to be trained", folder_,
                           name_list(missing_head_),
                           form_.replaces_head ? " for these classes" : ""));
    }
  }

 private:
  const SafetensorsEntry* find(const std::string& name) {
    std::vector<std::string> names = {name, with_old_ending(name)};
    if (!form_.base.empty() && starts_with(name, form_.base)) {
      names.push_back(name.substr(form_.base.size()));
      names.push_back(with_old_ending(names.back()));
    }
    for (const std::string& one : names) {
      const SafetensorsEntry* entry = reader_.find(one);
      if (entry == nullptr) continue;
      used_.insert(one);
      return entry;
    }
    return nullptr;
  }

  bool is_head(const std::string& name) const {
    return std::any_of(form_.head.begin(), form_.head.end(),
                       [&](const std::string& start) { return starts_with(name, start); });
  }

  void check(const SafetensorsEntry& entry, const at::Tensor& view) const {
    if (view.sizes() != at::IntArrayRef(entry.shape)) {
      throw DataError(fmt::format("'{}' in '{}' is ({}), but config.json makes it ({})", entry.name,
                                  folder_, fmt::join(entry.shape, ", "),
                                  fmt::join(view.sizes(), ", ")));
    }
    if (c10::isFloatingType(entry.dtype) != view.is_floating_point()) {
      throw DataError(fmt::format("'{}' in '{}' is {}, which no weight is", entry.name, folder_,
                                  c10::toString(entry.dtype)));
    }
  }

  void refuse_others() const {
    std::vector<std::string> unexpected, unused;
    for (const SafetensorsEntry& entry : reader_.entries()) {
      if (used_.count(entry.name) != 0) continue;
      const bool is_ignored =
          std::any_of(form_.ignored.begin(), form_.ignored.end(), [&](const std::string& pattern) {
            return fits_pattern(pattern, entry.name) ||
                   fits_pattern(pattern, form_.base + entry.name);
          });
      (is_ignored ? unused : unexpected).push_back(entry.name);
    }
    if (!unexpected.empty()) {
      throw DataError(fmt::format("'{}' has {}, which is no part of the model in its config.json",
                                  folder_, name_list(unexpected)));
    }
    if (!unused.empty()) log_info(fmt::format("'{}': not used: {}", folder_, name_list(unused)));
  }

  void check_tie(const SafetensorsEntry& entry, const std::string& first) const {
    const auto found = std::find_if(tensors_.begin(), tensors_.end(),
                                    [&](const auto& one) { return one.first == first; });
    if (reader_.equals(entry, found->second)) return;
    throw DataError(fmt::format("'{}' in '{}' differs from '{}', to which the model ties it",
                                entry.name, folder_, first));
  }

  const PublishedForm& form_;
  const std::string& folder_;
  SafetensorsReader reader_;
  std::vector<std::pair<std::string, at::Tensor>> tensors_;
  std::vector<const SafetensorsEntry*> entries_;  // of the tensors; null: missing
  std::vector<std::string> missing_head_;
  std::vector<std::pair<const SafetensorsEntry*, std::string>> ties_;
  std::set<std::string> used_;
};

}  // namespace

void load_published(const PublishedForm& form, const Chain& chain, const std::string& folder) {
  Loading(form, chain, folder).run();
}

}  // namespace headroom
