#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "coordinate_wise/network_cpu.h"
#include "coordinate_wise/rank.h"

// The rule over each column of rows (n, d), a few columns at a time; n x d is never stored. Up to kMaxSortedRows rows:
// a sorting network over a tile of columns. More rows: column by column, with the search of rank.h.

namespace secureafl::cpu {

// The network grows faster than the number of rows, the search does not. A tile of this many rows fills a small L2
// cache.
constexpr int64_t kMaxSortedRows = 1024;

// Number of tiles filled together: reading two kilobytes of a row at once is faster than eight times 256 bytes.
constexpr int64_t kStrip = 8;

// tiles (kStrip, count): the keys of the rows kept (count) at the coordinates start .. stop - 1.
template <typename Rows, typename K>
void fill_strip(const Rows& rows, const std::vector<int64_t>& kept, int64_t start, int64_t stop, TileRow<K>* tiles) {
  constexpr int64_t kWidth = TileRow<K>::kWidth;
  for (const int64_t k : kept) {
    TileRow<K>* row = tiles++;
    for (int64_t c = start; c < stop; c += kWidth, row += kept.size()) {
      if (c + kWidth <= stop) {
        rows.keys(k, c, row->keys);
      } else {
        for (int64_t i = 0; i < stop - c; ++i) row->keys[i] = rows.key(k, c + i);
      }
    }
  }
}

// out (kWidth): mean of the rows first .. last of tile. If sorted, the same result as reduce_column: equal values give
// exactly that value, and the mean of two values does not overflow.
template <typename T>
void mean_rows(const TileRow<Key<T>>* tile, int64_t first, int64_t last, bool sorted, T* out) {
  constexpr int kWidth = TileRow<Key<T>>::kWidth;
  const Key<T>*low = tile[first].keys, *high = tile[last].keys;
  if (sorted && last - first < 2) {
    for (int c = 0; c < kWidth; ++c) out[c] = midpoint(from_key<T>(low[c]), from_key<T>(high[c]));
    return;
  }
  double sum[kWidth] = {};
  for (int64_t row = first; row <= last; ++row) {
    for (int c = 0; c < kWidth; ++c) sum[c] += from_key<T>(tile[row].keys[c]);
  }
  const double left = static_cast<double>(last - first + 1);
  for (int c = 0; c < kWidth; ++c) {
    out[c] = sorted && low[c] == high[c] ? from_key<T>(low[c]) : static_cast<T>(sum[c] / left);
  }
}

// The ranks first .. last, whose mean is the result of a rule.
struct RankRange {
  int64_t first, last;

  bool empty() const { return first > last; }
};

inline RankRange rank_range(Rule rule, int64_t trim, int64_t count) {
  const int64_t first = dropped(rule, static_cast<int32_t>(std::min(trim, count)), static_cast<int32_t>(count));
  return {first, count - first - 1};
}

// kept: indices of the rows that take part.
template <typename Rows, typename out_t>
void sort_columns(const Rows& rows, const std::vector<int64_t>& kept, Rule rule, int64_t trim, out_t* out) {
  using T = typename Rows::value_type;
  using Row = TileRow<Key<T>>;
  constexpr int64_t kWidth = kStrip * Row::kWidth;
  const int64_t count = static_cast<int64_t>(kept.size()), d = rows.d;
  const RankRange ranks = rank_range(rule, trim, count);
  if (ranks.empty()) {
    std::fill(out, out + d, out_t(0));
    return;
  }
  const bool sorted = rule != Rule::kMean;
  const auto network = sorted ? selection_network(count, ranks.first, ranks.last) : std::vector<Step>();
  torch::stable::parallel_for(0, (d + kWidth - 1) / kWidth, 1, [&](int64_t begin, int64_t end) {
    std::vector<Row> tiles(static_cast<size_t>(kStrip * count));  // (kStrip, count)
    for (int64_t start = begin * kWidth; start < std::min(d, end * kWidth); start += kWidth) {
      const int64_t stop = std::min(d, start + kWidth);
      fill_strip(rows, kept, start, stop, tiles.data());
      Row* tile = tiles.data();
      for (int64_t c = start; c < stop; c += Row::kWidth, tile += count) {
        apply(network, tile);
        T means[Row::kWidth];
        mean_rows(tile, ranks.first, ranks.last, sorted, means);
        std::copy(means, means + std::min<int64_t>(Row::kWidth, stop - c), out + c);
      }
    }
  });
}

// The keys of one column, contiguous, so that the loops vectorise.
template <typename T>
struct KeyColumn {
  const Key<T>* keys;  // (n)
  int64_t n;

  bool all(bool own) const { return own; }
  int32_t kept() const { return count_below(kAbsent<T>); }

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

template <typename Rows, typename out_t>
void search_columns(const Rows& rows, Rule rule, int64_t trim, out_t* out) {
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

// out (d)
template <typename Rows, typename out_t>
void reduce_columns(const Rows& rows, Rule rule, int64_t trim, out_t* out) {
  if (rows.d == 0) return;  // such rows take no memory, so there may be more of them than a list of them has room for
  std::vector<int64_t> kept;
  for (int64_t k = 0; k < rows.n; ++k) {
    if (rows.takes_part(k)) kept.push_back(k);
  }
  if (static_cast<int64_t>(kept.size()) > kMaxSortedRows) return search_columns(rows, rule, trim, out);
  sort_columns(rows, kept, rule, trim, out);
}

}  // namespace secureafl::cpu
