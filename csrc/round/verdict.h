#pragma once

#include <math.h>

#include <cstdint>

#include "common/host_device.h"

// What the server makes of one update, from a few sums over d (spec: section 2, steps 1 to 3).
//   g: the update, w: the model it was computed on, last_g and last_w: the client's previous ones
//   y = g - last_g,  s = w - last_w

namespace secureafl::SECUREAFL_KIND {

enum Sum { kNonFinite, kGG, kYY, kSS, kSY, kSums };  // kNonFinite: coordinates of g that are not finite

// Python knows these as config.REASONS; the first two accept.
enum class Reason : int64_t { kAccepted, kFirst, kSteep, kSameVersion, kNotFinite };

SECUREAFL_BOTH bool accepts(Reason reason) { return reason == Reason::kAccepted || reason == Reason::kFirst; }

// A factor enters Q only if there is one: a known client, a finite update, another model than last time.
SECUREAFL_FN bool has_factor(const double* sums, bool known) {
  return known && sums[kNonFinite] == 0 && sums[kSS] > 0 && isfinite(sums[kYY]);
}

// What the factors of Q weigh, but for the new one: those strictly below it, and all.
struct Tally {
  int64_t below, all;
};

// Whether more than the share `quantile` of the other factors lies strictly below this one. Where all weigh the same,
// this is factor > quantile(Q) with linear interpolation. rounding: of the weights, so that a tie stays one.
SECUREAFL_FN bool exceeds_quantile(const Tally& tally, double quantile, int64_t rounding) {
  const double most = floor(static_cast<double>(tally.all) * quantile);
  return static_cast<double>(tally.below - rounding) > most;
}

SECUREAFL_FN Reason judge(const double* sums, bool known, bool filter, bool steep) {
  if (sums[kNonFinite] > 0) return Reason::kNotFinite;
  if (!known) return Reason::kFirst;
  if (!filter) return Reason::kAccepted;
  if (!(sums[kSS] > 0)) return sums[kYY] == 0 ? Reason::kAccepted : Reason::kSameVersion;
  return isfinite(sums[kYY]) && !steep ? Reason::kAccepted : Reason::kSteep;
}

// A pair is worth keeping if the client's loss bends upwards along it.
SECUREAFL_FN bool has_curvature(const double* sums) {
  constexpr double kLeast = 1e-8;
  return sums[kSY] > kLeast * sums[kSS] && isfinite(sums[kYY]);
}

}  // namespace secureafl::SECUREAFL_KIND
