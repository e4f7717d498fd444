#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "row_wise/kinship/kinship.h"

namespace secureafl::SECUREAFL_KIND {

enum class RowRule : int32_t { kKrum, kSpectral, kGeometricMedian, kCenteredClip };

// A round of a rule that weighs whole rows by their inner products (secureafl_ext/rules/row_rules.py). The sums and the
// step are those of kinship.h.
struct RowRound : KinRound {
  RowRule weighs;
  double remove;       // share of the rows that spectral drops and that krum takes for malicious
  double radius;       // of centered_clip; below 0: the median distance to the center
  int64_t iterations;  // of centered_clip
};

}  // namespace secureafl::SECUREAFL_KIND
