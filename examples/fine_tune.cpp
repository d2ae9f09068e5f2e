// Start from a model in a folder, train it on a text, save it, and let it write.
//
//   example_fine_tune [FOLDER TEXT]
//
// FOLDER is what Hugging Face calls a model's files: config.json and model.safetensors. Without
// one, a small model of bytes is made and saved first, and learns a sentence.
#include <headroom/headroom.h>

#include <headroom/data/tokenizer.h>
#include <headroom/data/tokens.h>

#include <cstdio>
#include <fstream>
#include <string>

int main(int argc, char** argv) {
  headroom::MemoryMeter::instance();  // counts every tensor from here on
  std::string folder = "fine_tune_start", text = "fine_tune.txt";
  if (argc == 3) {
    folder = argv[1];
    text = argv[2];
  } else {
    headroom::seed_everything(1);
    headroom::save_pretrained(
        headroom::make_model("gpt", "n_layer=2,n_head=2,n_embd=64,block_size=32").chain, folder);
    std::ofstream file(text);
    for (int i = 0; i < 200; ++i) file << "the quick brown fox jumps over the lazy dog. ";
  }

  // 1. Load: config.json says what the model is; the weights go straight into place.
  const headroom::ZooModel model = headroom::load_pretrained(folder);

  // 2. Train on random crops of the text.
  const std::int64_t length = model.input.length;
  std::shared_ptr<const headroom::Dataset> data = headroom::make_random_crops(
      headroom::open_text_file(text), length, model.input.vocabulary, /*num_samples=*/1000,
      /*seed=*/1);
  headroom::TrainingArguments arguments;
  arguments.max_steps = 120;
  arguments.learning_rate = 3e-3;
  arguments.disable_tqdm = true;
  arguments.output_dir = "fine_tuned";
  const headroom::TrainResults results = headroom::Trainer(arguments, model.chain, data).train();
  std::printf("loss %.4f after %lld updates\n", results.final_loss,
              static_cast<long long>(results.global_step));

  // 3. Save. (The trainer left the same model in arguments.output_dir already.)
  const headroom::SavedModel saved = headroom::save_pretrained(model.chain, "fine_tuned");
  std::printf("fine_tuned/%s, SHA-256 %s\n", saved.file.c_str(), saved.sha256.c_str());

  // 4. Load what was saved, and generate.
  const headroom::ZooModel tuned = headroom::load_pretrained("fine_tuned");
  const auto tokenizer = headroom::make_byte_tokenizer();
  headroom::GenerateOptions options;
  options.num_tokens = 60;
  options.temperature = 0.0;
  const std::string said =
      tokenizer->decode(headroom::generate(tuned.chain, tokenizer->encode("the quick"), options));
  std::printf("the quick%s\n", said.c_str());
  return argc == 3 || said.find("brown fox") != std::string::npos ? 0 : 1;
}
