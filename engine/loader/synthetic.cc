#include <bit>
#include <cmath>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/loader/weights.h"
#include "engine/models/model_tensors.h"
#include "engine/models/registry.h"

namespace qwend {
namespace {

class SplitMix {
 public:
  explicit SplitMix(uint64_t seed) : state_(seed) {}
  uint64_t Next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  double Uniform() { return static_cast<double>(Next() >> 11) * 0x1p-53; }
  double Normal() {
    const double u = 1.0 - Uniform();
    return std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * M_PI * Uniform());
  }

 private:
  uint64_t state_;
};

uint16_t RoundToBf16(float f) {
  const uint32_t bits = std::bit_cast<uint32_t>(f);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

class SyntheticSource : public WeightSource {
 public:
  SyntheticSource(const ModelSpec& spec, uint64_t seed) : spec_(spec), seed_(seed) {
    for (TensorSpec& t : ModelTensors(spec)) {
      std::string name = t.name;
      tensors_.emplace(std::move(name), std::move(t));
    }
  }

  DType weight_type() const override { return DType::kBF16; }

  absl::StatusOr<TensorView> Get(std::string_view name) override {
    const auto it = tensors_.find(name);
    if (it == tensors_.end()) {
      return absl::NotFoundError(absl::StrCat("the model has no tensor ", std::string(name)));
    }
    const TensorSpec& t = it->second;
    int64_t count = 1;
    for (int64_t n : t.shape) count *= n;
    values_ = nullptr;  // freed before the next is made
    values_ = std::make_unique_for_overwrite<uint16_t[]>(count);
    Fill(t, count);
    TensorView view = TensorView::Of(values_.get(), DType::kBF16, {count});
    view.rank = static_cast<int>(t.shape.size());
    int64_t stride = 1;
    for (int i = view.rank - 1; i >= 0; --i) {
      view.shape[i] = t.shape[i];
      view.strides[i] = stride;
      stride *= t.shape[i];
    }
    return view;
  }

 private:
  // Mean and spread of a role's values.
  std::pair<double, double> Distribution(const TensorSpec& t) const {
    switch (t.role) {
      case TensorRole::kEmbedding:
        return {0.0, 0.05};
      case TensorRole::kProjection:
        return {0.0, 1.0 / std::sqrt(static_cast<double>(t.shape.back()))};
      case TensorRole::kNorm:
        return {1.0 - spec_.norm_weight_offset, 0.05};
      case TensorRole::kGatedNorm:
        return {1.0, 0.05};
      case TensorRole::kBias:
        return {0.0, 0.1};
      case TensorRole::kConv:
        return {0.0, 0.4};
      case TensorRole::kALog:
        return {0.0, 0.7};
      case TensorRole::kDtBias:
        return {-1.5, 0.7};
    }
    return {0.0, 1.0};
  }

  // Draws from a table of 4096 normal values, five to a random word: quick enough to make
  // gigabytes, and no two tensors alike.
  void Fill(const TensorSpec& t, int64_t count) {
    constexpr int kTableBits = 12;
    uint64_t name_hash = 0xcbf29ce484222325u;
    for (char c : t.name) name_hash = (name_hash ^ static_cast<uint8_t>(c)) * 0x100000001b3u;
    SplitMix random(seed_ * 0x9e3779b97f4a7c15u + name_hash);
    const auto [mean, spread] = Distribution(t);
    uint16_t table[1 << kTableBits];
    for (uint16_t& v : table) v = RoundToBf16(static_cast<float>(mean + spread * random.Normal()));
    uint16_t* out = values_.get();
    int64_t i = 0;
    while (i < count) {
      uint64_t word = random.Next();
      for (int k = 0; k < 5 && i < count; ++k, word >>= kTableBits) {
        out[i++] = table[word & ((1 << kTableBits) - 1)];
      }
    }
  }

  ModelSpec spec_;
  uint64_t seed_;
  std::map<std::string, TensorSpec, std::less<>> tensors_;
  std::unique_ptr<uint16_t[]> values_;
};

}  // namespace

std::unique_ptr<WeightSource> MakeSyntheticWeights(const ModelSpec& spec, uint64_t seed) {
  return std::make_unique<SyntheticSource>(spec, seed);
}

absl::StatusOr<ModelSpec> SyntheticSpec(std::string_view name) {
  std::vector<std::string> names;
  for (PublishedShape& shape : PublishedShapes()) {
    if (name == shape.name) return std::move(shape.spec);
    names.push_back(shape.name);
  }
  return absl::InvalidArgumentError(absl::StrCat("there is no synthetic model \"",
                                                 std::string(name), "\"; choose one of ",
                                                 absl::StrJoin(names, ", ")));
}

}  // namespace qwend
