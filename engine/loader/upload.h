// From a WeightSource to the device: each weight is packed or converted, and put in its place.
#pragma once

#include "absl/status/statusor.h"
#include "engine/loader/weights.h"
#include "engine/models/model_tensors.h"
#include "engine/step_buffers.h"
#include "kernels/backend.h"

namespace qwend {

// Takes the places from `cursor` in the order of WeightSlots. Holds at most one tensor of the
// source at a time. INVALID_ARGUMENT when a tensor cannot be kept in spec.weight_type exactly.
absl::StatusOr<ModelWeights> UploadWeights(const ModelSpec& spec, WeightSource& source,
                                           Backend& backend, MemoryCursor& cursor);

}  // namespace qwend
