#pragma once

#include "common/check.h"
#include "common/tensors.h"

// The op lipschitz for both devices. A Device has
//   factor(g, last_g, w, last_w, d, out, like)   computes the factor
// like: a tensor on the device where scratch memory is allocated.

namespace secureafl::SECUREAFL_KIND {

// All (d).
inline void check_factor(const char* op, const Tensor& update, const Tensor& last_update, const Tensor& model,
                         const Tensor& last_model) {
  const Check check(op, "update", update, /*two_byte_types=*/false);
  check.shape("update", update, "(d,)", {-1});
  check.floats("last_update", last_update, "(d,)", {update.size(0)});
  check.floats("model", model, "(d,)", {update.size(0)});
  check.floats("last_model", last_model, "(d,)", {update.size(0)});
}

template <typename Device>
Tensor lipschitz(const Tensor& update, const Tensor& last_update, const Tensor& model, const Tensor& last_model) {
  check_factor("lipschitz", update, last_update, model, last_model);
  const Device device(update);
  const Tensor g = dense(update), last_g = dense(last_update), w = dense(model), last_w = dense(last_model);
  Tensor out = allocate(g, ScalarType::Double, {});
  dispatch_wide(g.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    device.factor(data<T>(g), data<T>(last_g), data<T>(w), data<T>(last_w), g.size(0), mutable_data<double>(out), g);
  });
  return out;
}

}  // namespace secureafl::SECUREAFL_KIND

// Used at the end of ops_cpu.cpp and ops_cuda.cu.
#define SECUREAFL_REGISTER_LIPSCHITZ(Device, key)                             \
  STABLE_TORCH_LIBRARY_IMPL(secureafl, key, m) {                              \
    m.impl("lipschitz", TORCH_BOX(&secureafl::lipschitz<secureafl::Device>)); \
  }
