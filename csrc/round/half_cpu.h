#pragma once

#include <torch/headeronly/util/Half.h>

#include <cstdint>

#include "rules/rank.h"

// Pairs lie in memory as float32, or as float16 under the type of its bits.

namespace secureafl::cpu {

inline float to_float(float value) { return value; }

// Exponent and fraction, moved to where a float has them, are short of 2^112, the difference of the two biases; that
// holds for float16's subnormal numbers too. Infinities and NaNs would come out wrong, and no history holds any.
// No table and no branch: loops over it vectorise.
inline float to_float(uint16_t half) {
  const auto extended = static_cast<uint32_t>(static_cast<int16_t>(half));  // the sign fills all bits above
  return bits_of<float>(extended << 13 & 0x8fffe000u) * 0x1p112f;
}

// To nearest, ties to even.
inline void round_to(float value, float& out) { out = value; }
inline void round_to(float value, uint16_t& out) { out = torch::headeronly::Half(value).x; }

}  // namespace secureafl::cpu
