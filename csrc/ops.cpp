#include <pybind11/pybind11.h>
#include <torch/csrc/stable/library.h>
#include <torch/headeronly/version.h>

// The schemas, each once. Kernels register themselves for their device at the foot of cpu/*.cpp and cuda/*.cu;
// fake kernels and docstrings are in secureafl_ext/ops.py.
STABLE_TORCH_LIBRARY(secureafl, m) {
  m.def("median(Tensor updates, Tensor? mask=None) -> Tensor");
  m.def("trimmed_mean(Tensor updates, int trim, Tensor? mask=None) -> Tensor");
  m.def("lipschitz(Tensor update, Tensor last_update, Tensor model, Tensor last_model) -> Tensor");
  m.def(
      "estimate(Tensor model, Tensor last_updates, Tensor last_models, Tensor dw, Tensor dg, Tensor pairs, "
      "float trust=1.0) -> Tensor");
  m.def(
      "aggregate(Tensor model, Tensor update, int client, Tensor accepted, Tensor last_updates, "
      "Tensor last_models, Tensor dw, Tensor dg, Tensor pairs, Tensor seen, float trust=1.0, "
      "str rule=\"median\", int trim=0) -> Tensor");
}

namespace {

// What the compiler was allowed to use: plain loops become these vectors.
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
  info["torch"] = C10_STRINGIZE(TORCH_VERSION_MAJOR) "." C10_STRINGIZE(TORCH_VERSION_MINOR) "." C10_STRINGIZE(
      TORCH_VERSION_PATCH);
#if defined(SECUREAFL_CUDA_ARCHS)
  info["cuda"] = SECUREAFL_CUDA_ARCHS;
#else
  info["cuda"] = pybind11::none();
#endif
  info["compiler"] = SECUREAFL_COMPILER;
  info["simd"] = simd();
  return info;
}

}  // namespace

// Importing this module is what registers the ops; it binds none of them itself.
PYBIND11_MODULE(_C, m) { m.def("build_info", &build_info); }
