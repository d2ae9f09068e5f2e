#include "model/script_folder.h"

#include <headroom/core/error.h>
#include <headroom/model/adapters.h>
#include <headroom/model/pretrained.h>
#include "core/hash.h"
#include "core/input_file.h"
#include "core/output_file.h"
#include "core/text.h"
#include "model/adapted_model.h"
#include "model/adapter_folder.h"
#include "model/config_file.h"
#include "model/published.h"

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <utility>

namespace headroom {
namespace {

namespace fs = std::filesystem;

constexpr const char* kModelFile = "model.pt";

std::string file_sha256(const std::string& path) {
  constexpr std::int64_t kPartBytes = std::int64_t{1} << 20;
  const InputFile file(path);
  std::string part;
  Sha256 hash;
  for (std::int64_t offset = 0; offset < file.size(); offset += kPartBytes) {
    part.resize(static_cast<std::size_t>(std::min(kPartBytes, file.size() - offset)));
    file.read_at(offset, part.data(), static_cast<std::int64_t>(part.size()));
    hash.update(part.data(), part.size());
  }
  return hash.hex_digest();
}

std::string script_type() { return own_model_type("script"); }

// The loss and the sizes, read or written.
void exchange(ConfigFile& file, ScriptRequest& request) {
  file.word("loss", request.loss, "cross_entropy");
  file.word("model_config", request.sizes, "");
}

class ScriptFormat final : public ModelFormat {
 public:
  explicit ScriptFormat(ScriptRequest request) : request_(std::move(request)) {}

  SavedModel save(const Chain& chain, const std::string& folder) const override {
    if (!chain.whole()) throw ConfigError("this chain was not cut from a TorchScript model");
    ConfigFile file;
    file.set_kind("headroom", script_type());
    ScriptRequest request = request_;
    exchange(file, request);
    write_file_atomically((fs::path(folder) / "config.json").string(), file.text());
    const std::string path = (fs::path(folder) / kModelFile).string();
    chain.whole()->save(path);
    return {kModelFile, file_sha256(path)};
  }

 private:
  ScriptRequest request_;
};

std::optional<ScriptRequest> script_in(const std::string& folder) {
  if (is_adapter_folder(folder)) {
    std::optional<ScriptRequest> request = script_in(base_of_adapters(folder));
    if (request) request->adapters.push_back(folder);
    return request;
  }
  const std::string config = (fs::path(folder) / "config.json").string();
  if (!is_regular_file(config)) return std::nullopt;
  ConfigFile file = ConfigFile::read(config);
  std::string type;
  file.word("model_type", type, "");
  if (type != script_type()) return std::nullopt;
  ScriptRequest request;
  exchange(file, request);
  request.path = (fs::path(folder) / kModelFile).string();
  return request;
}

}  // namespace

std::optional<ScriptRequest> requested_script(const TrainingArguments& arguments) {
  if (!arguments.model_name_or_path.empty()) return script_in(arguments.model_name_or_path);
  if (!ends_with(arguments.model, ".pt")) return std::nullopt;
  return ScriptRequest{arguments.model, arguments.loss, arguments.model_config};
}

Chain load_script(const ScriptRequest& request, const MicroBatch& example) {
  Chain chain = Chain::from_script(request.path, parse_loss(request.loss), example);
  for (const std::string& folder : request.adapters) merge_script_adapters(chain, folder);
  chain.set_format(script_format(request));
  return chain;
}

std::shared_ptr<const ModelFormat> script_format(const ScriptRequest& request) {
  return std::make_shared<ScriptFormat>(request);
}

}  // namespace headroom
