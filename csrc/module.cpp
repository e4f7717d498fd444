#include <pybind11/pybind11.h>

#include "round/round.h"
#include "round/tiles.h"

// Importing this module registers the ops; it binds none of them. It includes no torch header: torch ships its own
// pybind11, which cannot be used together with the stable ABI.

namespace {

// The instruction set that the compiler was allowed to use.
const char* simd() {
#if defined(__AVX512F__)
  return "avx512";
#elif defined(__AVX2__)
  return "avx2";
#elif defined(__SSE2__)
  return "sse2";
#elif defined(__ARM_FEATURE_SVE)
  return "sve";
#elif defined(__ARM_NEON)
  return "neon";
#else
  return "none";
#endif
}

pybind11::dict build_info() {
  pybind11::dict info;
  info["version"] = SECUREAFL_VERSION;
  info["torch"] = SECUREAFL_TORCH;
#if defined(SECUREAFL_CUDA_ARCHS)
  info["cuda"] = SECUREAFL_CUDA_ARCHS;
#else
  info["cuda"] = pybind11::none();
#endif
#if defined(SECUREAFL_COMMIT)
  info["commit"] = SECUREAFL_COMMIT;
#else
  info["commit"] = pybind11::none();
#endif
  info["compiler"] = SECUREAFL_COMPILER;
  info["simd"] = simd();
  return info;
}

// Coordinates per tile of the history of `step_`.
int64_t tile_columns(bool cuda, int64_t clients, int64_t memory) {
  return cuda ? secureafl::shape_of(clients, memory).columns : secureafl::kCpuColumns;
}

// Number of sums of a pass, which the ranks add up.
int64_t pass_sums(int64_t clients, int64_t memory) { return secureafl::PassSums{clients, memory}.count(); }

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.def("build_info", &build_info);
  m.def("pass_sums", &pass_sums);
  m.def("tile_columns", &tile_columns);
  m.attr("MOST_CLIENTS") = secureafl::kMaxClients;
  m.attr("MOST_GPU_PAIRS") = secureafl::kMaxGpuPairs;
  m.attr("VERDICT_BYTES") = sizeof(secureafl::Verdict);
}
