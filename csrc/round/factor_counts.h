#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "coordinate_wise/rank.h"

// A pooled Q without a window keeps all factors, but memory and time must not grow with the rounds. So it holds the
// first r.room factors as they are and counts the later ones by key. A key is the exponent of a factor and the first 12
// bits of its fraction: keys are in the order of the factors, and two factors with the same key differ by less than
// 2^-12 of their value. Factors below 2^-64 all have the first key, factors from 2^64 on the last one.
//
// The counts are a table of kKeysPerRow columns. Row 0 has the sum of every other row; row 1 + i has the keys i *
// kKeysPerRow and up. So the factors below a key are part of row 0 and part of one more row. Python has the same table:
// engines/factor_counts.py.

namespace secureafl::SECUREAFL_KIND {

constexpr int64_t kKeysPerRow = 1024, kKeyRows = 512;

SECUREAFL_FN int32_t key_of(double factor) {
  constexpr int kFraction = 12, kLeastExponent = -64;
  constexpr int64_t kFirst = static_cast<int64_t>(1023 + kLeastExponent) << kFraction;
  const int64_t key = static_cast<int64_t>(bits_of<uint64_t>(factor) >> (52 - kFraction)) - kFirst;
  return static_cast<int32_t>(key < 0 ? 0 : key < kKeyRows * kKeysPerRow ? key : kKeyRows * kKeysPerRow - 1);
}

SECUREAFL_FN void count_factor(int64_t* counts, double factor) {
  const int32_t key = key_of(factor);
  ++counts[key / kKeysPerRow];
  ++counts[kKeysPerRow + key];
}

// Contribution of this thread to the number of factors with lower keys.
template <typename Team>
SECUREAFL_FN int64_t counted_below(const Team& team, const int64_t* counts, double factor) {
  const int32_t key = key_of(factor), row = key / kKeysPerRow, column = key % kKeysPerRow;
  const int64_t* own_row = counts + (1 + row) * kKeysPerRow;
  int64_t below = 0;
  for (int i = team.rank(); i < row; i += team.size()) below += counts[i];
  for (int i = team.rank(); i < column; i += team.size()) below += own_row[i];
  return below;
}

}  // namespace secureafl::SECUREAFL_KIND
