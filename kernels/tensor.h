// Tensor views: a pointer, a type, a shape and strides. A view never owns or frees memory; the
// Buffer it was cut from does, and must outlive it.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <sstream>
#include <stdexcept>
#include <string>

namespace qwend {

enum class DType : uint8_t { kF32, kBF16, kF16, kI32, kU8 };

constexpr int SizeOf(DType t) {
  switch (t) {
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kBF16:
    case DType::kF16:
      return 2;
    case DType::kU8:
      return 1;
  }
  return 0;
}

constexpr const char* Name(DType t) {
  switch (t) {
    case DType::kF32:
      return "f32";
    case DType::kBF16:
      return "bf16";
    case DType::kF16:
      return "f16";
    case DType::kI32:
      return "i32";
    case DType::kU8:
      return "u8";
  }
  return "?";
}

// How a matrix's elements lie in memory. kRowMajor is the plain form that strides describe. A
// backend's packed forms are opaque to everyone but that backend: their views keep the logical
// shape, and their strides mean nothing.
enum class Layout : uint8_t { kRowMajor, kCpuPanels, kCudaPacked };

// Throws std::invalid_argument with all arguments streamed together unless `ok`.
template <typename... Args>
void Require(bool ok, const Args&... args) {
  if (ok) return;
  std::ostringstream message;
  (message << ... << args);
  throw std::invalid_argument(message.str());
}

struct TensorView {
  static constexpr int kMaxRank = 4;

  void* data = nullptr;
  DType dtype = DType::kF32;
  Layout layout = Layout::kRowMajor;
  int rank = 0;
  std::array<int64_t, kMaxRank> shape{};
  std::array<int64_t, kMaxRank> strides{};  // in elements

  // A contiguous row-major view.
  static TensorView Of(void* data, DType dtype, std::initializer_list<int64_t> shape) {
    Require(shape.size() <= kMaxRank, "TensorView: rank ", shape.size(), " is above ", kMaxRank);
    TensorView v;
    v.data = data;
    v.dtype = dtype;
    v.rank = static_cast<int>(shape.size());
    int i = 0;
    for (int64_t n : shape) v.shape[i++] = n;
    int64_t stride = 1;
    for (i = v.rank - 1; i >= 0; --i) {
      v.strides[i] = stride;
      stride *= v.shape[i];
    }
    return v;
  }

  explicit operator bool() const { return data != nullptr; }

  int64_t dim(int i) const { return shape[i]; }
  int64_t rows() const { return shape[0]; }
  int64_t cols() const { return shape[rank - 1]; }
  int64_t elements() const {
    int64_t n = rank == 0 ? 0 : 1;
    for (int i = 0; i < rank; ++i) n *= shape[i];
    return n;
  }
  int64_t bytes() const { return elements() * SizeOf(dtype); }

  bool contiguous() const {
    int64_t stride = 1;
    for (int i = rank - 1; i >= 0; --i) {
      if (shape[i] != 1 && strides[i] != stride) return false;
      stride *= shape[i];
    }
    return true;
  }

  // Elements [begin, begin + count) of dimension `d`; the other dimensions stay.
  TensorView Slice(int d, int64_t begin, int64_t count) const {
    Require(layout == Layout::kRowMajor, "Slice: a packed tensor cannot be cut");
    Require(d < rank && begin >= 0 && count >= 0 && begin + count <= shape[d], "Slice: [", begin,
            ", ", begin + count, ") of dimension ", d, " of ", ShapeString());
    TensorView v = *this;
    v.data = static_cast<char*>(data) + begin * strides[d] * SizeOf(dtype);
    v.shape[d] = count;
    return v;
  }

  // The innermost dimension [n * inner] seen as [n, inner]. Works on strided outer dimensions.
  TensorView SplitLast(int64_t n, int64_t inner) const {
    Require(layout == Layout::kRowMajor && rank >= 1 && rank < kMaxRank && cols() == n * inner &&
                strides[rank - 1] == 1,
            "SplitLast: ", ShapeString(), " into ", n, " x ", inner);
    TensorView v = *this;
    v.rank = rank + 1;
    v.shape[rank - 1] = n;
    v.strides[rank - 1] = inner;
    v.shape[rank] = inner;
    v.strides[rank] = 1;
    return v;
  }

  // All dimensions but the first merged: [a, b, c] -> [a, b * c]. Needs contiguous inner
  // dimensions.
  TensorView Flatten2D() const {
    TensorView v = *this;
    int64_t inner = 1;
    for (int i = rank - 1; i >= 1; --i) {
      Require(shape[i] == 1 || strides[i] == inner, "Flatten2D: ", ShapeString(), " has gaps");
      inner *= shape[i];
    }
    v.rank = 2;
    v.shape = {rank == 0 ? 0 : shape[0], inner, 0, 0};
    v.strides = {strides[0], 1, 0, 0};
    return v;
  }

  std::string ShapeString() const {
    std::ostringstream s;
    s << Name(dtype) << '[';
    for (int i = 0; i < rank; ++i) s << (i ? ", " : "") << shape[i];
    s << ']';
    return s.str();
  }

  template <typename T>
  T* As() const {
    return static_cast<T*>(data);
  }
};

}  // namespace qwend
