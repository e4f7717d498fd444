#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "common/simd_cpu.h"
#include "coordinate_wise/sort.h"

// Batcher's odd-even merge sort as a network: a fixed list of exchanges that sorts any keys. It never branches on a
// key, so one list sorts many columns side by side. An exchange is a minimum and a maximum, which vectorise.
//
// Sizes are powers of two. Missing rows count as larger than all others: exchanges with them are left out.

namespace secureafl::cpu {

// Number of rows sorted at once in registers. In memory, each exchange would wait for two loads and two stores.
constexpr int kInRegisters = 16;

// One row of a tile of columns: four cache lines.
template <typename K>
struct alignas(64) TileRow {
  static constexpr int kWidth = 256 / sizeof(K);
  K keys[kWidth];
};

// Sorts `count` rows: row `first` and every `stride`-th row after it. merge: both halves are already sorted.
struct Step {
  int32_t first, stride, count;
  bool merge;
};

// The steps that sort `count` rows. Depth first: the rows just sorted are still in the L1 cache.
class MergeSort {
 public:
  explicit MergeSort(int64_t count) : count_(count) { sort(0, power_of_two(count)); }

  std::vector<Step> steps;

 private:
  void sort(int64_t first, int64_t size) {
    if (size <= kInRegisters) return add(first, 1, size, false);
    sort(first, size / 2);
    sort(first + size / 2, size / 2);
    merge(first, 1, size);
  }

  void merge(int64_t first, int64_t stride, int64_t size) {
    if (size <= kInRegisters) return add(first, stride, size, true);
    merge(first, 2 * stride, size / 2);
    merge(first + stride, 2 * stride, size / 2);
    for (int64_t row = 1; row + 1 < size; row += 2) add(first + row * stride, stride, 2, true);
  }

  void add(int64_t first, int64_t stride, int64_t size, bool merge) {
    const int64_t count = std::min(size, (count_ - first + stride - 1) / stride);
    if (count <= (merge ? size / 2 : 1)) return;  // already sorted
    steps.push_back({static_cast<int32_t>(first), static_cast<int32_t>(stride), static_cast<int32_t>(count), merge});
  }

  int64_t count_;
};

// The steps that put the ranks first .. last of `count` rows in their places; other rows may end anywhere. Walks
// backwards and drops the steps that no wanted rank depends on.
inline std::vector<Step> selection_network(int64_t count, int64_t first, int64_t last) {
  const std::vector<Step> all = MergeSort(count).steps;
  std::vector<Step> network;
  std::vector<char> wanted(static_cast<size_t>(count));  // (count)
  std::fill(wanted.begin() + first, wanted.begin() + last + 1, true);
  for (auto step = all.rbegin(); step != all.rend(); ++step) {
    const auto row = [&](int i) -> char& { return wanted[step->first + i * step->stride]; };
    bool needed = false;
    for (int i = 0; i < step->count; ++i) needed |= row(i);
    if (!needed) continue;
    for (int i = 0; i < step->count; ++i) row(i) = true;
    network.push_back(*step);
  }
  std::reverse(network.begin(), network.end());
  return network;
}

// Runs one step on all columns.
template <int kCount, bool kMerge, typename K>
inline void sort_rows(TileRow<K>* rows, int64_t stride) {
#pragma GCC ivdep  // rows do not overlap
  for (int c = 0; c < TileRow<K>::kWidth; ++c) {
    K keys[kCount];
    for (int i = 0; i < kCount; ++i) keys[i] = rows[i * stride].keys[c];
    if constexpr (kMerge) {
      merge_in_registers<0, 1, power_of_two(kCount)>(keys);
    } else {
      sort_in_registers<0, power_of_two(kCount)>(keys);
    }
    for (int i = 0; i < kCount; ++i) rows[i * stride].keys[c] = keys[i];
  }
}

// Picks the instance for step.count, one of kCounts + 2.
template <bool kMerge, typename K, int... kCounts>
inline void sort_rows(TileRow<K>* rows, const Step& step, std::integer_sequence<int, kCounts...>) {
  (void)((step.count == kCounts + 2 && (sort_rows<kCounts + 2, kMerge>(rows, step.stride), true)) || ...);
}

// Runs the network on every column of tile (rows).
template <typename K>
SECUREAFL_AVX2_CLONES void apply(const std::vector<Step>& network, TileRow<K>* tile) {
  constexpr auto kCounts = std::make_integer_sequence<int, kInRegisters - 1>();
  for (const Step& step : network) {
    if (step.merge) {
      sort_rows<true>(tile + step.first, step, kCounts);
    } else {
      sort_rows<false>(tile + step.first, step, kCounts);
    }
  }
}

}  // namespace secureafl::cpu
