#include <headroom/data/tokens.h>

#include <headroom/core/error.h>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

namespace headroom {
namespace {

class TokensTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ =
        (std::filesystem::temp_directory_path() / fmt::format("headroom-tokens-{}", ::getpid()))
            .string();
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string write(const std::string& name, const std::string& bytes) const {
    const std::string path = folder_ + "/" + name;
    std::ofstream(path, std::ios::binary) << bytes;
    return path;
  }

  template <class T>
  static std::string bytes_of(const std::vector<T>& values) {
    return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
  }

  static std::vector<std::int64_t> all(const Tokens& tokens) {
    std::vector<std::int64_t> values(static_cast<std::size_t>(tokens->size()));
    tokens->read(0, tokens->size(), values.data());
    return values;
  }

  // The header of llm.c: 256 words.
  static std::string header(std::int32_t magic, std::int32_t count) {
    std::vector<std::int32_t> words(256);
    words[0] = magic;
    words[1] = 1;
    words[2] = count;
    return bytes_of(words);
  }

  std::string folder_;
};

TEST_F(TokensTest, ReadsTokenFilesOfEveryKind) {
  const std::vector<std::int64_t> expected{7, 65535, 0, 300};
  const std::vector<std::uint16_t> narrow{7, 65535, 0, 300};
  const std::vector<std::uint32_t> wide{7, 65535, 0, 300};
  EXPECT_EQ(all(open_token_file(write("nano.bin", bytes_of(narrow)))), expected);
  EXPECT_EQ(all(open_token_file(write("llmc.bin", header(20240520, 4) + bytes_of(narrow)))),
            expected);
  EXPECT_EQ(all(open_token_file(write("llama.bin", header(20240801, 4) + bytes_of(wide)))),
            expected);
}

TEST_F(TokensTest, RefusesFilesThatAreNotWhole) {
  EXPECT_THROW(open_token_file(folder_ + "/missing.bin"), DataError);
  EXPECT_THROW(open_token_file(folder_), DataError);
  EXPECT_THROW(open_token_file(write("empty.bin", "")), DataError);
  EXPECT_THROW(open_token_file(write("odd.bin", "abc")), DataError);
  EXPECT_THROW(open_token_file(write("short.bin", header(20240520, 4) + "abcdef")), DataError);
  EXPECT_THROW(open_text_file(folder_ + "/missing.txt"), DataError);
}

TEST_F(TokensTest, AFileThatShrinksWhileItIsReadIsAnErrorAndNoSignal) {
  const std::string path = write("tokens.bin", std::string(100'000, 'a'));
  const Tokens tokens = open_token_file(path), text = open_text_file(path);
  std::filesystem::resize_file(path, 1000);
  std::vector<std::int64_t> values(10);
  tokens->read(490, 10, values.data());
  EXPECT_EQ(values[9], 0x6161);
  EXPECT_THROW(tokens->read(40'000, 10, values.data()), DataError);
  EXPECT_THROW(text->read(40'000, 10, values.data()), DataError);
}

TEST_F(TokensTest, ReadsTextByBytes) {
  const std::string path = write("text.txt", "a\xc3\xa4\n");
  const std::vector<std::int64_t> expected{97, 0xc3, 0xa4, 10};
  EXPECT_EQ(all(open_text_file(path)), expected);
  const auto tokenizer = make_byte_tokenizer();
  EXPECT_EQ(all(open_text_file(path, *tokenizer)), expected);
  EXPECT_EQ(tokenizer->decode(expected), "a\xc3\xa4\n");
  EXPECT_EQ(tokenizer->vocabulary(), 256);
}

TEST_F(TokensTest, CropsAreRandomButTheSameForASeed) {
  std::string text;
  for (int i = 0; i < 200; ++i) text.push_back(static_cast<char>(i));
  const Tokens tokens = open_text_file(write("count.txt", text));
  const auto data = make_random_crops(tokens, 8, 256, 1000, 3);
  EXPECT_EQ(data->size(), 1000);
  const MicroBatch batch = data->load({0, 1, 2, 999});
  EXPECT_EQ(batch.inputs[0].sizes(), torch::IntArrayRef({4, 8}));
  EXPECT_TRUE(torch::equal(batch.inputs[0] + 1, batch.targets[0]));
  EXPECT_TRUE(torch::equal(batch.inputs[0].slice(1, 1), batch.inputs[0].slice(1, 0, 7) + 1));
  EXPECT_EQ(batch.num_items, 32);
  EXPECT_TRUE(torch::equal(batch.inputs[0][3], data->load({999}).inputs[0][0]));
  EXPECT_FALSE(torch::equal(
      batch.inputs[0], make_random_crops(tokens, 8, 256, 1000, 4)->load({0, 1, 2, 999}).inputs[0]));
  EXPECT_TRUE(data->resamples_each_epoch());
  EXPECT_FALSE(torch::equal(batch.inputs[0], data->load({1000, 1001, 1002, 1999}).inputs[0]))
      << "the next epoch has crops of its own";
  // Every start is reached, the last one included, and none beyond.
  std::vector<std::int64_t> indices(1000);
  for (std::size_t i = 0; i < indices.size(); ++i) indices[i] = static_cast<std::int64_t>(i);
  const at::Tensor starts = data->load(indices).inputs[0].select(1, 0);
  EXPECT_EQ(starts.min().item<std::int64_t>(), 0);
  EXPECT_GE(starts.max().item<std::int64_t>(), 185);
  EXPECT_LE(starts.max().item<std::int64_t>(), 191);
}

TEST_F(TokensTest, CropsInOrderCoverTheText) {
  const Tokens tokens = open_text_file(write("order.txt", "abcdefghij"));
  const auto data = make_crops_in_order(part_of(tokens, 1, 10), 4, 256);
  ASSERT_EQ(data->size(), 2);
  EXPECT_TRUE(torch::equal(data->load({1}).inputs[0][0],
                           torch::tensor({'f', 'g', 'h', 'i'}, torch::kLong)));
  EXPECT_TRUE(torch::equal(data->load({1}).targets[0][0],
                           torch::tensor({'g', 'h', 'i', 'j'}, torch::kLong)));
  EXPECT_THROW(part_of(tokens, 5, 11), DataError);
}

TEST_F(TokensTest, RefusesTooLittleTextAndTooSmallAVocabulary) {
  const Tokens tokens = open_text_file(write("small.txt", "abcd"));
  EXPECT_NO_THROW(make_random_crops(tokens, 3, 256, 1, 0)->load({0}));
  EXPECT_THROW(make_random_crops(tokens, 4, 256, 1, 0), DataError);
  EXPECT_THROW(make_random_crops(tokens, 3, 'd', 1, 0)->load({0}), DataError);
}

MicroBatch masked_samples(std::int64_t count, std::int64_t length, const Masking& masking) {
  std::vector<std::int64_t> indices(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < indices.size(); ++i) indices[i] = static_cast<std::int64_t>(i);
  return make_synthetic_tokens(count, length, 500, 7, masking)->load(indices);
}

TEST_F(TokensTest, MaskedSamplesHideWhatIsToBeGuessed) {
  constexpr std::int64_t kSamples = 400, kLength = 40, kChosen = 6;
  const MicroBatch batch = masked_samples(kSamples, kLength, {kChosen, 499, 3});
  const at::Tensor &tokens = batch.inputs[0], &targets = batch.targets[0],
                   &positions = batch.targets[1];
  EXPECT_EQ(tokens.sizes(), torch::IntArrayRef({kSamples, kLength}));
  EXPECT_EQ(targets.sizes(), torch::IntArrayRef({kSamples, kChosen}));
  EXPECT_EQ(batch.num_items, kSamples * kChosen);
  EXPECT_TRUE(positions.slice(1, 1).gt(positions.slice(1, 0, kChosen - 1)).all().item<bool>())
      << "rising, so that none is there twice";
  // Put back, the chosen tokens make the text, which masking leaves alone elsewhere.
  const at::Tensor plain =
      make_synthetic_tokens(kSamples, kLength, 500, 7)->load({0, 1, 2, 399}).inputs[0];
  EXPECT_TRUE(torch::equal(
      tokens.scatter(1, positions, targets).index_select(0, torch::tensor({0, 1, 2, 399})), plain));
  const at::Tensor shown = tokens.gather(1, positions);
  const auto share = [&](const at::Tensor& which) {
    return which.to(torch::kDouble).mean().item<double>();
  };
  EXPECT_NEAR(share(shown.eq(499)), 0.8, 0.03);
  EXPECT_NEAR(share(shown.eq(targets)), 0.1, 0.03);
  EXPECT_NEAR(share(shown.ne(499).logical_and(shown.ne(targets))), 0.1, 0.03);
  // Every place is chosen about as often as any other.
  const at::Tensor counts = positions.reshape({-1}).bincount({}, kLength);
  EXPECT_GT(counts.min().item<std::int64_t>(), 30);
  EXPECT_LT(counts.max().item<std::int64_t>(), 95);
}

TEST_F(TokensTest, MasksDependOnSeedAndNumberAlone) {
  const Masking masking{3, 499, 3};
  const auto data = make_synthetic_tokens(10, 20, 500, 7, masking);
  const MicroBatch together = data->load({2, 5, 9}), alone = data->load({5});
  EXPECT_TRUE(torch::equal(together.inputs[0][1], alone.inputs[0][0]));
  EXPECT_TRUE(torch::equal(together.targets[1][1], alone.targets[1][0]));
  EXPECT_FALSE(torch::equal(together.targets[1][0], together.targets[1][1]));
  EXPECT_FALSE(torch::equal(
      together.targets[1],
      make_synthetic_tokens(10, 20, 500, 7, Masking{3, 499, 4})->load({2, 5, 9}).targets[1]));
  EXPECT_EQ(data->count_items({2, 5}), 6);
}

TEST_F(TokensTest, CropsCanBeMasked) {
  const Tokens tokens = open_text_file(write("masked.txt", std::string(300, 'a')));
  const Masking masking{2, 256, 1};
  const auto data = make_random_crops(tokens, 10, 257, 50, 3, masking);
  const MicroBatch batch = data->load({0, 49});
  EXPECT_TRUE(batch.targets[0].eq('a').all().item<bool>());
  EXPECT_TRUE(data->resamples_each_epoch());
  EXPECT_FALSE(torch::equal(batch.targets[1], data->load({50, 99}).targets[1]))
      << "the next epoch has masks of its own";
  EXPECT_EQ(make_crops_in_order(tokens, 10, 257, masking)->load({3}).num_items, 2);
}

TEST_F(TokensTest, RefusesMaskingThatDoesNotFit) {
  EXPECT_THROW(make_synthetic_tokens(4, 8, 50, 1, Masking{0, 49, 1}), ConfigError);
  EXPECT_THROW(make_synthetic_tokens(4, 8, 50, 1, Masking{9, 49, 1}), ConfigError);
  EXPECT_THROW(make_synthetic_tokens(4, 8, 50, 1, Masking{1, 50, 1}), ConfigError);
}

// A SentencePiece model as a protobuf, by hand: pieces with scores, all else by default.
std::string small_model() {
  std::string model;
  const auto add = [&](const std::string& text, float score, char type) {
    std::string piece = "\x0a" + std::string(1, static_cast<char>(text.size())) + text + "\x15";
    piece.append(reinterpret_cast<const char*>(&score), sizeof(score));
    piece += "\x18" + std::string(1, type);
    model += "\x0a" + std::string(1, static_cast<char>(piece.size())) + piece;
  };
  add("<unk>", 0.0f, 2);
  add("\xe2\x96\x81low", -1.0f, 1);
  add("er", -2.0f, 1);
  for (const char* letter : {"\xe2\x96\x81", "l", "o", "w", "e", "r"}) add(letter, -5.0f, 1);
  return model;
}

TEST_F(TokensTest, ReadsTextThroughASentencePieceModel) {
  const auto tokenizer = open_sentencepiece(write("small.model", small_model()));
  EXPECT_EQ(tokenizer->vocabulary(), 9);
  const std::vector<std::int64_t> expected{1, 2, 1, 6};
  EXPECT_EQ(tokenizer->encode("lower loww"), expected);
  EXPECT_EQ(tokenizer->decode(expected), "lower loww");
  EXPECT_EQ(all(open_text_file(write("lines.txt", "lower\nloww\n"), *tokenizer)), expected);
  EXPECT_EQ(tokenizer->decode({9, 1, -1, 2}), "lower") << "what is no token is left out";
}

TEST_F(TokensTest, RefusesWhatIsNoSentencePieceModel) {
  EXPECT_THROW(open_sentencepiece(write("bad.model", "nonsense")), DataError);
  EXPECT_THROW(open_sentencepiece(folder_ + "/missing.model"), DataError);
}

}  // namespace
}  // namespace headroom
