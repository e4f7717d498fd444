#pragma once

#include "common/check.h"

namespace secureafl::SECUREAFL_KIND {

// vector (d): the parameters of a net.
inline Check check_net(const char* op, const Tensor& vector) {
  if (vector.scalar_type() != ScalarType::Float) {
    refuse(op, "vector must have dtype float32, got ", name_of(vector.scalar_type()));
  }
  return Check(op, "vector", vector, /*two_byte_types=*/false);
}

}  // namespace secureafl::SECUREAFL_KIND
