#pragma once

#include <math.h>

#include <cstdint>

#include "host_device.h"

// What the server makes of one update, from a few sums over d (spec: section 2, steps 1 to 3).
//   g: the update, w: the model it was computed on, last_g and last_w: the client's previous ones
//   y = g - last_g,  s = w - last_w

namespace secureafl::SECUREAFL_KIND {

enum Sum { kBad, kGG, kYY, kSS, kSY, kSums };  // kBad: coordinates of g that are not finite

// Python knows these as config.REASONS; the first two accept.
enum class Reason : int64_t { kAccepted, kFirst, kSteep, kSameVersion, kNotFinite };

SECUREAFL_BOTH bool accepts(Reason reason) { return reason == Reason::kAccepted || reason == Reason::kFirst; }

// A factor enters Q only if there is one: a known client, a finite update, another model than last time.
SECUREAFL_FN bool has_factor(const double* sums, bool known) {
  return known && sums[kBad] == 0 && sums[kSS] > 0 && isfinite(sums[kYY]);
}

// `below` of the `size` factors in Q, the new one among them, are smaller than it. At most floor((size - 1) quantile)
// says the same as factor <= quantile(Q) with linear interpolation.
SECUREAFL_FN Reason judge(const double* sums, bool known, bool filter, int64_t below, int64_t size, double quantile) {
  if (sums[kBad] > 0) return Reason::kNotFinite;
  if (!known) return Reason::kFirst;
  if (!filter) return Reason::kAccepted;
  if (!(sums[kSS] > 0)) return sums[kYY] == 0 ? Reason::kAccepted : Reason::kSameVersion;
  return isfinite(sums[kYY]) && below <= floor((size - 1) * quantile) ? Reason::kAccepted : Reason::kSteep;
}

// A pair is worth keeping if the client's loss bends upwards along it.
SECUREAFL_FN bool has_curvature(const double* sums) {
  constexpr double kLeast = 1e-8;
  return sums[kSY] > kLeast * sums[kSS] && isfinite(sums[kYY]);
}

}  // namespace secureafl::SECUREAFL_KIND
