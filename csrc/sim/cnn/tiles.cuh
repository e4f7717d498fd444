#pragma once

#include <cuda_runtime.h>

#include <cstdint>

// The two inner loops of the CNN: a 3 x 3 convolution over pooling windows, and a tile of a matrix product.

namespace secureafl::cuda {

constexpr int kTaps = 9;      // a 3 x 3 kernel
constexpr int kSpread = 12;   // stride of the kernels in shared memory, in floats; keeps float4 aligned
constexpr uint8_t kDead = 4;  // instead of a position 0 .. 3: the ReLU is zero, no gradient

__device__ inline void fill(float (&values)[4], float value) {
#pragma unroll
  for (int p = 0; p < 4; ++p) values[p] = value;
}

__device__ inline float warp_sum(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
  return value;
}

// from (count / 9, 9) -> to (count / 9, kSpread)
__device__ inline void spread_weights(const float* from, int count, float* to) {
#pragma unroll 4
  for (int i = threadIdx.x; i < count; i += blockDim.x) to[i / kTaps * kSpread + i % kTaps] = from[i];
}

// One input channel of a window: a patch (4, 4), and the taps (9) of an output channel.
template <int kRow>
struct Patch {
  float2 half[4][2];
  __device__ void load(const float* from) {  // (4, kRow) at an even offset
#pragma unroll
    for (int i = 0; i < 8; ++i) half[i / 2][i % 2] = *reinterpret_cast<const float2*>(from + i / 2 * kRow + i % 2 * 2);
  }
  __device__ float operator()(int y, int x) const { return x % 2 ? half[y][x / 2].y : half[y][x / 2].x; }
};
struct Taps {
  float4 first, second;
  float last;
  __device__ void load(const float* from) {  // (kSpread)
    first = reinterpret_cast<const float4*>(from)[0], second = reinterpret_cast<const float4*>(from)[1], last = from[8];
  }
};

// Adds the convolution of kOut channels at the four positions of one window: 16 pixels are used in kOut * 36 products.
// Loads are issued before their use, because few warps are available to hide latency.
//   patch (in, 4, kRow), stride `plane` between channels   weights (kOut, in, kSpread), stride `next`
template <int kRow, int kOut>
__device__ inline void convolve(const float* patch, int plane, const float* weights, int next, int in,
                                float (&sum)[kOut][4]) {
  Patch<kRow> ahead;
  Taps taps_ahead;
  ahead.load(patch);
  taps_ahead.load(weights);
#pragma unroll 2
  for (int c = 0; c < in; ++c, weights += kSpread) {
    const Patch<kRow> pixel = ahead;
    if (c + 1 < in) ahead.load(patch += plane);
#pragma unroll
    for (int o = 0; o < kOut; ++o) {
      const Taps now = taps_ahead;
      const float tap[kTaps] = {now.first.x,  now.first.y,  now.first.z,  now.first.w, now.second.x,
                                now.second.y, now.second.z, now.second.w, now.last};
      if (o + 1 < kOut || c + 1 < in) taps_ahead.load(o + 1 < kOut ? weights + (o + 1) * next : weights + kSpread);
#pragma unroll
      for (int e = 0; e < kTaps; ++e) {
#pragma unroll
        for (int p = 0; p < 4; ++p) sum[o][p] = fmaf(tap[e], pixel(p / 2 + e / 3, p % 2 + e % 3), sum[o][p]);
      }
    }
  }
}

// ReLU of the maximum of a window, and its position. As in torch: the first of equal values, and NaN is the largest.
__device__ inline uint8_t pool(const float (&z)[4], float& out) {
  float most = z[0];
  uint8_t from = 0;
#pragma unroll
  for (int p = 1; p < 4; ++p) {
    if (z[p] > most || z[p] != z[p]) most = z[p], from = p;
  }
  out = most <= 0 ? 0 : most;
  return most <= 0 ? kDead : from;
}

constexpr int kTile = 32, kStep = 64;  // tile of a matrix product; part of the inner dimension in shared memory
constexpr int kLeftRow = kTile + 4, kRightRow = kTile + 1;  // padded: for float4 loads; for loads across rows
constexpr int kTileBytes = kStep * (kLeftRow + kRightRow) * static_cast<int>(sizeof(float));
constexpr int kThreads = kTile / 4 * kTile;

__host__ __device__ constexpr int tiles(int count) { return (count + kTile - 1) / kTile; }

// Element (r, c) is at r * row + c * column.
struct Matrix {
  const float* data;
  int rows, columns, row, column;
};

// The four elements of a tile that this thread computes: (m .. m + 3, n).
struct Tile {
  int first_m, first_n, m, n;
  __device__ Tile(int down, int across)
      : first_m(down * kTile),
        first_n(across * kTile),
        m(first_m + static_cast<int>(threadIdx.x) / kTile * 4),
        n(first_n + static_cast<int>(threadIdx.x) % kTile) {}
};

// Adds a tile of left * right over the inner indices begin .. end - 1. Past its edges the right matrix is padded with
// ones: one column past its end, the product is the sum over the rows of the left matrix (a bias gradient).
__device__ inline void multiply(const Matrix& left, const Matrix& right, const Tile& out, int begin, int end,
                                float (&sum)[4]) {
  extern __shared__ float4 shared[];
  float* a = reinterpret_cast<float*>(shared);  // (kStep, kLeftRow): transposed
  float* b = a + kStep * kLeftRow;              // (kStep, kRightRow)
  for (; begin < end; begin += kStep) {
    const int steps = min(kStep, end - begin);
#pragma unroll
    for (int s = 0; s < kTile * kStep / kThreads; ++s) {  // in the order of memory
      const int i = s * kThreads + threadIdx.x;
      const int m = left.column == 1 ? i / kStep : i % kTile, k = left.column == 1 ? i % kStep : i / kTile;
      const bool inside = out.first_m + m < left.rows && k < steps;
      a[k * kLeftRow + m] = inside ? left.data[(out.first_m + m) * left.row + (begin + k) * left.column] : 0;
    }
#pragma unroll
    for (int s = 0; s < kTile * kStep / kThreads; ++s) {
      const int i = s * kThreads + threadIdx.x;
      const int n = right.column == 1 ? i % kTile : i / kStep, k = right.column == 1 ? i / kTile : i % kStep;
      const bool inside = out.first_n + n < right.columns && k < steps;
      b[k * kRightRow + n] = inside ? right.data[(begin + k) * right.row + (out.first_n + n) * right.column] : 1;
    }
    __syncthreads();
#pragma unroll 8
    for (int k = 0; k < steps; ++k) {
      const float4 four = *reinterpret_cast<const float4*>(a + k * kLeftRow + out.m - out.first_m);
      const float one = b[k * kRightRow + out.n - out.first_n];
      sum[0] = fmaf(four.x, one, sum[0]);
      sum[1] = fmaf(four.y, one, sum[1]);
      sum[2] = fmaf(four.z, one, sum[2]);
      sum[3] = fmaf(four.w, one, sum[3]);
    }
    __syncthreads();
  }
}

// One tile of the gradient of a linear layer: weight (out, in), then bias (out), the weight of a constant input of one.
//   d (batch, out)   input (batch, in)
__device__ inline void linear_gradient(const float* d, int out, const float* input, int in, int batch, int job,
                                       float* result) {
  const int across = tiles(in + 1);
  const Tile tile(job / across, job % across);
  float sum[4] = {};
  multiply({d, out, batch, 1, out}, {input, batch, in, in, 1}, tile, 0, batch, sum);
  for (int i = 0; i < 4; ++i) {
    const int m = tile.m + i;
    if (m >= out || tile.n > in) continue;
    result[tile.n < in ? m * in + tile.n : out * in + m] = sum[i];
  }
}

}  // namespace secureafl::cuda
