#pragma once

#include <math.h>

#include <cstdint>

#include "common/host_device.h"
#include "coordinate_wise/rank.h"

namespace secureafl::SECUREAFL_KIND {

// The bits of a double that is 0 or more are ordered as the numbers are. Keys have five digits of 13 bits. The first
// one is the exponent.
constexpr int kDigitBits = 13, kDigits = 5, kBins = 1 << kDigitBits;
constexpr uint64_t kNoKey = ~uint64_t{0};

// Scratch memory of `key_of_rank`; shared memory on a GPU.
struct Bins {
  uint32_t counts[kBins];
  int digit, below;  // result of one thread, read by all
};

// Finds the digit of the key of this rank, and the number of keys with a smaller one, from the counts of all digits.
template <typename Team>
SECUREAFL_FN void find_digit(const Team& team, int rank, Bins* bins) {
  constexpr int kEach = kBins / Team::kSize;
  const int first = team.rank() * kEach;
  int own = 0;
  SECUREAFL_NO_UNROLL
  for (int i = first; i < first + kEach; ++i) own += static_cast<int>(bins->counts[i]);
  int below = team.sum_before(own);
  if (rank < below || rank >= below + own) return;  // true for all threads but one
  int digit = first;
  SECUREAFL_NO_UNROLL
  for (; below + static_cast<int>(bins->counts[digit]) <= rank; ++digit) below += static_cast<int>(bins->counts[digit]);
  bins->digit = digit;
  bins->below = below;
}

// The key of this rank among keys (n), digit by digit: counts the digits of the keys that have the same ones before.
template <typename Team>
SECUREAFL_FN uint64_t key_of_rank(const Team& team, const uint64_t* keys, int64_t n, int rank, Bins* bins) {
  constexpr int kBatch = 8;
  uint64_t found = 0;
  SECUREAFL_NO_UNROLL
  for (int shift = (kDigits - 1) * kDigitBits; shift >= 0; shift -= kDigitBits) {
    SECUREAFL_NO_UNROLL
    for (int i = team.rank(); i < kBins; i += Team::kSize) bins->counts[i] = 0;
    team.sync();
    SECUREAFL_NO_UNROLL
    for (int64_t first = team.rank(); first < n; first += kBatch * Team::kSize) {
      uint64_t batch[kBatch];  // the loads are issued together
      SECUREAFL_UNROLL
      for (int j = 0; j < kBatch; ++j) {
        const int64_t k = first + j * Team::kSize;
        batch[j] = k < n ? keys[k] : kNoKey;
      }
      SECUREAFL_UNROLL
      for (int j = 0; j < kBatch; ++j) {
        const uint64_t digits = batch[j] >> shift;
        if (batch[j] != kNoKey && digits >> kDigitBits == found) team.increment(bins->counts + digits % kBins);
      }
    }
    team.sync();
    find_digit(team, rank, bins);
    team.sync();
    found = found << kDigitBits | static_cast<uint64_t>(bins->digit);
    rank -= bins->below;
  }
  return found;
}

// Median of the numbers, 0 or more, with the `count` keys among keys (n) that are not kNoKey; inf if there is none.
template <typename Team>
SECUREAFL_FN double median_of_keys(const Team& team, const uint64_t* keys, int64_t n, int count, Bins* bins) {
  if (count == 0) return INFINITY;
  const uint64_t lower = key_of_rank(team, keys, n, (count - 1) / 2, bins);
  const uint64_t upper = count % 2 ? lower : key_of_rank(team, keys, n, count / 2, bins);
  return (bits_of<double>(lower) + bits_of<double>(upper)) / 2;
}

}  // namespace secureafl::SECUREAFL_KIND
