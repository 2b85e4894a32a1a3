// One safetensors file: an 8-byte length, a JSON header, and the tensors' bytes. Checked once when
// opened; mapped, not read.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/tensor.h"

namespace qwend {

struct SafetensorsEntry {
  std::string name;
  std::string dtype;  // the file's word: BF16, F32, ...
  std::vector<int64_t> shape;
  int64_t begin = 0;  // bytes from the start of the data
  int64_t end = 0;

  std::string ShapeString() const;  // "BF16[4, 8]"
  // The type as this program knows it, if it does.
  std::optional<DType> type() const;
};

// Parses a header for `data_bytes` of data. Refuses bad JSON, a name that comes twice, sizes that
// do not follow from type and shape, and ranges that leave the data, overlap or leave a gap.
// `file` is how messages name it.
absl::StatusOr<std::vector<SafetensorsEntry>> ParseSafetensorsHeader(std::string_view header,
                                                                     int64_t data_bytes,
                                                                     const std::string& file);

class SafetensorsFile {
 public:
  static absl::StatusOr<std::unique_ptr<SafetensorsFile>> Open(const std::filesystem::path& path);
  ~SafetensorsFile();
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  const std::string& path() const { return path_; }
  const std::vector<SafetensorsEntry>& entries() const { return entries_; }
  const SafetensorsEntry* Find(std::string_view name) const;  // null when there is none

  const char* Data(const SafetensorsEntry& entry) const { return data_ + entry.begin; }
  // Gives the pages back to the system; reading them again is right but slow.
  void DropPages(const SafetensorsEntry& entry) const;

 private:
  SafetensorsFile() = default;

  std::string path_;
  char* map_ = nullptr;  // the whole file
  int64_t map_bytes_ = 0;
  const char* data_ = nullptr;  // after the header
  std::vector<SafetensorsEntry> entries_;
};

}  // namespace qwend
