#include "execute/stored_tensor.h"

#include "ops/convert.h"

#include <headroom/core/error.h>

#include <torch/types.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace headroom {
namespace {

bool is_float(at::ScalarType type) { return type == at::kFloat || type == at::kDouble; }

template <at::ScalarType kType>
std::shared_ptr<const Stored> store_half(const at::Tensor& flat,
                                         const std::shared_ptr<SpillStore>& /*store*/) {
  return std::make_shared<InHalf>(flat.scalar_type(), convert(flat, kType));
}

}  // namespace

InHalf::InHalf(at::ScalarType dtype, at::Tensor flat_half)
    : dtype_(dtype), half_(std::move(flat_half)) {}

at::Tensor InHalf::restore() const { return convert(half_, dtype_); }

std::int64_t InHalf::num_bytes() const { return static_cast<std::int64_t>(half_.nbytes()); }

OnDisk::OnDisk(const at::Tensor& flat, std::shared_ptr<SpillStore> store)
    : store_(std::move(store)),
      options_(flat.options()),
      num_elements_(flat.numel()),
      extent_(store_->reserve(static_cast<std::int64_t>(flat.nbytes()))),
      pending_(flat.cpu()),
      version_(static_cast<std::int64_t>(pending_._version())) {
  ticket_ = store_->write(extent_, pending_.data_ptr());
}

OnDisk::~OnDisk() {
  if (pending_.defined()) store_->wait_quietly(ticket_);
  if (incoming_.defined()) store_->wait_quietly(incoming_ticket_);
  store_->release(extent_);
}

void OnDisk::settle() const {
  if (!pending_.defined()) return;
  const at::Tensor written = std::exchange(pending_, at::Tensor());
  store_->wait(ticket_);
  if (static_cast<std::int64_t>(written._version()) == version_) return;
  throw ConfigError(
      "a stage changed its input in place while that was being spilled: write it without in-place "
      "operations on what it is given, or leave out --spill_dir");
}

// Transfers are carried out in order: what is still being written is read afterwards.
void OnDisk::fetch() const {
  if (incoming_.defined()) return;
  incoming_ = at::empty({num_elements_}, options_.device(at::kCPU));
  incoming_ticket_ = store_->read(extent_, incoming_.data_ptr());
}

at::Tensor OnDisk::restore() const {
  settle();
  fetch();
  const at::Tensor flat = std::exchange(incoming_, at::Tensor());
  store_->wait(incoming_ticket_);
  return flat.to(options_.device());
}

const KeptFormat& kept_format(KeepAs format) {
  static const std::vector<KeptFormat> table = {
      {KeepAs::kBf16, "bf16", 0.5, false, false, is_float, store_half<at::kBFloat16>},
      {KeepAs::kFp16, "fp16", 0.5, false, false, is_float, store_half<at::kHalf>},
      {KeepAs::kDisk, "disk", 0.0, true, true, [](at::ScalarType) { return true; },
       [](const at::Tensor& flat, const std::shared_ptr<SpillStore>& store) {
         return std::shared_ptr<const Stored>(std::make_shared<OnDisk>(flat, store));
       }},
  };
  return *std::find_if(table.begin(), table.end(),
                       [&](const KeptFormat& row) { return row.format == format; });
}

std::shared_ptr<SpillStore> KeptFormat::make_store(const std::string& folder) const {
  return needs_store ? std::make_shared<SpillStore>(folder) : nullptr;
}

void PassThroughHooks::call_pack_hook(const at::Tensor& tensor) {
  tensor_ = tensor.detach();
  version_ = tensor._version();
}

at::Tensor PassThroughHooks::call_unpack_hook() {
  TORCH_CHECK(tensor_._version() == version_,
              "one of the variables needed for gradient computation has been modified by an "
              "inplace operation: ",
              tensor_.toString(), " ", tensor_.sizes(), " is at version ", tensor_._version(),
              "; expected version ", version_, " instead");
  return tensor_;
}

}  // namespace headroom
