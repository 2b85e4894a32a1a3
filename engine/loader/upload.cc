#include "engine/loader/upload.h"

#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/bf16.h"

namespace qwend {
namespace {

void ToF32(const TensorView& from, float* to) {
  const int64_t n = from.elements();
  if (from.dtype == DType::kF32) {
    std::memcpy(to, from.data, n * sizeof(float));
    return;
  }
  const uint16_t* bits = from.As<const uint16_t>();
  if (from.dtype == DType::kBF16) {
    for (int64_t i = 0; i < n; ++i) to[i] = Bf16ToFloat(bits[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) to[i] = Fp16ToFloat(bits[i]);
  }
}

absl::StatusOr<TensorView> Fetch(WeightSource& source, const TensorSpec& want) {
  absl::StatusOr<TensorView> tensor = source.Get(want.name);
  if (!tensor.ok()) return tensor.status();
  bool same = tensor->rank == static_cast<int>(want.shape.size());
  for (int i = 0; same && i < tensor->rank; ++i) same = tensor->shape[i] == want.shape[i];
  if (!same) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor ", want.name, " has the wrong shape: ", tensor->ShapeString()));
  }
  return tensor;
}

absl::Status PutPacked(const WeightSlot& slot, const ModelSpec& spec, WeightSource& source,
                       Backend& backend, void* place) {
  const int64_t rows = slot.rows();
  const int64_t cols = slot.cols();
  const DType type = spec.weight_type;
  std::vector<char> copy;  // when the parts are several, or in another type
  int64_t filled = 0;
  for (const TensorSpec& part : slot.parts) {
    absl::StatusOr<TensorView> tensor = Fetch(source, part);
    if (!tensor.ok()) return tensor.status();
    if (tensor->dtype != type && type != DType::kF32) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor ", part.name, " is ", Name(tensor->dtype), " and cannot be kept as ",
                       Name(type), "; plan with the weight source's weight_type"));
    }
    if (tensor->dtype == type && slot.parts.size() == 1) {
      *slot.view = backend.Pack(*tensor, place);
      return absl::OkStatus();
    }
    copy.resize(rows * cols * SizeOf(type));
    char* to = copy.data() + filled;
    if (tensor->dtype == type) {
      std::memcpy(to, tensor->data, tensor->bytes());
    } else {
      ToF32(*tensor, reinterpret_cast<float*>(to));
    }
    filled += tensor->elements() * SizeOf(type);
  }
  *slot.view = backend.Pack(TensorView::Of(copy.data(), type, {rows, cols}), place);
  return absl::OkStatus();
}

absl::Status PutPlain(const WeightSlot& slot, WeightSource& source, Backend& backend, void* place) {
  const TensorSpec& part = slot.parts[0];
  absl::StatusOr<TensorView> tensor = Fetch(source, part);
  if (!tensor.ok()) return tensor.status();
  std::vector<float> values(tensor->elements());
  ToF32(*tensor, values.data());
  *slot.view = part.shape.size() == 1
                   ? TensorView::Of(place, DType::kF32, {slot.rows()})
                   : TensorView::Of(place, DType::kF32, {slot.rows(), slot.cols()});
  backend.CopyToDevice(place, values.data(), slot.view->bytes());
  backend.Synchronize();  // `values` goes away
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ModelWeights> UploadWeights(const ModelSpec& spec, WeightSource& source,
                                           Backend& backend, MemoryCursor& cursor) {
  ModelWeights weights;
  for (const WeightSlot& slot : WeightSlots(spec, weights)) {
    void* place = cursor.Take(SlotBytes(slot, spec, backend));
    const absl::Status status = slot.packed ? PutPacked(slot, spec, source, backend, place)
                                            : PutPlain(slot, source, backend, place);
    if (!status.ok()) return status;
  }
  if (spec.tied_embeddings) weights.lm_head = weights.embedding;
  return weights;
}

}  // namespace qwend
