#pragma once

#include <utility>

#include "rules/rank.h"
#include "rules/sort.h"

namespace secureafl::cuda {

// The threads that share one coordinate of a tile: every kColumns-th of a warp, or a block of one column.
template <int kThreads, int kColumns>
struct Lanes {
  static constexpr int kWarps = kThreads / 32;
  static_assert(kWarps == 1 || kColumns == 1, "a block works on one coordinate");
  uint32_t* exchange;  // (2, kWarps), blocks only
  mutable int turn = 0;

  __device__ uint32_t sum(uint32_t value) const {
    if constexpr (kColumns == 1) return across_warps(__reduce_add_sync(~0u, value), plus);
    return shuffled(value, plus);
  }
  __device__ uint32_t least(uint32_t value) const {
    const auto op = [](uint32_t a, uint32_t b) { return min(a, b); };
    if constexpr (kColumns == 1) return across_warps(__reduce_min_sync(~0u, value), op);
    return shuffled(value, op);
  }
  __device__ uint32_t greatest(uint32_t value) const {
    const auto op = [](uint32_t a, uint32_t b) { return max(a, b); };
    if constexpr (kColumns == 1) return across_warps(__reduce_max_sync(~0u, value), op);
    return shuffled(value, op);
  }
  __device__ float sum(float value) const {
    const auto op = [](uint32_t a, uint32_t b) { return __float_as_uint(__uint_as_float(a) + __uint_as_float(b)); };
    return __uint_as_float(across_warps(shuffled(__float_as_uint(value), op), op));
  }
  // Columns in one warp search side by side; one that has found its key waits for the others.
  __device__ bool all(bool own) const { return kColumns == 1 ? own : __all_sync(~0u, own); }

  // Every column's value to every thread.
  __device__ void broadcast(float value, float (&out)[kColumns]) const {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) out[c] = kColumns == 1 ? value : __shfl_sync(~0u, value, c);
  }

 private:
  __device__ static uint32_t plus(uint32_t a, uint32_t b) { return a + b; }

  template <typename Op>
  __device__ static uint32_t shuffled(uint32_t value, Op op) {
#pragma unroll
    for (int step = kColumns; step < 32; step *= 2) value = op(value, __shfl_xor_sync(~0u, value, step));
    return value;
  }

  // From a warp's value to the block's. Two places take turns, so one barrier is enough: whoever writes to a place
  // again has passed the barrier behind which it was read.
  template <typename Op>
  __device__ uint32_t across_warps(uint32_t value, Op op) const {
    if constexpr (kWarps == 1) {
      return value;
    } else {
      uint32_t* place = exchange + kWarps * (turn ^= 1);
      if (threadIdx.x % 32 == 0) place[threadIdx.x / 32] = value;
      __syncthreads();
      value = place[0];
#pragma unroll
      for (int i = 1; i < kWarps; ++i) value = op(value, place[i]);
      return value;
    }
  }
};

// One coordinate's keys, kItems in the registers of each of its lanes: a Column for math/rank.h.
template <typename Lanes, int kItems>
struct RegisterColumn {
  const Lanes& lanes;
  const uint32_t (&keys)[kItems];
  int32_t rows;  // that take part

  __device__ bool all(bool own) const { return lanes.all(own); }
  __device__ int32_t kept() const { return rows; }

  __device__ int32_t count_below(uint32_t bound) const {
    uint32_t count = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {  // count += keys[i] < bound, by the borrow of a difference: two instructions
      asm("{ .reg .u32 rest; sub.cc.u32 rest, %1, %2; subc.u32 %0, %0, 0; }" : "+r"(count) : "r"(keys[i]), "r"(bound));
    }
    return static_cast<int32_t>(lanes.sum(0u - count));
  }
  __device__ uint32_t least_from(uint32_t bound) const {
    uint32_t least = kAbsent<float>;
#pragma unroll
    for (int i = 0; i < kItems; ++i) least = min(least, keys[i] >= bound ? keys[i] : kAbsent<float>);
    return lanes.least(least);
  }
  __device__ uint32_t greatest_below(uint32_t bound) const {
    uint32_t greatest = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) greatest = max(greatest, keys[i] < bound ? keys[i] : 0u);
    return lanes.greatest(greatest);
  }
  // In float32, unlike the ops: a mean over at most 1024 rows, where float64 would double the shuffles.
  __device__ double sum_between(uint32_t low, uint32_t high) const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) sum += keys[i] > low && keys[i] < high ? from_key<float>(keys[i]) : 0.0f;
    return lanes.sum(sum);
  }
};

// One step of a bitonic merge between threads: each keeps the smaller or the larger of its keys and another's.
template <bool kReversed, int kItems>
__device__ inline void exchange_between(uint32_t (&keys)[kItems], int distance, bool upper) {
  uint32_t others[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    others[i] = __shfl_xor_sync(~0u, keys[kReversed ? kItems - 1 - i : i], distance);
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) keys[i] = upper ? max(keys[i], others[i]) : min(keys[i], others[i]);
}

// Sorts what rises and then falls, in one thread's registers.
template <int kNear, int kItems, int... kPlaces>
__device__ inline void exchange_far(uint32_t (&keys)[kItems], std::integer_sequence<int, kPlaces...>) {
  (exchange<kPlaces / kNear * 2 * kNear + kPlaces % kNear, kPlaces / kNear * 2 * kNear + kPlaces % kNear + kNear>(keys),
   ...);
}
template <int kNear, int kItems>
__device__ inline void merge_bitonic(uint32_t (&keys)[kItems]) {
  if constexpr (kNear >= 1) {
    exchange_far<kNear>(keys, std::make_integer_sequence<int, kItems / 2>());
    merge_bitonic<kNear / 2>(keys);
  }
}

// The two middle keys of the kLanes x kItems that the lanes of a column hold, each a power of two: sorted in each
// thread, then merged pair by pair; of the last merge only the border between the halves is wanted. The same steps
// whatever the keys, where a search would wait for its slowest column.
template <int kLanes, int kItems>
__device__ inline void middle_keys(uint32_t (&keys)[kItems], int lane, uint32_t& low, uint32_t& high) {
  constexpr int kColumns = 32 / kLanes;
  sort_in_registers<0, kItems>(keys);
#pragma unroll
  for (int run = 1; run < kLanes / 2; run *= 2) {
    exchange_between<true>(keys, (2 * run - 1) * kColumns, lane & run);
#pragma unroll
    for (int near = run / 2; near >= 1; near /= 2) exchange_between<false>(keys, near * kColumns, lane & near);
    merge_bitonic<kItems / 2>(keys);
  }
  const bool upper = lane & (kLanes / 2);
  exchange_between<true>(keys, 31 / kColumns * kColumns, upper);
  uint32_t border = upper ? ~keys[0] : keys[0];  // the smallest of the upper half is the largest of its complements
#pragma unroll
  for (int i = 1; i < kItems; ++i) border = max(border, upper ? ~keys[i] : keys[i]);
#pragma unroll
  for (int step = kColumns; step < 16; step *= 2) border = max(border, __shfl_xor_sync(~0u, border, step));
  const uint32_t mine = upper ? ~border : border, other = __shfl_xor_sync(~0u, mine, 16);
  low = upper ? other : mine;
  high = upper ? mine : other;
}

// The rule over the keys of one coordinate; `guess` is what a median may be close to. Which rows take part is the same
// for all coordinates, so the places left over can be filled with smallest and largest keys that put the median in the
// middle of all places.
template <int kLanes, int kItems>
class ColumnRule {
 public:
  static constexpr bool kSorts = kLanes < 32;  // more lanes: the search has fewer steps between threads

  template <typename Lanes, typename Wants>
  __device__ ColumnRule(const Lanes& lanes, int lane, const Wants& wants, Rule rule) : lane_(lane) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) wanted_ |= (wants(lane + i * kLanes) ? 1u : 0u) << i;
    kept_ = static_cast<int>(lanes.sum(static_cast<uint32_t>(__popc(wanted_))));
    if constexpr (kSorts) {
      constexpr int kPlaces = kLanes * kItems, kWords = kPlaces / 32;
      uint32_t absent[kWords];
#pragma unroll
      for (int w = 0; w < kWords; ++w) absent[w] = __ballot_sync(~0u, !wants(w * 32 + threadIdx.x % 32));
      const int smallest = rule == Rule::kMedian ? (kPlaces - kept_) / 2 : 0;
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const int k = lane + i * kLanes, word = i * kLanes / 32;
        int before = __popc(absent[word] & ((1u << k % 32) - 1));
#pragma unroll
        for (int w = 0; w < word; ++w) before += __popc(absent[w]);
        pads_[i] = before < smallest ? 0 : kAbsent<float>;
      }
    }
  }

  // As to_key, for values that this thread has computed: their NaN is 0x7fffffff, above all others as it stands.
  __device__ uint32_t key(int i, float value) const {
    const auto bits = static_cast<int32_t>(__float_as_uint(value));
    const uint32_t key = bits ^ (bits >> 31 | static_cast<int32_t>(0x80000000u));
    if constexpr (kSorts) return wanted_ >> i & 1 ? key : pads_[i];
    return wanted_ >> i & 1 ? min(key, kAbsent<float> - 1) : kAbsent<float>;
  }

  template <typename Lanes>
  __device__ float reduce(const Lanes& lanes, uint32_t (&keys)[kItems], Rule rule, int64_t trim, float guess) const {
    if constexpr (kSorts) {
      if (rule == Rule::kMedian) {
        if (kept_ == 0) return 0;
        uint32_t low, high;
        middle_keys<kLanes>(keys, lane_, low, high);
        const float middle = from_key<float>(low);
        return kept_ % 2 == 1 ? middle : midpoint(middle, from_key<float>(high));
      }
#pragma unroll
      for (int i = 0; i < kItems; ++i) {  // a NaN that takes part is not one that does not
        if (wanted_ >> i & 1) keys[i] = min(keys[i], kAbsent<float> - 1);
      }
    }
    const Guess<float> near{!kSorts && rule == Rule::kMedian, to_key(guess)};
    return reduce_column<float>(RegisterColumn<Lanes, kItems>{lanes, keys, kept_}, rule, trim, near);
  }

 private:
  int lane_, kept_ = 0;
  uint32_t wanted_ = 0;                 // bit i: place i of this thread
  uint32_t pads_[kSorts ? kItems : 1];  // the key of a place that is left over
};

}  // namespace secureafl::cuda
