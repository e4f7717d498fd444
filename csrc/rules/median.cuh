#pragma once

#include <cuda_bf16.h>

#include "common/launch.cuh"
#include "rules/rank.h"
#include "rules/select.cuh"
#include "rules/sort.h"

// Kernels of `median` for up to 320 rows in memory without a mask: the keys of a column are in registers. Other medians
// use trimmed_mean.cuh.

namespace secureafl::cuda {

constexpr int kMedianThreads = 128;

// As to_key, but a NaN gets the key of a missing row. Missing rows get the largest key and sort last, so the result is
// the same.
__device__ inline Key<float> last_key(float value) {
  float canonical;  // arithmetic turns every NaN into 0x7fffffff
  asm("fma.rn.f32 %0, %1, 0f3F800000, 0f80000000;" : "=f"(canonical) : "f"(value));
  const auto bits = static_cast<int32_t>(__float_as_uint(canonical));
  return static_cast<uint32_t>(bits ^ (bits >> 31 | static_cast<int32_t>(0x80000000u)));
}

// Few rows, more than kLeast: one thread per column sorts its keys in registers. The compiler keeps only the exchanges
// that the middle keys depend on. Unused places are padded with smallest and largest keys, such that the median is in
// the middle.
template <int kLeast, int kPlaces, typename Rows, typename out_t>
__global__ void __launch_bounds__(kMedianThreads, 5) sorted_median_kernel(Rows rows, out_t* out) {
  const int64_t c = blockIdx.x * static_cast<int64_t>(kMedianThreads) + threadIdx.x;
  if (c >= rows.d) return;
  const int n = static_cast<int>(rows.n), smallest = (kPlaces - n) / 2;
  Key<float> keys[kPlaces];
#pragma unroll
  for (int k = 0; k < kPlaces; ++k) {
    keys[k] = k < n + smallest ? 0 : kAbsent<float>;
    if (k <= kLeast || k < n) keys[k] = to_key(rows.value(k, c));
  }
  sort_in_registers<0, static_cast<int>(power_of_two(kPlaces))>(keys);
  const float low = from_key<float>(keys[kPlaces / 2 - 1]), high = from_key<float>(keys[kPlaces / 2]);
  out[c] = static_cast<out_t>(n % 2 == 1 ? low : midpoint(low, high));
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

// More rows: four threads per column hold its keys in registers. A search in the upper halves finds a bound between the
// two middle keys, or just below the lower one. From there the kernel walks key by key and checks the result. A column
// that needs too many steps is searched again from the start.
template <int kItems, typename Rows, typename out_t>
__global__ void __launch_bounds__(kMedianThreads, 3) searched_median_kernel(Rows rows, out_t* out) {
  constexpr int kLanes = 4, kColumns = 32 / kLanes, kSteps = 4;
  const int n = static_cast<int>(rows.n), rank = (n - 1) / 2, lane = threadIdx.x % 32 / kColumns;
  const int64_t warp = (blockIdx.x * static_cast<int64_t>(kMedianThreads) + threadIdx.x) / 32;
  const int64_t c = warp * kColumns + threadIdx.x % kColumns;
  const int64_t inside = c < rows.d ? c : rows.d - 1;  // all threads of a warp must take part in every count
  Key<float> keys[kItems];
  Halves<kItems> halves;
  const auto* from = rows.updates + lane * rows.d + inside;
  const int64_t stride = kLanes * rows.d;
  const int left = n - lane;
#pragma unroll
  for (int i = 0; i < kItems; ++i, from += stride) {
    const float value = i * kLanes < left ? static_cast<float>(*from) : NAN;  // missing rows sort last
    keys[i] = last_key(value);
    halves.set(i, value);
  }

  const Lanes<32, kColumns> lanes{nullptr};
  Key<float> bound = 0;
  bool found = false;
  for (Key<float> bit = kSign<float>; bit > 0xffff && !lanes.all(found); bit >>= 1) {
    const auto below = static_cast<int>(lanes.sum(halves.count_below(bound | bit)));
    if (!found && below <= rank + 1) bound |= bit;
    found = found || below == rank + 1;
  }
  Key<float> low = 0, high = 0;
  found = false;
  int32_t before = 0;  // keys below the previous bound; none are below the first bound, zero
  for (int step = 0; step < kSteps && !lanes.all(found); ++step) {
    const Split split = split_at(lanes, keys, bound);
    if (found) continue;
    found = split.below == rank + 1 || (step > 0 && before <= rank && split.below > rank);
    low = split.greatest;
    high = split.below > rank + 1 ? low : split.smallest;
    before = split.below;
    bound = split.smallest + 1;
  }
  float median = n % 2 == 1 ? from_key<float>(low) : midpoint(from_key<float>(low), from_key<float>(high));
  if (!lanes.all(found)) {
    const RegisterColumn<Lanes<32, kColumns>, kItems> column{lanes, keys, n};
    median = reduce_column<float>(column, Rule::kMedian, 0);
  }
  if (lane == 0 && c < rows.d) out[c] = static_cast<out_t>(median);
}

// Median of all rows in memory, if a column fits into registers. Returns false if it does not.
template <typename Rows, typename out_t>
bool median_in_registers(const Launcher& launch, Rows rows, out_t* out) {
  if (rows.mask != nullptr || rows.n == 0) return false;
  const auto launch_columns = [&](auto kernel, int64_t columns) {  // columns: per block
    launch(kernel, (rows.d + columns - 1) / columns, kMedianThreads, 0, rows, out);
  };
  if (rows.n <= 16) {
    launch_columns(sorted_median_kernel<0, 16, Rows, out_t>, kMedianThreads);
  } else if (rows.n <= 32) {
    launch_columns(sorted_median_kernel<16, 32, Rows, out_t>, kMedianThreads);
  } else if (rows.n <= 52) {
    launch_columns(sorted_median_kernel<32, 52, Rows, out_t>, kMedianThreads);
  } else if (rows.n <= 64) {
    launch_columns(sorted_median_kernel<52, 64, Rows, out_t>, kMedianThreads);
  } else if (rows.n <= 128) {
    launch_columns(searched_median_kernel<32, Rows, out_t>, kMedianThreads / 4);
  } else if (rows.n <= 320) {
    launch_columns(searched_median_kernel<80, Rows, out_t>, kMedianThreads / 4);
  } else {
    return false;
  }
  return true;
}

}  // namespace secureafl::cuda
