#pragma once

#include <math.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/host_device.h"

// Order statistics of one column, without sorting it.
//
// Each value becomes an unsigned key with the same order: -inf < .. < -0 < +0 < .. < +inf < NaN; all NaNs have one key.
// A row that takes no part has the key kAbsent. No bound is larger than kAbsent, so such a row is never counted and
// never summed.
//
// A Column answers questions about its keys, with a loop or with a warp:
//   int32_t kept()                            number of rows that take part: keys < kAbsent
//   int32_t count_below(Key bound)            number of keys < bound
//   Key     least_from(Key bound)             smallest key >= bound
//   Key     greatest_below(Key bound)         largest key < bound
//   double  sum_between(Key low, Key high)    sum of the values with low < key < high
//   bool    all(bool)                         true if true in all columns that share the threads of this one
// If columns share a warp, all its lanes must take part in every answer. So no branch below depends on the values of
// one column.

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

// Both compute the bits to flip instead of branching, so loops over them vectorise.
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

// The key of rank `rank` (0: smallest) among `kept` keys. Radix search: bit by bit, finds the largest bound with at
// most `rank` keys below it. It stops early once a bound separates the rank from its neighbour, after about ten steps
// instead of 32. Equal keys cannot be separated, so at some steps (kTries) the smallest remaining key itself is tried.
template <typename T, typename Column>
SECUREAFL_FN Key<T> select(const Column& column, int32_t rank, int32_t kept) {
  constexpr Key<T> kTries = kSign<T> >> 8 | kSign<T> >> 12 | kSign<T> >> 16 | kSign<T> >> 22;
  bool found = rank == 0 || rank == kept - 1, above = rank == 0;
  Key<T> key = 0, bound = above ? 0 : kAbsent<T>;  // result: smallest key >= bound, or largest key < bound
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

// The same, starting from a guess: walks from key to key until it meets the rank, and falls back to the search after
// some steps. Only for a column that does not share its threads, because the path depends on the keys.
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

// (a + b) / 2 without overflow. A sum of two floats cannot overflow in double.
SECUREAFL_FN float midpoint(float a, float b) {
  return static_cast<float>((static_cast<double>(a) + static_cast<double>(b)) / 2);
}
SECUREAFL_FN double midpoint(double a, double b) {
  const double sum = a + b;
  return isfinite(sum) ? sum / 2 : a / 2 + b / 2;
}

// Number of values that a rule drops at each end of `kept` values. The median drops as many as possible.
SECUREAFL_FN int32_t dropped(Rule rule, int32_t trim, int32_t kept) {
  if (rule == Rule::kMedian) return kept > 0 ? (kept - 1) / 2 : 0;
  return rule == Rule::kTrimmedMean ? trim : 0;
}

// A key close to the expected median.
template <typename T>
struct Guess {
  bool given = false;
  Key<T> key = 0;
};

// Mean of the values with ranks first .. last, whose keys are low and high.
template <typename T, typename Column>
SECUREAFL_FN T mean_between(const Column& column, int32_t first, int32_t last, Key<T> low, Key<T> high) {
  if (last - first < 2) return midpoint(from_key<T>(low), from_key<T>(high));
  // Ties: copies of a border value may be inside and outside of the range.
  const int32_t lows = column.count_below(low + 1) - first, highs = last + 1 - column.count_below(high);
  const double sum = lows * static_cast<double>(from_key<T>(low)) + column.sum_between(low, high) +
                     highs * static_cast<double>(from_key<T>(high));
  return low == high ? from_key<T>(low) : static_cast<T>(sum / (last - first + 1));
}

// Mean of the values with ranks in [trim, kept - trim); zero if there are none.
template <typename T, typename Column>
SECUREAFL_FN T reduce_column(const Column& column, Rule rule, int64_t trim, Guess<T> guess = {}) {
  const int32_t kept = column.kept();
  const int32_t first = dropped(rule, trim < kept ? static_cast<int32_t>(trim) : kept, kept), last = kept - first - 1;
  const int32_t left = last - first + 1;
  if (left <= 0) return T(0);
  if (rule == Rule::kMean) return static_cast<T>(column.sum_between(0, kAbsent<T>) / left);

  const Key<T> low = guess.given ? select_near<T>(column, first, kept, guess.key) : select<T>(column, first, kept);
  if (left == 1) return from_key<T>(low);
  if (left == 2) {
    const int32_t low_end = column.count_below(low + 1);
    const Key<T> next = column.least_from(low + 1);
    return midpoint(from_key<T>(low), from_key<T>(low_end > last ? low : next));
  }

  return mean_between<T>(column, first, last, low, select<T>(column, last, kept));
}

}  // namespace secureafl::SECUREAFL_KIND
