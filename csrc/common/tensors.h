#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <string>
#include <type_traits>
#include <vector>

#include "common/host_device.h"

// Conversions from torch tensors to the plain pointers that the arithmetic and the kernels use.

namespace secureafl::SECUREAFL_KIND {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Copies a `str` argument of an op and frees its handle. The conversion of torch to std::string leaks one string per
// call (pytorch issue 191340), so ops take the handle itself.
inline std::string take_string(StringHandle handle) {
  size_t length = 0;
  const char* letters = nullptr;
  torch_string_length(handle, &length);
  torch_string_c_str(handle, &letters);
  std::string text(letters, length);
  torch_delete_string(handle);
  return text;
}

inline Tensor dense(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

template <typename T>
const T* data(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}
template <typename T>
T* mutable_data(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

// An uninitialised tensor on the same device.
inline Tensor allocate(const Tensor& like, ScalarType dtype, const std::vector<int64_t>& shape) {
  return torch::stable::new_empty(like, shape, dtype);
}

// Two-byte floats are ordered and averaged as float32, which holds them exactly.
template <typename scalar_t>
using compute_t = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;

// Calls f with a value of the C++ type of dtype. The checks have rejected all other types.
template <typename F>
void dispatch_wide(ScalarType dtype, const F& f) {
  if (dtype == ScalarType::Double) return f(double());
  f(float());
}
template <typename F>
void dispatch_any(ScalarType dtype, const F& f) {
  if (dtype == ScalarType::Half) return f(torch::headeronly::Half());
  if (dtype == ScalarType::BFloat16) return f(torch::headeronly::BFloat16());
  dispatch_wide(dtype, f);
}

// Number of true values in a host tensor of bools.
inline int64_t count_true(const Tensor& bools) {
  return std::count(data<bool>(bools), data<bool>(bools) + bools.numel(), true);
}

}  // namespace secureafl::SECUREAFL_KIND
