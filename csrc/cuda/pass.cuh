#pragma once

#include "round.cuh"

namespace secureafl::cuda {

// The L threads of a warp that work on one coordinate, a part of it or all.
template <int L>
struct Lanes {
  __device__ static uint32_t sum(uint32_t value) {
    if constexpr (L == 32) return __reduce_add_sync(~0u, value);
    return shuffled(value, [](uint32_t a, uint32_t b) { return a + b; });
  }
  __device__ static uint32_t least(uint32_t value) {
    if constexpr (L == 32) return __reduce_min_sync(~0u, value);
    return shuffled(value, [](uint32_t a, uint32_t b) { return min(a, b); });
  }
  __device__ static uint32_t greatest(uint32_t value) {
    if constexpr (L == 32) return __reduce_max_sync(~0u, value);
    return shuffled(value, [](uint32_t a, uint32_t b) { return max(a, b); });
  }
  __device__ static float sum(float value) {
    return shuffled(value, [](float a, float b) { return a + b; });
  }
  // Columns in one warp search side by side; one that has found its key waits for the others.
  __device__ static bool all(bool own) { return L == 32 ? own : __all_sync(~0u, own); }

 private:
  template <typename Value, typename Op>
  __device__ static Value shuffled(Value value, Op op) {
#pragma unroll
    for (int step = L / 2; step > 0; step /= 2) value = op(value, __shfl_xor_sync(~0u, value, step));
    return value;
  }
};

// One coordinate's keys, R in the registers of each of L threads.
template <int L, int R>
struct HeldColumn {
  const uint32_t (&keys)[R];

  __device__ bool all(bool own) const { return Lanes<L>::all(own); }

  __device__ int32_t count_below(uint32_t bound) const {
    uint32_t count = 0;
#pragma unroll
    for (int i = 0; i < R; ++i) count += keys[i] < bound;
    return static_cast<int32_t>(Lanes<L>::sum(count));
  }
  __device__ uint32_t least_from(uint32_t bound) const {
    uint32_t least = kAbsent<float>;
#pragma unroll
    for (int i = 0; i < R; ++i) least = min(least, keys[i] >= bound ? keys[i] : kAbsent<float>);
    return Lanes<L>::least(least);
  }
  __device__ uint32_t greatest_below(uint32_t bound) const {
    uint32_t greatest = 0;
#pragma unroll
    for (int i = 0; i < R; ++i) greatest = max(greatest, keys[i] < bound ? keys[i] : 0u);
    return Lanes<L>::greatest(greatest);
  }
  // In float32, unlike the ops: a mean over at most 448 rows, where float64 would double the shuffles.
  __device__ double sum_between(uint32_t low, uint32_t high) const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < R; ++i) sum += keys[i] > low && keys[i] < high ? from_key<float>(keys[i]) : 0.0f;
    return Lanes<L>::sum(sum);
  }
};

// One row of P floats, in the widest loads that its alignment allows.
template <int P>
__device__ inline void load_row(const float* row, float (&out)[P]) {
  if constexpr (P % 4 == 0) {
#pragma unroll
    for (int j = 0; j < P; j += 4) {
      const float4 four = *reinterpret_cast<const float4*>(row + j);
      out[j] = four.x, out[j + 1] = four.y, out[j + 2] = four.z, out[j + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int j = 0; j < P; j += 2) {
      const float2 two = *reinterpret_cast<const float2*>(row + j);
      out[j] = two.x, out[j + 1] = two.y;
    }
  }
}

// L threads hold the rows of one coordinate, R each; a block has 256 / L coordinates in hand. Two blocks share a
// multiprocessor where their registers allow it.
template <int M, int L, int R>
__global__ void __launch_bounds__(kRoundThreads, M <= 3 && R <= 7 ? 2 : 1) pass_kernel(Round r) {
  constexpr int F = 2 * M + 1, P = 2 * M + 2, kGroups = kRoundThreads / L, kExtra = 4 * M + 1;
  extern __shared__ double shared[];
  double* extra = shared;  // (groups, 4M + 1)
  const int n = static_cast<int>(r.n), lane = threadIdx.x % L, group = threadIdx.x / L;
  float* factors = reinterpret_cast<float*>(extra + (kGroups * kExtra + 1) / 2 * 2);  // (n, P), 16-byte aligned
  float* staging = factors + n * P;                                                   // (groups, n)
  for (int i = threadIdx.x; i < n * P; i += kRoundThreads) factors[i] = r.factors[i];
  for (int i = threadIdx.x; i < kGroups * kExtra; i += kRoundThreads) extra[i] = 0;
  const Verdict v = *r.verdict;
  const int client = static_cast<int>(r.client);
  unsigned wanted = 0;  // bit i: row i of this thread takes part
#pragma unroll
  for (int i = 0; i < R; ++i) {
    const int k = lane + i * L;
    if (k < n && (k == client ? v.received : r.estimate && r.seen[k])) wanted |= 1u << i;
  }
  __syncthreads();

  float sums[R][F] = {};
  const int64_t stride = gridDim.x * static_cast<int64_t>(kGroups);
  for (int64_t base = blockIdx.x * static_cast<int64_t>(kGroups); base < r.d; base += stride) {
    const bool here = base + group < r.d;  // the threads of a warp walk on together: they meet in every count
    const int64_t c = here ? base + group : r.d - 1;
    float* rows = r.history + c * n * P;  // (n, P)
    float u[R][P];                        // y_0.., s_0.., w, g
    const float model = r.model[c];
#pragma unroll
    for (int i = 0; i < R; ++i) load_row<P>(rows + (lane + i * L < n ? lane + i * L : n - 1) * P, u[i]);
    float x[R];
    uint32_t keys[R];
#pragma unroll
    for (int i = 0; i < R; ++i) {
      const int k = lane + i * L < n ? lane + i * L : n - 1;
      float factor[P];
      load_row<P>(factors + k * P, factor);
      x[i] = model - u[i][2 * M];
      float estimate = u[i][2 * M + 1] + factor[2 * M] * x[i];
#pragma unroll
      for (int j = 0; j < 2 * M; ++j) estimate += factor[j] * u[i][j];
      if (k == client) estimate = r.update[c] * v.clip;
      keys[i] = wanted >> i & 1 ? to_key(estimate) : kAbsent<float>;
    }

    const float direction = reduce_column<float>(HeldColumn<L, R>{keys}, r.rule, r.trim);
    float next = model - static_cast<float>(r.lr * direction);
    if (!isfinite(next)) next = model;  // a coordinate that would leave the floats stays
    if (!here) continue;
    const float step = next - model;
    if (lane == 0) {
      r.next_model[c] = next;
      extra[group * kExtra + 4 * M] += static_cast<double>(step) * step;
    }
#pragma unroll
    for (int i = 0; i < R; ++i) {
      const int k = lane + i * L;
      float along = step;
      if (k == client && v.stored) {  // its row becomes that of this upload, and x is taken afresh
        float* row = rows + k * P;
        const float w = r.trained_on[c], g = r.update[c] * v.clip;
        const float s = w - row[2 * M], y = g - row[2 * M + 1];
        along = x[i] = next - w;
        row[2 * M] = w;
        row[2 * M + 1] = g;
        if (v.pushed) {
          row[v.slot] = y;
          row[M + v.slot] = s;
#pragma unroll
          for (int j = 0; j < 2 * M; ++j) {
            if (j % M == v.slot) u[i][j] = j < M ? y : s;
            extra[group * kExtra + j] += static_cast<double>(s) * u[i][j];
            extra[group * kExtra + 2 * M + j] += static_cast<double>(y) * u[i][j];
          }
        }
      }
#pragma unroll
      for (int j = 0; j < 2 * M; ++j) sums[i][j] += u[i][j] * along;
      sums[i][2 * M] += x[i] * along;
    }
  }

  // The groups of a block have seen different coordinates of the same clients: add them up, in order.
  double* changes = r.changes + blockIdx.x;
  for (int j = 0; j < F; ++j) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < R; ++i) {
      const int k = lane + i * L;
      if (k < n) staging[group * n + k] = sums[i][j];
    }
    __syncthreads();
    for (int k = threadIdx.x; k < n; k += kRoundThreads) {
      double sum = 0;
      for (int g = 0; g < kGroups; ++g) sum += staging[g * n + k];
      changes[(static_cast<int64_t>(k) * F + j) * gridDim.x] = sum;
    }
  }
  for (int j = threadIdx.x; j < kExtra; j += kRoundThreads) {
    double sum = 0;
    for (int g = 0; g < kGroups; ++g) sum += extra[g * kExtra + j];
    changes[(static_cast<int64_t>(n) * F + j) * gridDim.x] = sum;
  }
}

}  // namespace secureafl::cuda
