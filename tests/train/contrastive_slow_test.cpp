// The small CLIP of the zoo with a global batch of 256, in one piece and in 16.
#include "core/log.h"

#include <gtest/gtest.h>

#include "train/budget_runs.h"

namespace headroom {
namespace {

struct Trained {
  TrainResults results;
  std::vector<at::Tensor> weights;
};

Trained train_small_clip(std::int64_t micro_batch, std::int64_t budget_bytes) {
  const ScratchFolder folder("small_clip");
  MemoryMeter::instance().set_cap(0);
  TrainingArguments arguments =
      arguments_of({"clip", "", 256, micro_batch, "sgd"}, budget_bytes, folder.path());
  arguments.learning_rate = 0.1;
  arguments.max_steps = 3;
  seed_everything(1);
  const ZooModel model = make_model("clip", "");
  Trained trained{Trainer(arguments, model.chain, data_for(model.input)).train(), {}};
  for (const at::Tensor& parameter : model.chain.parameters())
    trained.weights.push_back(parameter.detach());
  MemoryMeter::instance().set_cap(0);
  return trained;
}

TEST(SmallClip, TrainsItsLargeBatchInTheMemoryOfASmallOne) {
  set_log_quiet(true);
  const Trained whole = train_small_clip(256, 0), parts = train_small_clip(16, 0);
  for (std::size_t i = 0; i < whole.weights.size(); ++i) {
    const at::Tensor& weight = whole.weights[i];
    EXPECT_LE((parts.weights[i] - weight).abs().max().item<double>(),
              1e-5 * weight.abs().max().item<double>())
        << i;
  }
  EXPECT_LT(4 * parts.results.peak_memory_bytes, whole.results.peak_memory_bytes);
  const Trained planned = train_small_clip(16, parts.results.peak_memory_bytes / 2);
  EXPECT_EQ(planned.results.weights_sha256, parts.results.weights_sha256);
  // Where bytes were counted, the scalars that operators make of numbers are counted as well.
  constexpr std::int64_t kScalarBytes = 64;
  EXPECT_LE(planned.results.peak_memory_bytes, planned.results.predicted_peak_bytes);
  EXPECT_LE(planned.results.predicted_peak_bytes, planned.results.peak_memory_bytes + kScalarBytes);
}

}  // namespace
}  // namespace headroom
