#pragma once

#include <utility>

#include "coordinate_wise/rank.h"
#include "coordinate_wise/sort.h"

namespace secureafl::cuda {

// The threads that share one coordinate of a tile: every kColumns-th thread of a warp, or a block with one column.
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
  __device__ double sum(double value) const {
    static_assert(kWarps == 1, "a warp");
#pragma unroll
    for (int step = kColumns; step < 32; step *= 2) value += __shfl_xor_sync(~0u, value, step);
    return value;
  }
  __device__ float sum(float value) const {
    const auto op = [](uint32_t a, uint32_t b) { return __float_as_uint(__uint_as_float(a) + __uint_as_float(b)); };
    return __uint_as_float(across_warps(shuffled(__float_as_uint(value), op), op));
  }
  // Columns of one warp search side by side: a finished column waits for the others.
  __device__ bool all(bool own) const { return kColumns == 1 ? own : __all_sync(~0u, own); }

  // Gives the value of every column to all threads.
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

  // Combines the values of the warps of a block. Two buffers alternate, so one barrier is enough: a thread that writes
  // to a buffer again has passed the barrier after its last read.
  template <typename Op>
  __device__ uint32_t across_warps(uint32_t value, Op op) const {
    if constexpr (kWarps == 1) {
      return value;
    } else {
      uint32_t* place = exchange + kWarps * (turn ^= 1);
      if (threadIdx.x % 32 == 0) place[threadIdx.x / 32] = value;
      __syncthreads();
      if constexpr (kWarps > 8) {  // every warp combines all values: a load of each would take longer
        value = place[threadIdx.x % kWarps];
#pragma unroll
        for (int step = 1; step < kWarps; step *= 2) value = op(value, __shfl_xor_sync(~0u, value, step));
      } else {
        value = place[0];
#pragma unroll
        for (int i = 1; i < kWarps; ++i) value = op(value, place[i]);
      }
      return value;
    }
  }
};

// The keys of one coordinate, kItems in the registers of each lane. A Column for rank.h. Sum: the type of its sums. A
// round uses float32, unlike the ops: a mean of at most 4096 rows. float64 would double the shuffles.
template <typename Lanes, int kItems, typename Sum = float>
struct RegisterColumn {
  const Lanes& lanes;
  const uint32_t (&keys)[kItems];
  int32_t rows;  // number of rows that take part

  __device__ bool all(bool own) const { return lanes.all(own); }
  __device__ int32_t kept() const { return rows; }

  __device__ int32_t count_below(uint32_t bound) const {
    uint32_t count = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {  // count -= keys[i] < bound in two instructions: the borrow of a subtraction
#ifdef SECUREAFL_EMULATED
      count -= keys[i] < bound;
#else
      asm("{ .reg .u32 rest; sub.cc.u32 rest, %1, %2; subc.u32 %0, %0, 0; }" : "+r"(count) : "r"(keys[i]), "r"(bound));
#endif
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
  __device__ double sum_between(uint32_t low, uint32_t high) const {
    Sum sum = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) sum += keys[i] > low && keys[i] < high ? from_key<float>(keys[i]) : 0.0f;
    return lanes.sum(sum);
  }
};

// One step of a bitonic merge between threads: each thread keeps the smaller or the larger of its keys and those of its
// partner.
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

// Bitonic merge in the registers of one thread.
template <int kDistance, int kItems, int... kPlaces>
__device__ inline void exchange_at_distance(uint32_t (&keys)[kItems], std::integer_sequence<int, kPlaces...>) {
  (exchange<kPlaces / kDistance * 2 * kDistance + kPlaces % kDistance,
            kPlaces / kDistance * 2 * kDistance + kPlaces % kDistance + kDistance>(keys),
   ...);
}
template <int kDistance, int kItems>
__device__ inline void merge_bitonic(uint32_t (&keys)[kItems]) {
  if constexpr (kDistance >= 1) {
    exchange_at_distance<kDistance>(keys, std::make_integer_sequence<int, kItems / 2>());
    merge_bitonic<kDistance / 2>(keys);
  }
}

// The two middle keys of the kLanes x kItems keys of a column; both are powers of two. Each thread sorts its keys, then
// threads merge in pairs. The last merge computes only the border between the two halves. The steps do not depend on
// the keys; a search would wait for the slowest column.
template <int kLanes, int kItems>
__device__ inline void middle_keys(uint32_t (&keys)[kItems], int lane, uint32_t& low, uint32_t& high) {
  constexpr int kColumns = 32 / kLanes;
  sort_in_registers<0, kItems>(keys);
#pragma unroll
  for (int run = 1; run < kLanes / 2; run *= 2) {
    exchange_between<true>(keys, (2 * run - 1) * kColumns, lane & run);
#pragma unroll
    for (int distance = run / 2; distance >= 1; distance /= 2) {
      exchange_between<false>(keys, distance * kColumns, lane & distance);
    }
    merge_bitonic<kItems / 2>(keys);
  }
  const bool upper = lane & (kLanes / 2);
  exchange_between<true>(keys, 31 / kColumns * kColumns, upper);
  uint32_t border = upper ? ~keys[0] : keys[0];  // min of the upper half = complement of the max of the complements
#pragma unroll
  for (int i = 1; i < kItems; ++i) border = max(border, upper ? ~keys[i] : keys[i]);
#pragma unroll
  for (int step = kColumns; step < 16; step *= 2) border = max(border, __shfl_xor_sync(~0u, border, step));
  const uint32_t mine = upper ? ~border : border, other = __shfl_xor_sync(~0u, mine, 16);
  low = upper ? other : mine;
  high = upper ? mine : other;
}

// Applies the rule to the keys of one coordinate. guess: a value close to the median. The rows that take part are the
// same for all coordinates, so unused places are padded once with smallest and largest keys, such that the median is in
// the middle of all places.
template <int kLanes, int kItems>
class ColumnRule {
 public:
  static constexpr bool kSorts = kLanes < 32;  // with more lanes, a search needs fewer shuffles

  template <typename Lanes, typename Wants>
  __device__ ColumnRule(const Lanes& lanes, int lane, const Wants& wants, Rule rule) : lane_(lane) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) wanted_ |= (wants(lane + i * kLanes) ? 1u : 0u) << i;
    kept_ = static_cast<int>(lanes.sum(static_cast<uint32_t>(__popc(wanted_))));
    if constexpr (kSorts) {
      constexpr int kPlaces = kLanes * kItems, kWords = (kPlaces + 31) / 32;
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

  // As to_key, for values computed by this thread: their NaN is 0x7fffffff, which already sorts last.
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
      for (int i = 0; i < kItems; ++i) {  // a NaN in a row that takes part must not look absent
        if (wanted_ >> i & 1) keys[i] = min(keys[i], kAbsent<float> - 1);
      }
    }
    const Guess<float> near{!kSorts && rule == Rule::kMedian, to_key(guess)};
    return reduce_column<float>(RegisterColumn<Lanes, kItems>{lanes, keys, kept_}, rule, trim, near);
  }

 private:
  int lane_, kept_ = 0;
  uint32_t wanted_ = 0;                 // bit i: the row at place i of this thread takes part
  uint32_t pads_[kSorts ? kItems : 1];  // keys of unused places
};

}  // namespace secureafl::cuda
