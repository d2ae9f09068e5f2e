// Files of data with something wrong in them: one line with the file and the row, exit code 3.
#include "apps/bad_input.h"
#include "support/image_files.h"

namespace headroom::testing {
namespace {

namespace fs = std::filesystem;

class BadDataTest : public BadInputTest {
 protected:
  std::string write(const std::string& name, const std::string& bytes) const {
    const fs::path path = folder_.path() / name;
    fs::create_directories(path.parent_path());
    write_plain(path.string(), bytes);
    return path.string();
  }
  // A folder with a good image in each of two classes.
  std::string make_images(const std::string& name) const {
    for (const char* label : {"cat", "dog"})
      write_png(folder_ / (name + "/train/" + label + "/good.png"), 28, 28, 1,
                shaded(28, 28, 1, 50));
    return folder_ / name;
  }
  // Bad samples are found when they are loaded, and the state before them is saved: the last line
  // says what is wrong.
  void expect_fails(const std::vector<BadInput>& all) {
    for (const BadInput& bad : all) {
      ++num_inputs_;
      const Outcome outcome = run_program(bad.arguments, folder_);
      EXPECT_EQ(outcome.exit_code, bad.exit_code) << outcome.err;
      const std::size_t last = outcome.err.rfind('\n', outcome.err.size() - 2);
      EXPECT_NE(outcome.err.find(bad.part, last == std::string::npos ? 0 : last), std::string::npos)
          << "expected '" << bad.part << "' in the last line of: " << outcome.err;
    }
  }
  std::vector<std::string> classify(const std::string& dataset,
                                    const std::vector<std::string>& more = {}) const {
    std::vector<std::string> words = {"train",
                                      "--model",
                                      "bert",
                                      "--model_config",
                                      "num_hidden_layers=1,hidden_size=8,num_attention_heads=1,"
                                      "intermediate_size=8,max_position_embeddings=16,num_labels=2",
                                      "--dataset",
                                      dataset,
                                      "--output_dir",
                                      folder_ / "out",
                                      "--max_steps",
                                      "2"};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }
  std::vector<std::string> pairs(const std::string& dataset) const {
    return {"train",
            "--model",
            "clip",
            "--model_config",
            "vision_num_hidden_layers=1,text_num_hidden_layers=1",
            "--dataset",
            dataset,
            "--output_dir",
            folder_ / "out",
            "--max_steps",
            "2"};
  }
};

TEST_F(BadDataTest, Tables) {
  expect_refused({
      {classify(write("empty.csv", "")), 3, "empty.csv: row 1: the file is empty"},
      {classify(write("header.csv", "text,label\n")), 3, "header.csv: there is no row"},
      {classify(write("column.csv", "text,class\na,b\n")), 3,
       "column.csv: row 1: there is no column 'label' among text, class; give --label_column"},
      {classify(write("text.csv", "label,body\n1,b\n")), 3, "give --text_column"},
      {classify(write("short.csv", "text,label\na,x\nb\n")), 3,
       "short.csv: row 3: 1 fields, but the header names 2"},
      {classify(write("long.csv", "text,label\na,b,c\n")), 3, "long.csv: row 2: 3 fields"},
      {classify(write("open.csv", "text,label\n\"a,x\n")), 3, "open.csv: row 2: a quote"},
      {classify(write("quote.csv", "text,label\n\"a\"b,x\n")), 3, "quote.csv: row 2: text follows"},
      {classify(write("latin.csv", "text,label\ncaf\xe9,x\n")), 3,
       "latin.csv: row 2: column 'text' is not UTF-8"},
      {classify(write("nolabel.csv", "text,label\na,x\nb,\n")), 3,
       "nolabel.csv: row 3: the label is empty"},
      {classify(write("notext.csv", "text,label\n,x\nb,y\n")), 3,
       "notext.csv: row 2: the text is empty"},
      {classify(write("bad.jsonl", "{\"text\": \"a\", \"label\": 1}\n{\"text\": ")), 3,
       "bad.jsonl: row 2: the line is not a JSON object"},
      {classify(write("list.jsonl", "[1, 2]\n")), 3, "list.jsonl: row 1: the line is not"},
      {classify(write("key.jsonl", "{\"text\": \"a\"}\n")), 3,
       "key.jsonl: row 1: there is no key 'label' among text"},
      {classify(write("nested.jsonl", "{\"text\": {\"a\": 1}, \"label\": 1}\n")), 3,
       "nested.jsonl: row 1: 'text' is object"},
      {classify(write("utf8.jsonl", "{\"text\": \"\xff\xfe\", \"label\": 1}\n")), 3,
       "utf8.jsonl: row 1"},
      {classify(write("tabs.tsv", "text,label\na,b\n")), 3, "tabs.tsv: row 1: there is no column"},
      {classify(folder_ / "absent.csv"), 3, "absent.csv"},
      {classify(write("three.csv", "text,label\na,x\nb,y\nc,z\n")), 2, "3 classes"},
  });
  write("set/train.csv", "text,label\na,x\nb,y\n");
  write("set/val.csv", "text,label\na,x\nb,zebra\n");
  expect_refused({classify(folder_ / "set"), 3, "val.csv: row 3: the label 'zebra' is none of"});
}

TEST_F(BadDataTest, Images) {
  const auto damaged = [&](const std::string& name, const std::string& file,
                           const std::string& bytes) {
    const std::string folder = make_images(name);
    write(name + "/train/cat/" + file, bytes);
    return folder;
  };
  make_images("good");
  const std::string png = read_file(folder_ / "good/train/cat/good.png");
  write_jpeg(folder_ / "a.jpg", 64, 64, 3, shaded(64, 64, 3, 9));
  const std::string jpeg = read_file(folder_ / "a.jpg");
  std::string flipped = png;
  flipped[png.find("IDAT") + 8] ^= 0x55;
  write("flat/x.png", png);
  make_images("classes");
  write("classes/val/wolf/x.png", png);
  make_images("hollow");
  fs::create_directories(folder_ / "hollow/train/empty");
  const std::vector<std::string> every = {"--shuffle", "false", "--max_steps", "1"};
  expect_fails({
      {train(every, damaged("a", "a.png", "")), 3, "cat/a.png: is empty"},
      {train(every, damaged("b", "a.jpg", jpeg.substr(0, jpeg.size() / 2))), 3,
       "cat/a.jpg: cannot be decoded as JPEG"},
      {train(every, damaged("c", "a.png", png.substr(0, png.size() / 2))), 3,
       "cat/a.png: cannot be decoded as PNG: it ends"},
      {train(every, damaged("d", "a.png", flipped)), 3, "cat/a.png: cannot be decoded as PNG"},
      {train(every, damaged("e", "a.jpg", "GIF89a")), 3, "cat/a.jpg: is neither a JPEG nor a PNG"},
  });
  expect_refused({
      {train(every, folder_ / "flat"), 3, "the image 'x.png' is in no class folder"},
      {train(every, folder_ / "classes"), 3, "the class 'wolf' is none of those of"},
      {train(every, folder_ / "hollow"), 3, "empty: the class has no image"},
  });
}

TEST_F(BadDataTest, Pairs) {
  write_png(folder_ / "pairs/a.png", 28, 28, 1, shaded(28, 28, 1, 3));
  expect_refused({pairs(folder_ / "pairs"), 3, "a.png: has no text beside it"});
  write("pairs/a.txt", "caf\xe9");
  expect_refused({pairs(folder_ / "pairs"), 3, "a.txt: the text is not UTF-8"});
  expect_refused({pairs(write("list.jsonl", "{\"image\": \"no.png\", \"text\": \"a\"}\n")), 3,
                  "list.jsonl: row 1: there is no image"});
}

TEST_F(BadDataTest, Arrays) {
  const auto npy = [](const std::string& header, const std::string& data) {
    std::string padded = header;
    padded.resize(118, ' ');
    return std::string("\x93NUMPY\x01\x00\x76\x00", 10) + padded + data;
  };
  const auto arrays = [&](const std::string& name, const std::string& inputs,
                          const std::string& targets) {
    write(name + "/inputs.npy", inputs);
    if (!targets.empty()) write(name + "/targets.npy", targets);
    return folder_ / name;
  };
  const std::string images =
      npy("{'descr': '|u1', 'fortran_order': False, 'shape': (2, 1, 28, 28), }",
          std::string(2 * 784, 'x'));
  const std::string labels =
      npy("{'descr': '|u1', 'fortran_order': False, 'shape': (2,), }", std::string(2, '\1'));
  expect_refused({
      {train({}, arrays("a", "", labels)), 3, "inputs.npy: is empty"},
      {train({}, arrays("b", "PK plain zip, no array", labels)), 3, "inputs.npy: is no .npy file"},
      {train({}, arrays("c", images.substr(0, 900), labels)), 3, "more than the file of 900 bytes"},
      {train({}, arrays("d", images, "")), 3, "has no targets"},
      {train({}, arrays("e", images,
                        npy("{'descr': '|u1', 'fortran_order': False, 'shape': (3,), }", "abc"))),
       3, "targets holds 3 samples, but inputs holds 2"},
      {train({}, arrays("g",
                        npy("{'descr': '|u1', 'fortran_order': False, 'shape': (2, 1, 8, 8), }",
                            std::string(128, 'x')),
                        labels)),
       3, "reads (samples, 1, 28, 28)"},
      {train({}, arrays("h", npy("{'descr': '<c8', 'fortran_order': False, 'shape': (2,), }", "x"),
                        labels)),
       3, "type '<c8'"},
      {train({}, write("x.safetensors", "not one")), 3, "x.safetensors"},
  });
  expect_fails({
      {train({"--max_steps", "1"},
             arrays("f", images,
                    npy("{'descr': '|u1', 'fortran_order': False, 'shape': (2,), }", "\x0b\x01"))),
       3, "targets has the class 11 in row 0"},
  });
}

}  // namespace
}  // namespace headroom::testing
