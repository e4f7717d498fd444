#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "../math/rank.h"

namespace secureafl::cpu {

// One column's keys, side by side so that the loops vectorise.
template <typename T>
struct KeyColumn {
  const Key<T>* keys;  // (n)
  int64_t n;

  bool all(bool own) const { return own; }

  int32_t count_below(Key<T> bound) const {
    Key<T> count = 0;
    for (int64_t k = 0; k < n; ++k) count += keys[k] < bound;
    return static_cast<int32_t>(count);
  }

  Key<T> least_from(Key<T> bound) const {
    Key<T> least = kAbsent<T>;
    for (int64_t k = 0; k < n; ++k) least = keys[k] >= bound && keys[k] < least ? keys[k] : least;
    return least;
  }

  Key<T> greatest_below(Key<T> bound) const {
    Key<T> greatest = 0;
    for (int64_t k = 0; k < n; ++k) greatest = keys[k] < bound && keys[k] > greatest ? keys[k] : greatest;
    return greatest;
  }

  double sum_between(Key<T> low, Key<T> high) const {
    double sum = 0;
    for (int64_t k = 0; k < n; ++k) {
      if (keys[k] > low && keys[k] < high) sum += from_key<T>(keys[k]);
    }
    return sum;
  }
};

// out (d): the rule over each column of rows (n, d). A thread holds a few columns at a time, never n x d.
template <typename Rows, typename out_t>
void reduce_columns(const Rows& rows, Rule rule, int64_t trim, out_t* out) {
  using T = typename Rows::value_type;
  constexpr int64_t kTile = 32;  // columns: two cache lines of a float32 row
  const int64_t n = rows.n, tiles = (rows.d + kTile - 1) / kTile;
  torch::stable::parallel_for(0, tiles, 1, [&](int64_t begin, int64_t end) {
    std::vector<Key<T>> keys(static_cast<size_t>(kTile * n));  // (kTile, n)
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t start = tile * kTile, width = std::min(kTile, rows.d - start);
      for (int64_t k = 0; k < n; ++k) {
        for (int64_t c = 0; c < width; ++c) keys[c * n + k] = rows.key(k, start + c);
      }
      for (int64_t c = 0; c < width; ++c) {
        const KeyColumn<T> column{keys.data() + c * n, n};
        out[start + c] = static_cast<out_t>(reduce_column<T>(column, rule, trim));
      }
    }
  });
}

}  // namespace secureafl::cpu
