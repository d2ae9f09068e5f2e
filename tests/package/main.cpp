// A program that knows nothing but the installed package: parses, plans, trains one step.
#include <headroom/headroom.h>

#include <cstdio>

int main() {
  headroom::ZooModel model = headroom::make_model("mlp", "hidden=16,layers=1,rows=4,columns=4");
  headroom::TrainingArguments arguments;
  arguments.output_dir = "package_test_output";
  arguments.max_steps = 2;
  arguments.disable_tqdm = true;
  std::shared_ptr<const headroom::Dataset> data =
      headroom::make_synthetic_images(32, 1, 4, 4, 10, 1);
  headroom::Trainer trainer(arguments, model.chain, data);
  const headroom::TrainResults results = trainer.train();
  std::printf("headroom %s: %lld updates, loss %.4f\n", headroom::kVersion,
              static_cast<long long>(results.global_step), results.final_loss);
  return results.global_step == 2 && headroom::parse_bytes("1KiB") == 1024 ? 0 : 1;
}
