#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <vector>

#include "lipschitz/lipschitz.h"
#include "lipschitz/ops_impl.h"

namespace secureafl {
namespace cpu {

// |a - b|^2 over d.
template <typename T>
double squared_distance(const T* a, const T* b, int64_t d) {
  constexpr int64_t kChunk = 4096;
  std::vector<double> sums(static_cast<size_t>((d + kChunk - 1) / kChunk));
  torch::stable::parallel_for(0, static_cast<int64_t>(sums.size()), 16, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      double sum = 0;
      for (int64_t c = chunk * kChunk; c < std::min(d, (chunk + 1) * kChunk); ++c) {
        sum += squared_difference(a[c], b[c]);
      }
      sums[chunk] = sum;
    }
  });
  double sum = 0;
  for (const double part : sums) sum += part;
  return sum;
}

}  // namespace cpu

struct CpuLipschitz {
  explicit CpuLipschitz(const Tensor&) {}

  template <typename T>
  void factor(const T* g, const T* last_g, const T* w, const T* last_w, int64_t d, double* out, const Tensor&) const {
    *out = lipschitz_factor(cpu::squared_distance(g, last_g, d), cpu::squared_distance(w, last_w, d));
  }
};

}  // namespace secureafl

SECUREAFL_REGISTER_LIPSCHITZ(CpuLipschitz, CPU)
