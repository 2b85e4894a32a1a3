#include "engine/loader/weights.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "engine/loader/safetensors.h"
#include "engine/models/model_tensors.h"
#include "nlohmann/json.hpp"

namespace qwend {
namespace {

namespace fs = std::filesystem;

constexpr const char* kIndexName = "model.safetensors.index.json";
constexpr const char* kSingleName = "model.safetensors";

// The canonical name, or nothing for a tensor that text generation does not use.
std::string CanonicalName(const std::string& full) {
  absl::string_view name = full;
  if (!absl::ConsumePrefix(&name, "model.language_model.")) absl::ConsumePrefix(&name, "model.");
  if (absl::StartsWith(name, "visual.") || absl::StartsWith(name, "mtp.") ||
      absl::EndsWith(name, "rotary_emb.inv_freq")) {
    return "";
  }
  return std::string(name);
}

bool IsFloat(std::optional<DType> type) {
  return type == DType::kBF16 || type == DType::kF16 || type == DType::kF32;
}

absl::StatusOr<std::vector<std::string>> FilesOfIndex(const fs::path& index_path) {
  const std::string name = index_path.string();
  std::ifstream in(index_path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  const auto root = nlohmann::json::parse(text.str(), nullptr, /*allow_exceptions=*/false);
  if (root.is_discarded() || !root.is_object() || !root.contains("weight_map") ||
      !root["weight_map"].is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": has no weight_map; download the file again"));
  }
  std::vector<std::string> files;
  for (const auto& [tensor, file] : root["weight_map"].items()) {
    if (!file.is_string()) {
      return absl::InvalidArgumentError(
          absl::StrCat(name, ": weight_map gives no file for ", tensor.substr(0, 200)));
    }
    const auto f = file.get<std::string>();
    if (f.empty() || f.find('/') != std::string::npos || f.find('\\') != std::string::npos ||
        f.find('\0') != std::string::npos || f == "." || f == "..") {
      return absl::InvalidArgumentError(absl::StrCat(name, ": weight_map names \"",
                                                     f.substr(0, 200),
                                                     "\", which is not a file of this folder"));
    }
    files.push_back(f);
  }
  std::sort(files.begin(), files.end());
  files.erase(std::unique(files.begin(), files.end()), files.end());
  return files;
}

absl::StatusOr<std::vector<std::string>> FindFiles(const fs::path& dir) {
  std::error_code error;
  if (fs::exists(dir / kIndexName, error)) {
    absl::StatusOr<std::vector<std::string>> files = FilesOfIndex(dir / kIndexName);
    if (!files.ok()) return files.status();
    for (const std::string& file : *files) {
      if (!fs::exists(dir / file, error)) {
        return absl::NotFoundError(absl::StrCat((dir / file).string(), ": is missing, but ",
                                                kIndexName, " names it; download it"));
      }
    }
    return files;
  }
  if (fs::exists(dir / kSingleName, error)) return std::vector<std::string>{kSingleName};
  std::vector<std::string> files;
  for (const fs::directory_entry& entry : fs::directory_iterator(dir, error)) {
    if (entry.path().extension() == ".safetensors") {
      files.push_back(entry.path().filename().string());
    }
  }
  if (files.empty()) {
    return absl::NotFoundError(absl::StrCat(
        dir.string(), ": holds no *.safetensors file; other weight formats are not read"));
  }
  std::sort(files.begin(), files.end());
  return files;
}

class SafetensorsSource : public WeightSource {
 public:
  absl::Status Open(const fs::path& dir, const ModelSpec& spec) {
    absl::StatusOr<std::vector<std::string>> names = FindFiles(dir);
    if (!names.ok()) return names.status();
    for (const std::string& name : *names) {
      absl::StatusOr<std::unique_ptr<SafetensorsFile>> file = SafetensorsFile::Open(dir / name);
      if (!file.ok()) return file.status();
      files_.push_back(*std::move(file));
    }
    for (const std::unique_ptr<SafetensorsFile>& file : files_) {
      for (const SafetensorsEntry& entry : file->entries()) {
        std::string name = CanonicalName(entry.name);
        if (name.empty()) continue;
        const auto [it, is_new] = tensors_.emplace(std::move(name), Place{file.get(), &entry});
        if (!is_new) {
          return absl::InvalidArgumentError(absl::StrCat(
              file->path(), ": tensor ", entry.name, " is also in ", it->second.file->path(),
              " as ", it->second.entry->name, "; remove one of them"));
        }
      }
    }
    return Check(dir, spec);
  }

  DType weight_type() const override { return weight_type_; }

  absl::StatusOr<TensorView> Get(std::string_view name) override {
    if (last_ != nullptr) last_->file->DropPages(*last_->entry);
    last_ = nullptr;
    copy_ = nullptr;
    const auto it = tensors_.find(name);
    if (it == tensors_.end()) {
      return absl::NotFoundError(absl::StrCat("the checkpoint has no tensor ", std::string(name)));
    }
    last_ = &it->second;
    const SafetensorsEntry& entry = *last_->entry;
    const char* data = last_->file->Data(entry);
    TensorView view;
    view.dtype = *entry.type();
    if (reinterpret_cast<uintptr_t>(data) % SizeOf(view.dtype) != 0) {
      const int64_t bytes = entry.end - entry.begin;
      copy_ = std::make_unique_for_overwrite<char[]>(bytes);
      std::memcpy(copy_.get(), data, bytes);
      data = copy_.get();
    }
    view.data = const_cast<char*>(data);
    view.rank = static_cast<int>(entry.shape.size());
    int64_t stride = 1;
    for (int i = view.rank - 1; i >= 0; --i) {
      view.shape[i] = entry.shape[i];
      view.strides[i] = stride;
      stride *= entry.shape[i];
    }
    return view;
  }

 private:
  struct Place {
    const SafetensorsFile* file;
    const SafetensorsEntry* entry;
  };

  // Everything of the spec is there, as it must be, and nothing else.
  absl::Status Check(const fs::path& dir, const ModelSpec& spec) {
    size_t known = 0;
    std::optional<DType> common;
    bool mixed = false;
    for (const TensorSpec& want : ModelTensors(spec)) {
      const auto it = tensors_.find(want.name);
      if (it == tensors_.end()) return Missing(dir, want.name, spec);
      ++known;
      const SafetensorsEntry& entry = *it->second.entry;
      const std::string where = absl::StrCat(it->second.file->path(), ": tensor ", entry.name);
      if (entry.shape != want.shape) {
        return absl::InvalidArgumentError(
            absl::StrCat(where, " is ", entry.ShapeString(), ", config.json asks for [",
                         absl::StrJoin(want.shape, ", "), "]; they are of different models"));
      }
      if (!IsFloat(entry.type())) {
        return absl::InvalidArgumentError(
            absl::StrCat(where, " is ", entry.ShapeString(),
                         "; weights must be BF16, F16 or F32, so use an unquantized checkpoint"));
      }
      if (want.role == TensorRole::kProjection || want.role == TensorRole::kEmbedding) {
        mixed = mixed || (common.has_value() && *common != *entry.type());
        common = *entry.type();
      }
    }
    weight_type_ = mixed ? DType::kF32 : *common;
    if (spec.tied_embeddings && tensors_.count("lm_head.weight") != 0) ++known;
    if (known == tensors_.size()) return absl::OkStatus();
    std::map<std::string, Place, std::less<>> left = tensors_;
    for (const TensorSpec& want : ModelTensors(spec)) left.erase(want.name);
    if (spec.tied_embeddings) left.erase("lm_head.weight");
    const Place& place = left.begin()->second;
    return absl::InvalidArgumentError(absl::StrCat(
        place.file->path(), ": tensor ", place.entry->name, " (", place.entry->ShapeString(),
        ") has no place in a ", spec.family, " model of ", spec.num_layers(),
        " layers; config.json and weights are of different models"));
  }

  absl::Status Missing(const fs::path& dir, const std::string& name, const ModelSpec& spec) {
    if (name == "lm_head.weight") {
      return absl::InvalidArgumentError(
          absl::StrCat(dir.string(),
                       ": tensor lm_head.weight is missing, and tie_word_embeddings is false; "
                       "download the whole checkpoint, or tie them"));
    }
    return absl::InvalidArgumentError(
        absl::StrCat(dir.string(), ": tensor ", name, " is missing (", files_.size(), " file",
                     files_.size() == 1 ? "" : "s", " read for a ", spec.family, " model of ",
                     spec.num_layers(), " layers); download the whole checkpoint"));
  }

  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, Place, std::less<>> tensors_;  // by canonical name
  DType weight_type_ = DType::kBF16;
  const Place* last_ = nullptr;
  std::unique_ptr<char[]> copy_;  // of a tensor that lies misaligned in its file
};

}  // namespace

absl::StatusOr<std::unique_ptr<WeightSource>> OpenSafetensors(const fs::path& dir,
                                                              const ModelSpec& spec) {
  auto source = std::make_unique<SafetensorsSource>();
  if (absl::Status status = source->Open(dir, spec); !status.ok()) return status;
  return source;
}

absl::StatusOr<OpenedModel> OpenModel(const fs::path& dir) {
  OpenedModel model;
  absl::StatusOr<ModelConfig> config = LoadModelConfig(dir);
  if (!config.ok()) return config.status();
  model.config = *std::move(config);
  absl::StatusOr<std::unique_ptr<WeightSource>> weights = OpenSafetensors(dir, model.config.spec);
  if (!weights.ok()) return weights.status();
  model.weights = *std::move(weights);
  model.config.spec.weight_type = model.weights->weight_type();
  return model;
}

uint64_t CountParameters(const ModelSpec& spec) {
  uint64_t n = 0;
  for (const TensorSpec& t : ModelTensors(spec)) {
    uint64_t count = 1;
    for (int64_t dim : t.shape) count *= static_cast<uint64_t>(dim);
    n += count;
  }
  return n;
}

}  // namespace qwend
