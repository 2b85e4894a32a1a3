#include "engine/rope_tables.h"

#include <cmath>
#include <cstdint>

namespace qwend {

RopeTables MakeRopeTables(int positions, int rotary_dim, double theta) {
  const int half = rotary_dim / 2;
  std::vector<float> frequency(half);
  for (int i = 0; i < half; ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(rotary_dim);
    frequency[i] = 1.0f / static_cast<float>(std::pow(theta, static_cast<double>(exponent)));
  }
  RopeTables tables;
  const int64_t n = int64_t{positions} * half;
  tables.cos.reserve(n);
  tables.sin.reserve(n);
  for (int p = 0; p < positions; ++p) {
    for (int i = 0; i < half; ++i) {
      const float angle = static_cast<float>(p) * frequency[i];
      tables.cos.push_back(static_cast<float>(std::cos(static_cast<double>(angle))));
      tables.sin.push_back(static_cast<float>(std::sin(static_cast<double>(angle))));
    }
  }
  return tables;
}

}  // namespace qwend
