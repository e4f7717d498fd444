#pragma once

#include <math.h>

#include <cstdint>

#include "common/host_device.h"
#include "row_wise/kinship/kinship.h"

// A round of rule "support" with averages="steps" (reasons: secureafl_ext/rules/mean_steps.py). The sums and the step
// are those of kinship.h, without products with other clients' updates: a round reads nothing of them but n numbers.
// A refresh takes the inner products of all means.

namespace secureafl::SECUREAFL_KIND {

struct MeanRound : KinRound {
  void* own_means;     // (n, d): mean of each client's updates; float32, or bfloat16
  bool two_bytes;      // own_means is bfloat16
  double* total;       // (n): sum of the shares of the updates in each client's mean, at most bounds.span
  double* noise;       // (n): sum of the squared weights of the updates in the mean
  double* norms;       // (n): of the last updates
  double least_share;  // of an update that does not move the model
  double max_noise;    // of a mean whose length is known; with more noise it is taken as 0
  int64_t every;       // rounds between two refreshes
};

// Squared length of a mean without the noise of single updates. square: with it. A mean that is all noise has 0 here
// and NO_DIRECTION in mean_steps.py: only observers, who read the products there, tell it from a client without a mean.
SECUREAFL_FN double square_without_noise(const MeanRound& r, int64_t k, double square) {
  const double noise = r.noise[k];
  return noise <= r.max_noise ? fmax((square - noise) / (1 - noise), 0.0) : 0;
}

// The factor that gives the mean of client k that length. square: of the mean
SECUREAFL_FN double shortened(const MeanRound& r, int64_t k, double square) {
  return sqrt(fmin(square_without_noise(r, k, square) / fmax(square, 1e-300), 1.0));
}

}  // namespace secureafl::SECUREAFL_KIND
