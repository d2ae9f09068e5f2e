#pragma once

#include "model/published.h"

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace headroom {

/// Rows of a matrix of ours that are a tensor of theirs.
struct PublishedPart {
  std::string name;  ///< theirs
  std::int64_t first_row = 0;
  std::int64_t num_rows = 0;
  bool is_transposed = false;  ///< theirs is (in, out)
};

/// What of theirs the parameter `ours` with so many rows consists of.
std::vector<PublishedPart> published_parts(const PublishedForm& form, const std::string& ours,
                                           std::int64_t num_rows);

/// What holds the adapters of a stage in its module: they are no part of the published model.
inline constexpr const char* kAdapterModule = "lora";

/// A format that saves something else of a model that has a published form.
class DerivedFormat : public ModelFormat {
 public:
  explicit DerivedFormat(PublishedForm form) : base_(std::move(form)) {}
  const PublishedFormat& base() const { return base_; }
  /// The same of a model of another form.
  virtual std::shared_ptr<const DerivedFormat> with_form(PublishedForm form) const = 0;

 private:
  PublishedFormat base_;
};

/// The form of a chain, that of the model below a derived one included; null: it has none.
const PublishedForm* find_published_form(const Chain& chain);

}  // namespace headroom
