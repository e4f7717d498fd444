#pragma once

#include <math.h>

#include <cstdint>

#include "common/host_device.h"

// The decision on one update, from a few sums over d (docs/algorithm.md, "One round", step 1).
//   g: the update, w: the model it was computed on, last_g and last_w: the previous ones of the client
//   y = g - last_g,  s = w - last_w

namespace secureafl::SECUREAFL_KIND {

enum Sum { kNonFinite, kGG, kYY, kSS, kSY, kSums };  // kNonFinite: number of coordinates of g that are not finite

// Same order as config.REASONS in Python. The first two accept the update.
enum class Reason : int64_t { kAccepted, kFirst, kSteep, kSameVersion, kNotFinite };

SECUREAFL_BOTH bool accepts(Reason reason) { return reason == Reason::kAccepted || reason == Reason::kFirst; }

// An update has a factor only if the client is known, the update is finite, and the model differs from last time.
SECUREAFL_FN bool has_factor(const double* sums, bool known) {
  return known && sums[kNonFinite] == 0 && sums[kSS] > 0 && isfinite(sums[kYY]);
}

// Weights of the factors in Q without the new one: of those strictly below it, and of all.
struct Tally {
  int64_t below, all;
};

// True if more than the share `quantile` of the other factors is strictly below this one. With equal weights this is
// factor > quantile(Q) with linear interpolation. rounding: the error of the integer weights, so that a tie stays a
// tie.
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

// A pair is stored only if the curvature s.y is positive enough.
SECUREAFL_FN bool has_curvature(const double* sums) {
  constexpr double kLeast = 1e-8;
  return sums[kSY] > kLeast * sums[kSS] && isfinite(sums[kYY]);
}

}  // namespace secureafl::SECUREAFL_KIND
