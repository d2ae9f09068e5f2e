#pragma once

// Classes by name and by number.

#include <cstdint>
#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

namespace headroom {

/// The names of classes; a name's place is the class's number. As a model's config.json has them in
/// id2label.
using LabelNames = std::vector<std::string>;

/// Gives the labels of data their numbers.
class LabelMap {
 public:
  explicit LabelMap(LabelNames names);

  const LabelNames& names() const { return names_; }
  bool has(const std::string& label) const { return numbers_.count(label) != 0; }
  std::int64_t number(const std::string& label) const { return numbers_.at(label); }

 private:
  LabelNames names_;
  std::unordered_map<std::string, std::int64_t> numbers_;
};

/// The classes of data that has these labels, each at least once. Those of the model are taken
/// where they include all labels of the data; a model without names of its own (LABEL_0, LABEL_1,
/// ...) is meant by whole numbers. Otherwise they are the labels themselves: whole numbers by size,
/// or else names in the order of their bytes. With `must_be_known`, because the model is not
/// trained, calls refuse(label), which must throw, for a label that the model does not have.
LabelMap map_labels(const std::vector<std::string>& labels, const LabelNames& of_model,
                    bool must_be_known, const std::function<void(const std::string&)>& refuse);

}  // namespace headroom
