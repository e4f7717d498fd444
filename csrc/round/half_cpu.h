#pragma once

#include <torch/headeronly/util/Half.h>

#include <cstdint>

#include "coordinate_wise/rank.h"

// Pairs are stored as float32, or as float16 in the type uint16_t.

namespace secureafl::cpu {

inline float to_float(float value) { return value; }

// Moves exponent and fraction to their places in a float. The result is too small by 2^112, the difference of the two
// biases; this also holds for subnormal numbers. Infinities and NaNs come out wrong; the history has none. Without
// table and branch, so that loops vectorise.
inline float to_float(uint16_t half) {
  const auto extended = static_cast<uint32_t>(static_cast<int16_t>(half));  // the sign fills all bits above
  return bits_of<float>(extended << 13 & 0x8fffe000u) * 0x1p112f;
}

// Rounds to nearest, ties to even.
inline void round_to(float value, float& out) { out = value; }
inline void round_to(float value, uint16_t& out) { out = torch::headeronly::Half(value).x; }

}  // namespace secureafl::cpu
