// Writes small model folders, whole or broken in one place.
#pragma once

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace qwend {

// One tensor of a file to be written.
struct FileTensor {
  std::string dtype = "BF16";
  std::vector<int64_t> shape;
  std::string bytes;  // empty: zeros
};

inline int64_t DataBytes(const FileTensor& t) {
  int64_t n = t.dtype == "F32" || t.dtype == "I32" ? 4 : t.dtype == "I64" ? 8 : 2;
  for (int64_t dim : t.shape) n *= dim;
  return n;
}

// The header's JSON for tensors laid one after the other.
inline std::string HeaderOf(const std::map<std::string, FileTensor>& tensors) {
  std::vector<std::string> items = {R"("__metadata__":{"format":"pt"})"};
  int64_t at = 0;
  for (const auto& [name, t] : tensors) {
    const int64_t end = at + DataBytes(t);
    items.push_back(absl::StrCat("\"", name, "\":{\"dtype\":\"", t.dtype, "\",\"shape\":[",
                                 absl::StrJoin(t.shape, ","), "],\"data_offsets\":[", at, ",", end,
                                 "]}"));
    at = end;
  }
  return absl::StrCat("{", absl::StrJoin(items, ","), "}");
}

inline void WriteText(const std::filesystem::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

// Length, header, data.
inline std::string FileOf(const std::string& header, const std::string& data) {
  std::string length(8, '\0');
  const uint64_t n = header.size();
  std::memcpy(length.data(), &n, 8);
  return length + header + data;
}

inline void WriteSafetensors(const std::filesystem::path& path,
                             const std::map<std::string, FileTensor>& tensors) {
  std::string data;
  for (const auto& [name, t] : tensors) {
    data += t.bytes.empty() ? std::string(DataBytes(t), '\0') : t.bytes;
  }
  WriteText(path, FileOf(HeaderOf(tensors), data));
}

// A folder of its own for each test, removed afterwards.
class TempDir {
 public:
  TempDir() {
    std::string pattern = (std::filesystem::temp_directory_path() / "qwend-XXXXXX").string();
    path_ = mkdtemp(pattern.data());
  }
  ~TempDir() {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

}  // namespace qwend
