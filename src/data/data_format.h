#pragma once

// The table of data formats. To add one: a file with its row, and a line in data_format.cpp.

#include <headroom/core/micro_batch.h>
#include <headroom/data/dataset.h>
#include <headroom/data/tokens.h>
#include "data/labels.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace headroom {

/// An array inside of a file: where its elements lie, row by row, little-endian.
struct StoredArray {
  std::string path;  ///< of the file
  std::string name;  ///< of the array: "inputs", say
  at::ScalarType dtype = at::kFloat;
  std::vector<std::int64_t> shape;
  std::int64_t begin = 0;  ///< of its first byte in the file
};

/// Which data, and for which model.
struct DataRequest {
  std::string dataset;           ///< a name of the table, or a path
  std::string tokenizer;         ///< a tokenizer's file for text; empty: a token is a byte
  std::string model;             ///< its name, for messages
  ModelInput input;              ///< what it reads
  std::uint64_t seed = 0;        ///< of data that is made up
  std::uint64_t order_seed = 0;  ///< of what is drawn from the data: crops, masks
  std::string model_folder;      ///< with preprocessor_config.json, perhaps; empty: none
  LabelNames labels;             ///< the classes that a saved model has; empty: none
  bool is_trained = true;        ///< otherwise labels must be the model's
  bool takes_any_shape = false;  ///< a model that does not say what it reads: arrays fit if it runs
  std::string text_column = "text", label_column = "label", image_column = "image";
  bool packs = false;            ///< several texts share a row
  std::int64_t num_workers = 0;  ///< threads that decode
  /// What a .safetensors file holds; null: such files cannot be read.
  std::function<std::vector<StoredArray>(const std::string& path)> list_arrays;
};

struct OpenedData {
  std::shared_ptr<const Dataset> train;
  std::shared_ptr<const Dataset> eval;         ///< null where there is none
  std::shared_ptr<const Tokenizer> tokenizer;  ///< of text; null for other data
  LabelNames labels;  ///< classes by number; empty where they have no names
  /// A file that belongs beside the trained model: its name and contents.
  std::vector<std::pair<std::string, std::string>> files;
  std::optional<std::int64_t> padding_token;  ///< that texts of a classifier are filled up with
};

/// One kind of data.
struct DataFormat {
  const char* help;                     ///< what is given as the dataset: "an IDX folder", say
  const char* what;                     ///< what it is to a message: "holds images", say
  std::vector<ModelInput::Kind> kinds;  ///< of the models that it serves
  bool takes_tokenizer;
  /// Whether this is the format of `dataset`. The first row that says so opens it.
  bool (*recognises)(const std::string& dataset);
  /// Throws DataError on data that cannot be read or does not fit the model, and ConfigError on
  /// sizes of the model that do not fit the data.
  OpenedData (*open)(const DataRequest& request);
};

/// Every format, in the order in which they are asked.
const std::vector<DataFormat>& data_formats();

/// The format of `dataset`. Throws DataError when there is no such file, folder or name.
const DataFormat& format_of(const std::string& dataset);

/// Opens the data. Throws DataError when its format does not serve the model.
OpenedData open_data(const DataRequest& request);

/// Which tokens are to be guessed; nothing for a model that guesses the next token.
std::optional<Masking> masking_of(const ModelInput& input, std::int64_t mask_token,
                                  std::uint64_t seed);

DataFormat synthetic_format();
DataFormat array_format();
DataFormat image_folder_format();
DataFormat table_format();
DataFormat idx_format();
DataFormat token_format();
DataFormat text_format();

}  // namespace headroom
