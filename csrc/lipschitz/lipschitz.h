#pragma once

#include <math.h>

#include "common/host_device.h"

namespace secureafl::SECUREAFL_KIND {

// Sums of squares -> Lipschitz factor. 0 if neither update nor model changed; inf if only the update changed.
SECUREAFL_FN double lipschitz_factor(double update_square, double model_square) {
  if (update_square == 0 && model_square == 0) return 0;
  return sqrt(update_square) / sqrt(model_square);
}

template <typename T>
SECUREAFL_FN double squared_difference(T a, T b) {
  const double difference = static_cast<double>(a) - static_cast<double>(b);
  return difference * difference;
}

}  // namespace secureafl::SECUREAFL_KIND
