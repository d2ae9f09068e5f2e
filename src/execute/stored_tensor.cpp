#include "execute/stored_tensor.h"

#include "ops/convert.h"

#include <torch/types.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace headroom {
namespace {

bool is_float(at::ScalarType type) { return type == at::kFloat || type == at::kDouble; }

template <at::ScalarType kType>
std::shared_ptr<const Stored> store_half(const at::Tensor& flat,
                                         const std::shared_ptr<SpillFile>& /*file*/) {
  return std::make_shared<InHalf>(flat.scalar_type(), convert(flat, kType));
}

}  // namespace

InHalf::InHalf(at::ScalarType dtype, at::Tensor flat_half)
    : dtype_(dtype), half_(std::move(flat_half)) {}

at::Tensor InHalf::restore() const { return convert(half_, dtype_); }

std::int64_t InHalf::num_bytes() const { return static_cast<std::int64_t>(half_.nbytes()); }

OnDisk::OnDisk(const at::Tensor& flat, std::shared_ptr<SpillFile> file)
    : file_(std::move(file)),
      options_(flat.options()),
      num_elements_(flat.numel()),
      num_bytes_(flat.nbytes()) {
  offset_ = file_->write(flat.cpu().data_ptr(), num_bytes_);
}

OnDisk::~OnDisk() { file_->release(offset_, num_bytes_); }

at::Tensor OnDisk::restore() const {
  const at::Tensor flat = at::empty({num_elements_}, options_.device(at::kCPU));
  file_->read(offset_, flat.data_ptr(), num_bytes_);
  return flat.to(options_.device());
}

std::int64_t OnDisk::num_bytes() const { return static_cast<std::int64_t>(num_bytes_); }

const KeptFormat& kept_format(KeepAs format) {
  static const std::vector<KeptFormat> table = {
      {KeepAs::kBf16, "bf16", 0.5, false, false, is_float, store_half<at::kBFloat16>},
      {KeepAs::kFp16, "fp16", 0.5, false, false, is_float, store_half<at::kHalf>},
      {KeepAs::kDisk, "disk", 0.0, true, true, [](at::ScalarType) { return true; },
       [](const at::Tensor& flat, const std::shared_ptr<SpillFile>& file) {
         return std::shared_ptr<const Stored>(std::make_shared<OnDisk>(flat, file));
       }},
  };
  return *std::find_if(table.begin(), table.end(),
                       [&](const KeptFormat& row) { return row.format == format; });
}

std::shared_ptr<SpillFile> KeptFormat::make_file(const std::string& folder) const {
  return needs_file ? std::make_shared<SpillFile>(folder) : nullptr;
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
