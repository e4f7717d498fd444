#pragma once

#include <math.h>

#include <cstdint>
#include <cstring>

#include "host_device.h"

// Order statistics of one column, without sorting it.
//
// A value becomes an unsigned key of the same order: -inf < .. < -0 < +0 < .. < +inf < NaN, every NaN alike.
// A row that takes no part carries kAbsent, which no bound exceeds, so it is never counted and never summed.
//
// A Column answers two questions about its keys; how (a loop, a warp) is its own business:
//   int64_t count_below(Key bound)            how many keys are < bound
//   double  sum_between(Key low, Key high)    sum of the values whose keys lie strictly between

namespace secureafl::SECUREAFL_KIND {

enum class Rule : int32_t { kMedian, kTrimmedMean, kMean };

template <typename To, typename From>
SECUREAFL_FN To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From), "bits_of keeps the size");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

template <typename T>
struct KeyOf;
template <>
struct KeyOf<float> {
  using type = uint32_t;
};
template <>
struct KeyOf<double> {
  using type = uint64_t;
};
template <typename T>
using Key = typename KeyOf<T>::type;

template <typename T>
constexpr Key<T> kSign = Key<T>(1) << (8 * sizeof(T) - 1);
template <typename T>
constexpr Key<T> kAbsent = ~Key<T>(0);

template <typename T>
SECUREAFL_FN Key<T> to_key(T value) {
  if (value != value) return kAbsent<T> - 1;
  const auto bits = bits_of<Key<T>>(value);
  return bits & kSign<T> ? ~bits : bits | kSign<T>;
}

template <typename T>
SECUREAFL_FN T from_key(Key<T> key) {
  return bits_of<T>(key & kSign<T> ? key & ~kSign<T> : ~key);
}

// The key of the given rank (0: smallest): the largest bound with at most `rank` keys below it, bit by bit.
template <typename T, typename Column>
SECUREAFL_FN Key<T> select(const Column& column, int64_t rank) {
  Key<T> key = 0;
  for (Key<T> bit = kSign<T>; bit != 0; bit >>= 1) {
    if (column.count_below(key | bit) <= rank) key |= bit;
  }
  return key;
}

// (a + b) / 2 without the overflow of a + b; a float's sum cannot overflow in double.
SECUREAFL_FN float midpoint(float a, float b) {
  return static_cast<float>((static_cast<double>(a) + static_cast<double>(b)) / 2);
}
SECUREAFL_FN double midpoint(double a, double b) {
  const double sum = a + b;
  return isfinite(sum) ? sum / 2 : a / 2 + b / 2;
}

// How many values a rule drops on either side of `kept` ones. The median is the deepest trim there is.
SECUREAFL_FN int64_t dropped(Rule rule, int64_t trim, int64_t kept) {
  if (rule == Rule::kMedian) return kept > 0 ? (kept - 1) / 2 : 0;
  return rule == Rule::kTrimmedMean ? trim : 0;
}

// Mean of the values whose ranks lie in [trim, kept - trim); zero if there are none.
template <typename T, typename Column>
SECUREAFL_FN T reduce_column(const Column& column, Rule rule, int64_t trim) {
  const int64_t kept = column.count_below(kAbsent<T>);
  const int64_t first = dropped(rule, trim, kept), last = kept - first - 1;
  const int64_t left = last - first + 1;
  if (left <= 0) return T(0);
  if (rule == Rule::kMean) return static_cast<T>(column.sum_between(0, kAbsent<T>) / left);

  const Key<T> low = select<T>(column, first);
  const Key<T> high = left == 1 ? low : select<T>(column, last);
  if (low == high) return from_key<T>(low);
  if (left == 2) return midpoint(from_key<T>(low), from_key<T>(high));

  // Ties: copies of the two border values may lie on both sides of the border.
  const int64_t lows = column.count_below(low + 1) - first;
  const int64_t highs = last + 1 - column.count_below(high);
  const double sum = lows * static_cast<double>(from_key<T>(low)) + column.sum_between(low, high) +
                     highs * static_cast<double>(from_key<T>(high));
  return static_cast<T>(sum / left);
}

}  // namespace secureafl::SECUREAFL_KIND
