#pragma once

#include <cuda_bf16.h>

#include "common/launch.cuh"
#include "coordinate_wise/rank.h"
#include "coordinate_wise/select.cuh"
#include "coordinate_wise/sort.h"

// Kernels of `median` and `trimmed_mean` for up to 1024 rows in memory, with or without a mask: the keys of a column
// are in registers. The rest uses in_shared.cuh.

namespace secureafl::cuda {

constexpr int kColumnThreads = 128;

// The ranks first .. last among `kept` rows, whose mean is the result of a rule. The same for all columns.
struct RankRange {
  int kept, first, last;

  __device__ RankRange(Rule rule, int64_t trim, int kept)
      : kept(kept),
        first(dropped(rule, trim < kept ? static_cast<int32_t>(trim) : kept, kept)),
        last(kept - first - 1) {}
  __device__ bool empty() const { return last < first; }
};

// Replaces the keys of rows that the mask drops. Unused places get smallest and largest keys, such that the kept rows
// are sorted into the middle of all places. Returns the number of kept rows.
template <int kPlaces, typename Rows>
__device__ inline int drop_masked(const Rows& rows, Key<float> (&keys)[kPlaces]) {
  constexpr int kWords = (kPlaces + 31) / 32;
  uint32_t present[kWords];
  int kept = 0;
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    const int k = w * 32 + threadIdx.x % 32;
    present[w] = __ballot_sync(~0u, k < rows.n && rows.mask[k]);
    kept += __popc(present[w]);
  }
  const int smallest = (kPlaces - kept) / 2;
  int unused = 0;  // places so far
#pragma unroll
  for (int k = 0; k < kPlaces; ++k) {
    if (present[k / 32] >> k % 32 & 1) continue;
    keys[k] = unused++ < smallest ? 0 : kAbsent<float>;
  }
  return kept;
}

// Mean of the sorted keys first .. last, summed in their order, as on a CPU (mean_rows).
template <int kPlaces>
__device__ inline float mean_of_sorted(const Key<float> (&keys)[kPlaces], int first, int last) {
  double sum = 0;
  Key<float> low = 0, high = 0;
#pragma unroll
  for (int k = 0; k < kPlaces; ++k) {
    if (k == first) low = keys[k];
    if (k < first || k > last) continue;
    high = keys[k];
    sum += from_key<float>(keys[k]);
  }
  if (last - first < 2) return midpoint(from_key<float>(low), from_key<float>(high));
  return low == high ? from_key<float>(low) : static_cast<float>(sum / (last - first + 1));
}

// Few rows, more than kLeast: one thread per column sorts its keys in registers. For a median the compiler keeps only
// the exchanges that the middle keys depend on.
template <int kLeast, int kPlaces, Rule kRule, typename Rows, typename out_t>
__global__ void __launch_bounds__(kColumnThreads, 5) sorted_kernel(Rows rows, int64_t trim, out_t* out) {
  const int64_t c = blockIdx.x * static_cast<int64_t>(kColumnThreads) + threadIdx.x;
  const int64_t inside = c < rows.d ? c : rows.d - 1;  // all threads of a warp must read the mask
  const int n = static_cast<int>(rows.n);
  Key<float> keys[kPlaces];
#pragma unroll
  for (int k = 0; k < kPlaces; ++k) {
    keys[k] = k < n + (kPlaces - n) / 2 ? 0 : kAbsent<float>;
    if (k <= kLeast || k < n) keys[k] = to_key(rows.value(k, inside));
  }
  const RankRange ranks(kRule, trim, rows.mask ? drop_masked(rows, keys) : n);
  sort_in_registers<0, static_cast<int>(power_of_two(kPlaces))>(keys);
  float value;
  if constexpr (kRule == Rule::kMedian) {
    const float low = from_key<float>(keys[kPlaces / 2 - 1]), high = from_key<float>(keys[kPlaces / 2]);
    value = ranks.kept % 2 == 1 ? low : midpoint(low, high);
  } else {
    const int smallest = (kPlaces - ranks.kept) / 2;
    value = mean_of_sorted(keys, smallest + ranks.first, smallest + ranks.last);
  }
  if (c < rows.d) out[c] = static_cast<out_t>(ranks.empty() ? 0.0f : value);
}

// As to_key, but a NaN gets the key of a missing row. Missing rows get the largest key and sort last, so the result is
// the same.
__device__ inline Key<float> last_key(float value) {
#ifdef SECUREAFL_EMULATED
  return value == value ? to_key(value) : kAbsent<float>;
#else
  float canonical;  // arithmetic turns every NaN into 0x7fffffff
  asm("fma.rn.f32 %0, %1, 0f3F800000, 0f80000000;" : "=f"(canonical) : "f"(value));
  const auto bits = static_cast<int32_t>(__float_as_uint(canonical));
  return static_cast<uint32_t>(bits ^ (bits >> 31 | static_cast<int32_t>(0x80000000u)));
#endif
}

__device__ inline __nv_bfloat16 upper_half(float value) {
  return __ushort_as_bfloat16(static_cast<unsigned short>(__float_as_uint(value) >> 16));
}

// The upper halves of kItems floats in pairs, compared two at a time. As bfloat16 they have the order of the upper
// halves of their keys, except numbers so small that their half is a negative zero.
template <int kItems>
struct Halves {
  __nv_bfloat162 pairs[kItems / 2];

  __device__ void set(int i, float value) { (i % 2 == 0 ? pairs[i / 2].x : pairs[i / 2].y) = upper_half(value); }

  // Number of values below a key whose lower half is zero. A NaN is never below.
  __device__ uint32_t count_below(Key<float> bound) const {
    const __nv_bfloat16 half = upper_half(from_key<float>(bound));
    const __nv_bfloat162 bounds = __halves2bfloat162(half, half);
    __nv_bfloat162 counts = __hlt2(pairs[0], bounds);
#pragma unroll
    for (int i = 1; i < kItems / 2; ++i) counts = __hadd2(counts, __hlt2(pairs[i], bounds));  // exact: below 256
    return static_cast<uint32_t>(__low2float(counts) + __high2float(counts));
  }
};

// How a bound splits a column.
struct Split {
  int32_t below;                  // keys below it
  Key<float> greatest, smallest;  // largest key below, smallest key not below
};
template <typename Lanes, int kItems>
__device__ inline Split split_at(const Lanes& lanes, const Key<float> (&keys)[kItems], Key<float> bound) {
  uint32_t count = 0, greatest = 0, smallest = kAbsent<float>;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const bool below = keys[i] < bound;
    count += below;
    greatest = max(greatest, below ? keys[i] : 0u);
    smallest = min(smallest, below ? kAbsent<float> : keys[i]);
  }
  return {static_cast<int32_t>(lanes.sum(count)), lanes.greatest(greatest), lanes.least(smallest)};
}

// The keys of a rank and of the next one; found: the search has come to an end.
struct Neighbors {
  bool found;
  Key<float> low, high;
};

// A search in the upper halves finds a bound between the two keys, or just below the lower one. From there it walks key
// by key and checks the result. A column that needs too many steps is not found.
template <typename Lanes, int kItems>
__device__ inline Neighbors find_rank(const Lanes& lanes, const Key<float> (&keys)[kItems],
                                      const Halves<kItems>& halves, int rank) {
  constexpr int kSteps = 4;
  Key<float> bound = 0;
  bool separated = false;
  for (Key<float> bit = kSign<float>; bit > 0xffff && !lanes.all(separated); bit >>= 1) {
    const auto below = static_cast<int>(lanes.sum(halves.count_below(bound | bit)));
    if (!separated && below <= rank + 1) bound |= bit;
    separated = separated || below == rank + 1;
  }
  Neighbors at{false, 0, 0};
  int32_t before = 0;  // keys below the previous bound; none are below the first bound, zero
  for (int step = 0; step < kSteps && !lanes.all(at.found); ++step) {
    const Split split = split_at(lanes, keys, bound);
    if (at.found) continue;
    at.found = split.below == rank + 1 || (step > 0 && before <= rank && split.below > rank);
    at.low = split.greatest;
    at.high = split.below > rank + 1 ? at.low : split.smallest;
    before = split.below;
    bound = split.smallest + 1;
  }
  return at;
}

// More rows: kLanes threads per column hold its keys in registers. If a column of a warp is not found, all of them are
// searched again from the start.
template <int kLanes, int kItems, Rule kRule, typename Rows, typename out_t>
__global__ void __launch_bounds__(kColumnThreads, kItems > 80 ? 2 : 3)
    searched_kernel(Rows rows, int64_t trim, out_t* out) {
  constexpr int kColumns = 32 / kLanes;
  using Team = Lanes<32, kColumns>;
  const int n = static_cast<int>(rows.n), lane = threadIdx.x % 32 / kColumns;
  const int64_t warp = (blockIdx.x * static_cast<int64_t>(kColumnThreads) + threadIdx.x) / 32;
  const int64_t c = warp * kColumns + threadIdx.x % kColumns;
  const int64_t inside = c < rows.d ? c : rows.d - 1;  // all threads of a warp must take part in every count
  Key<float> keys[kItems];
  Halves<kItems> halves;
  const auto* from = rows.updates + lane * rows.d + inside;
  const int64_t stride = kLanes * rows.d;
  const int left = n - lane;
#pragma unroll
  for (int i = 0; i < kItems; ++i, from += stride) {
    const bool present = i * kLanes < left;
    const float value = present ? static_cast<float>(*from) : NAN;  // missing rows sort last
    // The largest rank is that of a NaN only if the NaN does not look missing.
    keys[i] = kRule == Rule::kMedian ? last_key(value) : present ? to_key(value) : kAbsent<float>;
    halves.set(i, value);
  }

  const Team lanes{nullptr};
  int kept = n;
  if (rows.mask) {
    uint32_t own = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const bool present = i * kLanes < left && rows.mask[i * kLanes + lane];
      own += present;
      if (present) continue;
      keys[i] = kAbsent<float>;
      halves.set(i, NAN);
    }
    kept = static_cast<int>(lanes.sum(own));
  }
  const RankRange ranks(kRule, trim, kept);
  const RegisterColumn<Team, kItems, double> column{lanes, keys, kept};
  float value = 0;
  if (!ranks.empty()) {
    const Neighbors first = find_rank(lanes, keys, halves, ranks.first);
    bool found = first.found;
    if constexpr (kRule == Rule::kMedian) {
      value = kept % 2 == 1 ? from_key<float>(first.low)
                            : midpoint(from_key<float>(first.low), from_key<float>(first.high));
    } else {
      const Neighbors last = find_rank(lanes, keys, halves, ranks.last);
      found = found && last.found;
      value = mean_between<float>(column, ranks.first, ranks.last, first.low, last.low);
    }
    if (!lanes.all(found)) value = reduce_column<float>(column, kRule, trim);
  }
  if (lane == 0 && c < rows.d) out[c] = static_cast<out_t>(value);
}

// Applies the rule to rows in memory, if a column fits into registers. Returns false if it does not.
template <Rule kRule, typename Rows, typename out_t>
bool reduce_in_registers(const Launcher& launch, const Rows& rows, int64_t trim, out_t* out) {
  const auto launch_columns = [&](auto kernel, int64_t columns) {  // columns: per block
    launch(kernel, (rows.d + columns - 1) / columns, kColumnThreads, 0, rows, trim, out);
  };
  if (rows.n <= 16) {
    launch_columns(sorted_kernel<-1, 16, kRule, Rows, out_t>, kColumnThreads);
  } else if (rows.n <= 32) {
    launch_columns(sorted_kernel<16, 32, kRule, Rows, out_t>, kColumnThreads);
  } else if (rows.n <= 52) {
    launch_columns(sorted_kernel<32, 52, kRule, Rows, out_t>, kColumnThreads);
  } else if (rows.n <= 64) {
    launch_columns(sorted_kernel<52, 64, kRule, Rows, out_t>, kColumnThreads);
  } else if (rows.n <= 128) {
    launch_columns(searched_kernel<4, 32, kRule, Rows, out_t>, kColumnThreads / 4);
  } else if (rows.n <= 320) {
    launch_columns(searched_kernel<4, 80, kRule, Rows, out_t>, kColumnThreads / 4);
  } else if (rows.n <= 640) {
    launch_columns(searched_kernel<8, 80, kRule, Rows, out_t>, kColumnThreads / 8);
  } else if (rows.n <= 1024) {
    launch_columns(searched_kernel<8, 128, kRule, Rows, out_t>, kColumnThreads / 8);
  } else {
    return false;
  }
  return true;
}

}  // namespace secureafl::cuda
