#pragma once

#include <math.h>

#include "common/host_device.h"

namespace secureafl::SECUREAFL_KIND {

// Sums of squares -> Lipschitz factor. No movement at all is no evidence (0); an update that moved while the
// model stood still has no bound (inf).
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
