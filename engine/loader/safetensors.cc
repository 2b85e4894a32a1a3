#include "engine/loader/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <limits>
#include <unordered_set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "nlohmann/json.hpp"

namespace qwend {
namespace {

using nlohmann::json;

static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian");

constexpr int64_t kLengthBytes = 8;
constexpr int64_t kMaxHeaderBytes = int64_t{100} << 20;
constexpr size_t kMaxRank = 8;

absl::Status Bad(const std::string& file, const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat(file, ": ", what, "; download the file again"));
}

// Bits of one element, 0 for a type this program has never heard of.
int BitsOf(std::string_view dtype) {
  struct Known {
    const char* name;
    int bits;
  };
  static constexpr Known kKnown[] = {
      {"BOOL", 8}, {"U8", 8},   {"I8", 8},   {"F8_E4M3", 8}, {"F8_E5M2", 8},
      {"I16", 16}, {"U16", 16}, {"F16", 16}, {"BF16", 16},   {"I32", 32},
      {"U32", 32}, {"F32", 32}, {"F64", 64}, {"I64", 64},    {"U64", 64},
  };
  for (const Known& k : kKnown) {
    if (dtype == k.name) return k.bits;
  }
  return 0;
}

// A whole number of at most 2^62, or nothing.
std::optional<int64_t> AsSize(const json& value) {
  if (!value.is_number_unsigned()) return std::nullopt;
  const auto n = value.get<uint64_t>();
  if (n > (uint64_t{1} << 62)) return std::nullopt;
  return static_cast<int64_t>(n);
}

absl::StatusOr<SafetensorsEntry> ParseEntry(const std::string& name, const json& value,
                                            int64_t data_bytes, const std::string& file) {
  const auto bad = [&](const std::string& what) {
    return Bad(file, absl::StrCat("tensor ", name.substr(0, 200), ": ", what));
  };
  if (!value.is_object() || !value.contains("dtype") || !value["dtype"].is_string() ||
      !value.contains("shape") || !value["shape"].is_array() || !value.contains("data_offsets") ||
      !value["data_offsets"].is_array() || value["data_offsets"].size() != 2) {
    return bad("the header has no dtype, shape or data_offsets for it");
  }
  SafetensorsEntry entry;
  entry.name = name;
  entry.dtype = value["dtype"].get<std::string>();
  const int bits = BitsOf(entry.dtype);
  if (bits == 0) return bad(absl::StrCat("unknown type \"", entry.dtype.substr(0, 40), "\""));
  if (value["shape"].size() > kMaxRank) return bad("the shape has too many dimensions");
  int64_t bytes = bits / 8;
  for (const json& dim : value["shape"]) {
    const std::optional<int64_t> n = AsSize(dim);
    if (!n.has_value()) return bad("the shape holds something that is not a size");
    if (__builtin_mul_overflow(bytes, *n, &bytes)) return bad("the shape overflows");
    entry.shape.push_back(*n);
  }
  const std::optional<int64_t> begin = AsSize(value["data_offsets"][0]);
  const std::optional<int64_t> end = AsSize(value["data_offsets"][1]);
  if (!begin.has_value() || !end.has_value() || *begin > *end) {
    return bad("data_offsets are not a range");
  }
  entry.begin = *begin;
  entry.end = *end;
  if (entry.end > data_bytes) {
    return bad(absl::StrCat("ends at byte ", entry.end, " of the data, but the file holds only ",
                            data_bytes, ": it is truncated"));
  }
  if (entry.end - entry.begin != bytes) {
    return bad(absl::StrCat(entry.ShapeString(), " takes ", bytes, " bytes, data_offsets give ",
                            entry.end - entry.begin));
  }
  return entry;
}

}  // namespace

std::string SafetensorsEntry::ShapeString() const {
  return absl::StrCat(dtype, "[", absl::StrJoin(shape, ", "), "]");
}

std::optional<DType> SafetensorsEntry::type() const {
  if (dtype == "BF16") return DType::kBF16;
  if (dtype == "F16") return DType::kF16;
  if (dtype == "F32") return DType::kF32;
  if (dtype == "I32") return DType::kI32;
  if (dtype == "U8") return DType::kU8;
  return std::nullopt;
}

absl::StatusOr<std::vector<SafetensorsEntry>> ParseSafetensorsHeader(std::string_view header,
                                                                     int64_t data_bytes,
                                                                     const std::string& file) {
  std::unordered_set<std::string> seen;
  std::string twice;
  const json root = json::parse(
      header,
      [&](int depth, json::parse_event_t event, json& parsed) {
        if (depth == 1 && event == json::parse_event_t::key &&
            !seen.insert(parsed.get<std::string>()).second) {
          twice = parsed.get<std::string>();
        }
        return true;
      },
      /*allow_exceptions=*/false);
  if (root.is_discarded() || !root.is_object()) return Bad(file, "the header is not a JSON object");
  if (!twice.empty()) {
    return Bad(file, absl::StrCat("tensor ", twice.substr(0, 200), " is listed twice"));
  }
  std::vector<SafetensorsEntry> entries;
  entries.reserve(root.size());
  for (const auto& [name, value] : root.items()) {
    if (name == "__metadata__") continue;
    absl::StatusOr<SafetensorsEntry> entry = ParseEntry(name, value, data_bytes, file);
    if (!entry.ok()) return entry.status();
    entries.push_back(*std::move(entry));
  }
  std::sort(entries.begin(), entries.end(),
            [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
              return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
            });
  int64_t at = 0;
  for (const SafetensorsEntry& entry : entries) {
    if (entry.begin != at) {
      return Bad(file, absl::StrCat("tensor ", entry.name.substr(0, 200),
                                    entry.begin < at ? " overlaps" : " leaves a gap after",
                                    " the one before it"));
    }
    at = entry.end;
  }
  if (at != data_bytes) {
    return Bad(file, absl::StrCat("has ", data_bytes - at, " bytes after its last tensor"));
  }
  return entries;
}

absl::StatusOr<std::unique_ptr<SafetensorsFile>> SafetensorsFile::Open(
    const std::filesystem::path& path) {
  const std::string name = path.string();
  const int fd = open(name.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    return absl::NotFoundError(absl::StrCat(name, ": cannot be opened: ", std::strerror(errno)));
  }
  struct stat info {};
  if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    close(fd);
    return absl::NotFoundError(absl::StrCat(name, ": is not a regular file"));
  }
  std::unique_ptr<SafetensorsFile> file(new SafetensorsFile);
  file->path_ = name;
  const int64_t size = info.st_size;
  if (size < kLengthBytes) {
    close(fd);
    return Bad(name, absl::StrCat("has only ", size, " bytes: it is truncated"));
  }
  void* map = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0);
  close(fd);
  if (map == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat(name, ": cannot be mapped: ", std::strerror(errno)));
  }
  file->map_ = static_cast<char*>(map);
  file->map_bytes_ = size;
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, map, kLengthBytes);
  if (header_bytes > static_cast<uint64_t>(kMaxHeaderBytes)) {
    return Bad(name, absl::StrCat("is not a safetensors file: its header would have ", header_bytes,
                                  " bytes"));
  }
  const int64_t data_begin = kLengthBytes + static_cast<int64_t>(header_bytes);
  if (data_begin > size) {
    return Bad(name,
               absl::StrCat("ends inside its header of ", header_bytes, " bytes: it is truncated"));
  }
  absl::StatusOr<std::vector<SafetensorsEntry>> entries = ParseSafetensorsHeader(
      std::string_view(file->map_ + kLengthBytes, header_bytes), size - data_begin, name);
  if (!entries.ok()) return entries.status();
  file->entries_ = *std::move(entries);
  file->data_ = file->map_ + data_begin;
  return file;
}

SafetensorsFile::~SafetensorsFile() {
  if (map_ != nullptr) munmap(map_, map_bytes_);
}

const SafetensorsEntry* SafetensorsFile::Find(std::string_view name) const {
  for (const SafetensorsEntry& entry : entries_) {
    if (entry.name == name) return &entry;
  }
  return nullptr;
}

void SafetensorsFile::DropPages(const SafetensorsEntry& entry) const {
  const int64_t page = sysconf(_SC_PAGESIZE);
  const int64_t offset = data_ - map_;
  const int64_t begin = (offset + entry.begin) / page * page;
  const int64_t end = std::min((offset + entry.end + page - 1) / page * page, map_bytes_);
  if (begin < end) madvise(map_ + begin, end - begin, MADV_DONTNEED);
}

}  // namespace qwend
