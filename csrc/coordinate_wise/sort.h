#pragma once

#include <cstdint>
#include <utility>

#include "common/host_device.h"

// Batcher's odd-even merge sort of the keys of one column, in registers. The exchanges are fixed at compile time and
// never branch on a key. Sizes are powers of two; missing keys count as larger than all others, so exchanges with them
// are left out. The compiler also drops exchanges that no used key depends on.

namespace secureafl::SECUREAFL_KIND {

SECUREAFL_BOTH int64_t power_of_two(int64_t count) {
  int64_t size = 1;
  while (size < count) size *= 2;
  return size;
}

template <int kLow, int kHigh, int kCount, typename K>
SECUREAFL_FN void exchange(K (&keys)[kCount]) {
  if constexpr (kHigh < kCount) {
    const K a = keys[kLow], b = keys[kHigh];  // by value: the references of std::min do not vectorise
    keys[kLow] = a < b ? a : b;
    keys[kHigh] = a < b ? b : a;
  }
}

template <int kFirst, int kStride, int kCount, typename K, int... kPairs>
SECUREAFL_FN void exchange_pairs(K (&keys)[kCount], std::integer_sequence<int, kPairs...>) {
  (exchange<kFirst + (2 * kPairs + 1) * kStride, kFirst + (2 * kPairs + 2) * kStride>(keys), ...);
}

template <int kFirst, int kStride, int kSize, int kCount, typename K>
SECUREAFL_FN void merge_in_registers(K (&keys)[kCount]) {
  if constexpr (kSize == 2) {
    exchange<kFirst, kFirst + kStride>(keys);
  } else {
    merge_in_registers<kFirst, 2 * kStride, kSize / 2>(keys);
    merge_in_registers<kFirst + kStride, 2 * kStride, kSize / 2>(keys);
    exchange_pairs<kFirst, kStride>(keys, std::make_integer_sequence<int, kSize / 2 - 1>());
  }
}

template <int kFirst, int kSize, int kCount, typename K>
SECUREAFL_FN void sort_in_registers(K (&keys)[kCount]) {
  if constexpr (kSize > 1) {
    sort_in_registers<kFirst, kSize / 2>(keys);
    sort_in_registers<kFirst + kSize / 2, kSize / 2>(keys);
    merge_in_registers<kFirst, 1, kSize>(keys);
  }
}

}  // namespace secureafl::SECUREAFL_KIND
