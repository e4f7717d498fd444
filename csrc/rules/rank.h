#pragma once

#include <math.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/host_device.h"

// Order statistics of one column, without sorting it.
//
// A value becomes an unsigned key of the same order: -inf < .. < -0 < +0 < .. < +inf < NaN, every NaN alike.
// A row that takes no part carries kAbsent, which no bound exceeds, so it is never counted and never summed.
//
// A Column answers questions about its keys; how (a loop, a warp) is its own business:
//   int32_t kept()                            how many rows take part: keys < kAbsent
//   int32_t count_below(Key bound)            how many keys are < bound
//   Key     least_from(Key bound)             the smallest key >= bound
//   Key     greatest_below(Key bound)         the largest key < bound
//   double  sum_between(Key low, Key high)    sum of the values whose keys lie strictly between
//   bool    all(bool)                         true if it is for every column that shares the threads of this one
// Where columns share a warp its lanes must meet in every answer, so nothing below branches on a column's values.

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

// Both by working out what to flip, not by branching: loops over them vectorise.
template <typename T>
SECUREAFL_FN Key<T> to_key(T value) {
  using Signed = std::make_signed_t<Key<T>>;
  const auto bits = bits_of<Key<T>>(value);
  const Key<T> all_if_negative = static_cast<Key<T>>(static_cast<Signed>(bits) >> (8 * sizeof(T) - 1));
  const Key<T> key = bits ^ (all_if_negative | kSign<T>);
  return value == value ? key : kAbsent<T> - 1;
}

template <typename T>
SECUREAFL_FN T from_key(Key<T> key) {
  return bits_of<T>(key ^ (key & kSign<T> ? kSign<T> : ~Key<T>(0)));
}

// The key of the given rank (0: smallest) among `kept`: bit by bit, the largest bound with at most `rank` keys below
// it. Once a bound cuts off all ranks on one side the key is its neighbour: some ten steps in place of 32. Equal keys
// cannot be cut apart, so now and then the smallest one left is tried itself.
template <typename T, typename Column>
SECUREAFL_FN Key<T> select(const Column& column, int32_t rank, int32_t kept) {
  constexpr Key<T> kTries = kSign<T> >> 8 | kSign<T> >> 12 | kSign<T> >> 16 | kSign<T> >> 22;
  bool found = rank == 0 || rank == kept - 1, above = rank == 0;
  Key<T> key = 0, bound = above ? 0 : kAbsent<T>;  // the answer: the smallest key from bound, or the largest below it
  for (Key<T> bit = kSign<T>; bit != 0 && !column.all(found); bit >>= 1) {
    const int32_t below = column.count_below(key | bit);
    if (!found) {
      found = below == rank || below == rank + 1;
      above = below <= rank;
      if (found || above) bound = key | bit;
      if (above) key |= bit;
    }
    if (!(bit & kTries)) continue;
    const Key<T> least = column.least_from(key);
    const bool is_it = column.count_below(least + 1) > rank;
    if (!found && is_it) {
      found = above = true;
      bound = least;
    }
  }
  if (!found) {
    bound = key;
    above = true;
  }
  const Key<T> least = column.least_from(bound), greatest = column.greatest_below(bound);
  return above ? least : greatest;
}

// The same from a guess: from one key to its neighbour until the rank is met, or after some steps by the search. For a
// column that has its threads to itself, since the way depends on the keys.
template <typename T, typename Column>
SECUREAFL_FN Key<T> select_near(const Column& column, int32_t rank, int32_t kept, Key<T> guess) {
  constexpr int kSteps = 4;
  Key<T> bound = guess;
  int32_t below = column.count_below(bound);
  for (int step = 0; step < kSteps; ++step) {
    const bool up = below <= rank;
    const Key<T> key = up ? column.least_from(bound) : column.greatest_below(bound);
    bound = up ? key + 1 : key;
    below = column.count_below(bound);
    if (up == (below > rank)) return key;
  }
  return select<T>(column, rank, kept);
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
SECUREAFL_FN int32_t dropped(Rule rule, int32_t trim, int32_t kept) {
  if (rule == Rule::kMedian) return kept > 0 ? (kept - 1) / 2 : 0;
  return rule == Rule::kTrimmedMean ? trim : 0;
}

// A key that the median may be close to.
template <typename T>
struct Guess {
  bool given = false;
  Key<T> key = 0;
};

// Mean of the values whose ranks lie in [trim, kept - trim); zero if there are none.
template <typename T, typename Column>
SECUREAFL_FN T reduce_column(const Column& column, Rule rule, int64_t trim, Guess<T> guess = {}) {
  const int32_t kept = column.kept();
  const int32_t first = dropped(rule, trim < kept ? static_cast<int32_t>(trim) : kept, kept), last = kept - first - 1;
  const int32_t left = last - first + 1;
  if (left <= 0) return T(0);
  if (rule == Rule::kMean) return static_cast<T>(column.sum_between(0, kAbsent<T>) / left);

  const Key<T> low = guess.given ? select_near<T>(column, first, kept, guess.key) : select<T>(column, first, kept);
  if (left == 1) return from_key<T>(low);
  const int32_t low_end = column.count_below(low + 1);
  if (left == 2) {
    const Key<T> next = column.least_from(low + 1);
    return midpoint(from_key<T>(low), from_key<T>(low_end > last ? low : next));
  }

  // Ties: copies of the two border values may lie on both sides of the border.
  const Key<T> high = select<T>(column, last, kept);
  const int32_t lows = low_end - first, highs = last + 1 - column.count_below(high);
  const double sum = lows * static_cast<double>(from_key<T>(low)) + column.sum_between(low, high) +
                     highs * static_cast<double>(from_key<T>(high));
  return low == high ? from_key<T>(low) : static_cast<T>(sum / left);
}

}  // namespace secureafl::SECUREAFL_KIND
