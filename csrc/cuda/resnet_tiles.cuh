#pragma once

#include "tensor_core.cuh"

// How one block of sixteen warps holds an image and convolves it with tensor cores. A level is an image's size after so
// many halvings, named by its channels: 16 of 32 x 32 pixels, 32 of 16 x 16, 64 of 8 x 8.
//
// A plane lies in shared memory, pixel by pixel, with a frame of zeros, so that all nine taps of a pixel are there;
// from pixel to pixel it is four floats more than there are channels, which keeps the lanes of a warp in different
// banks. What a convolution gives stays in registers: a warp has kTall x 2 tiles of 16 pixels and 8 channels. Eight
// channels are also a group of the norm.

namespace secureafl::cuda {

constexpr int kThreads = 512, kSixteen = kThreads / 32;
constexpr int kFramed = 34, kLargest = 32 * 32 * 16;  // a framed side; floats of an output
constexpr int kPlane = kFramed * kFramed * 20;        // floats of the largest plane
constexpr int kTogether = 18432;                      // floats of all warps' parts of a weight gradient

__device__ constexpr int pitch(int channels) { return channels + 4; }

struct Shared {
  float x[kPlane];   // what is convolved
  float dz[kPlane];  // gradient of a convolution's output
  float sums[2][kSixteen * 8];
  float channels[kSixteen * 64 * 2];
  float totals[64 * 2];
  float2 moments[19 * 8];  // mean and 1 / deviation of each convolution's groups
  float features[64];
  float logits[256];
};

template <int C>
struct Level {
  static constexpr int kSide = 512 / C, kPixels = kSide * kSide;
  static constexpr int kAcross = C / 16, kDown = kSixteen / kAcross;  // warps over channels, over pixels
  static constexpr int kTall = kPixels / 16 / kDown;                  // tiles of pixels of a warp
  static constexpr int kFloats = (kSide + 2) * (kSide + 2) * pitch(C);

  __device__ static int warp() { return threadIdx.x / 32; }
  __device__ static int down() { return warp() / kAcross; }
  __device__ static int group(int j) { return warp() % kAcross * 2 + j; }
  // Where a pixel lies in a plane.
  __device__ static constexpr int place(int pixel) {
    return ((pixel / kSide + 1) * (kSide + 2) + pixel % kSide + 1) * pitch(C);
  }
  // Row 0 .. 15 of tile i of this warp. Spread: one of four lattices of every second pixel, the same for all i.
  template <bool kSpread>
  __device__ static int pixel(int i, int row) {
    const int tile = down() * kTall + i;
    if (!kSpread) return tile * 16 + row;
    constexpr int kHalf = kSide / 2;
    const int within = tile % (kPixels / 64) * 16 + row, lattice = tile / (kPixels / 64);
    return (within / kHalf * 2 + lattice / 2) * kSide + within % kHalf * 2 + lattice % 2;
  }
};

template <int C>
using Tiles = float[Level<C>::kTall][2][4];

// what(i, j, e) for every number of this lane
template <int C, typename What>
__device__ inline void for_tiles(const What& what) {
#pragma unroll
  for (int i = 0; i < Level<C>::kTall * 8; ++i) what(i / 8, i / 4 % 2, i % 4);
}

// what(i, j, row, pixel, channel) for every two neighbouring channels of this lane: numbers 2 row and 2 row + 1
template <int C, bool kSpread, typename What>
__device__ inline void for_pairs(const What& what) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < Level<C>::kTall; ++i) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int pixel = Level<C>::template pixel<kSpread>(i, g + 8 * row);
#pragma unroll
      for (int j = 0; j < 2; ++j) what(i, j, row, pixel, Level<C>::group(j) * 8 + 2 * t);
    }
  }
}

// Between tiles and global memory (pixels, C). All loads before anything else: each may take as long as a tile's
// products.
template <int C, bool kSpread>
__device__ inline void load_tiles(const float* from, Tiles<C>& to) {
  for_pairs<C, kSpread>([&](int i, int j, int row, int pixel, int channel) {
    const float2 two = *reinterpret_cast<const float2*>(from + pixel * C + channel);
    to[i][j][2 * row] = two.x, to[i][j][2 * row + 1] = two.y;
  });
}
template <int C, bool kSpread>
__device__ inline void store_tiles(const Tiles<C>& from, float* to) {
  for_pairs<C, kSpread>([&](int i, int j, int row, int pixel, int channel) {
    *reinterpret_cast<float2*>(to + pixel * C + channel) = make_float2(from[i][j][2 * row], from[i][j][2 * row + 1]);
  });
}
// Rounded, as factors.
template <int C, bool kSpread>
__device__ inline void store_plane(const Tiles<C>& from, float* plane) {
  for_pairs<C, kSpread>([&](int i, int j, int row, int pixel, int channel) {
    *reinterpret_cast<float2*>(plane + Level<C>::place(pixel) + channel) =
        make_float2(to_tf32(from[i][j][2 * row]), to_tf32(from[i][j][2 * row + 1]));
  });
}

template <int C>
__device__ inline void clear_plane(float* plane) {
  for (int i = threadIdx.x; i < Level<C>::kFloats; i += kThreads) plane[i] = 0;
  __syncthreads();
}

// Sums over the pixels and channels of each of this warp's two groups, in the same order in every thread.
template <int C>
__device__ inline void sum_groups(float* shared, float (&sums)[2]) {
  constexpr int kDown = Level<C>::kDown;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int far = 16; far > 0; far /= 2) sums[j] += __shfl_xor_sync(0xffffffffu, sums[j], far);
    if (threadIdx.x % 32 == 0) shared[Level<C>::group(j) * kDown + Level<C>::down()] = sums[j];
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    sums[j] = 0;
#pragma unroll
    for (int k = 0; k < kDown; ++k) sums[j] += shared[Level<C>::group(j) * kDown + k];
  }
}

// Two sums over the pixels of each channel: of this lane's channels -> at.totals (C, 2).
template <int C>
__device__ inline void sum_channels(Shared& at, float (&sums)[2][2][2]) {
  constexpr int kDown = Level<C>::kDown;
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float& sum = sums[i / 4][i / 2 % 2][i % 2];
#pragma unroll
    for (int far = 16; far > 2; far /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, far);
    const int channel = Level<C>::group(i / 4) * 8 + 2 * t + i / 2 % 2;
    if (threadIdx.x % 32 < 4) at.channels[(Level<C>::down() * C + channel) * 2 + i % 2] = sum;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 2 * C; i += kThreads) {
    float sum = 0;
    for (int k = 0; k < kDown; ++k) sum += at.channels[k * 2 * C + i];
    at.totals[i] = sum;
  }
  __syncthreads();
}

// sum += rows of a plane times one tap's weights.
//   rows: where this lane's two rows of each tile begin, with its t; `off` to the tap
//   packed: this tap's (K / 8, n / 8, 32, 2) at this warp's first tile and lane
template <int K, int kTall>
__device__ inline void add_tap(const float* plane, const int (&rows)[kTall][2], int off, const float2* packed, int next,
                               float (&sum)[kTall][2][4]) {
#pragma unroll
  for (int k = 0; k < K; k += 8) {
    const float2 b[2] = {packed[k / 8 * next], packed[k / 8 * next + 32]};
#pragma unroll
    for (int i = 0; i < kTall; ++i) {
      const float *upper = plane + rows[i][0] + off + k, *lower = plane + rows[i][1] + off + k;
      const float a[4] = {upper[0], lower[0], upper[4], lower[4]};
      add_product(sum[i][0], a, b[0]);
      add_product(sum[i][1], a, b[1]);
    }
  }
}

// z += the 3 x 3 convolution of the plane x (In channels), over every second pixel where that is of a larger level.
template <int In, int C>
__device__ inline void convolve(const float* x, const float* packed, Tiles<C>& z) {
  constexpr int kStep = In > 8 && In != C ? 2 : 1, kWidth = Level<C>::kSide * kStep + 2;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  int rows[Level<C>::kTall][2];
#pragma unroll
  for (int i = 0; i < Level<C>::kTall * 2; ++i) {
    const int pixel = Level<C>::template pixel<false>(i / 2, g + i % 2 * 8);
    const int y = pixel / Level<C>::kSide * kStep + 1, at = pixel % Level<C>::kSide * kStep + 1;
    rows[i / 2][i % 2] = (y * kWidth + at) * pitch(In) + t;
  }
  const float2* weights = reinterpret_cast<const float2*>(packed) + Level<C>::group(0) * 32 + lane;
  constexpr int kNext = C / 8 * 32;
#pragma unroll 1
  for (int tap = 0; tap < 9; ++tap, weights += In / 8 * kNext) {
    add_tap<In>(x, rows, ((tap / 3 - 1) * kWidth + tap % 3 - 1) * pitch(In), weights, kNext, z);
  }
}

// dx += the gradient of that convolution's input, from the plane dz (C channels). Where that is of a smaller level, dx
// is spread: a lattice of every second pixel has one to four taps that reach it.
template <int In, int C>
__device__ inline void convolve_back(const float* dz, const float* packed, Tiles<In>& dx) {
  constexpr bool kSpread = In != C;
  constexpr int kStep = kSpread ? 2 : 1, kWidth = Level<C>::kSide + 2;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  int rows[Level<In>::kTall][2], odd_y = 0, odd_x = 0;
#pragma unroll
  for (int i = 0; i < Level<In>::kTall * 2; ++i) {
    const int pixel = Level<In>::template pixel<kSpread>(i / 2, g + i % 2 * 8);
    const int y = pixel / Level<In>::kSide, x = pixel % Level<In>::kSide;
    odd_y = y % kStep, odd_x = x % kStep;
    rows[i / 2][i % 2] = ((y / kStep + 1) * kWidth + x / kStep + 1) * pitch(C) + t;
  }
  const float2* weights = reinterpret_cast<const float2*>(packed) + Level<In>::group(0) * 32 + lane;
  constexpr int kNext = In / 8 * 32;
#pragma unroll 1
  for (int tap = 0; tap < 9; ++tap, weights += C / 8 * kNext) {
    const int y = odd_y - (tap / 3 - 1), x = odd_x - (tap % 3 - 1);
    if (y % kStep != 0 || x % kStep != 0) continue;
    add_tap<C>(dz, rows, (y / kStep * kWidth + x / kStep) * pitch(C), weights, kNext, dx);
  }
}

// The gradient of that convolution's weights -> to (C, real, 9). A warp sums 16 output and 8 input channels over some
// of the pixels, all nine taps; x is the memory in which the warps' parts meet.
template <int In, int C>
__device__ inline void weight_products(float* x, const float* dz, float* to, int real) {
  constexpr int kStep = In > 8 && In != C ? 2 : 1, kSide = Level<C>::kSide, kWidth = kSide * kStep + 2;
  constexpr int kPairs = C / 16 * (In / 8), kParts = kPairs < kSixteen ? kSixteen / kPairs : 1;
  constexpr int kCount = Level<C>::kPixels / kParts, kSize = C * In * 9;
  static_assert(kParts == 1 || kParts * kSize == kTogether, "all parts in a plane");
  static_assert(kTogether <= kPlane && kCount % 8 == 0, "whole steps");
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int part = kParts > 1 ? warp / kPairs : 0;
#pragma unroll 1
  for (int pair = kParts > 1 ? warp % kPairs : warp; pair < kPairs; pair += kSixteen) {
    const int o = pair / (In / 8) * 16 + g, i = pair % (In / 8) * 8;
    float sum[9][4] = {};
#pragma unroll 1
    for (int p = part * kCount; p < (part + 1) * kCount; p += 8) {
      // A lane's two pixels are neighbours, in both factors: two pixels are eight banks from lane to lane.
      const float* near = dz + Level<C>::place(p + 2 * t) + o;
      const float a[4] = {near[0], near[8], near[pitch(C)], near[pitch(C) + 8]};
      const int y = p / kSide * kStep + 1, at = (p % kSide + 2 * t) * kStep + 1;
      const float* pixel = x + (y * kWidth + at) * pitch(In) + i + g;
#pragma unroll
      for (int tap = 0; tap < 9; ++tap) {
        const float* from = pixel + ((tap / 3 - 1) * kWidth + tap % 3 - 1) * pitch(In);
        add_product(sum[tap], a, make_float2(from[0], from[kStep * pitch(In)]));
      }
    }
    if (kParts > 1) __syncthreads();  // all have read x; a single pair each
    float* out = kParts > 1 ? x + part * kSize : to;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float* weight = out + ((o + e / 2 * 8) * In + i + 2 * t + e % 2) * 9;
#pragma unroll
      for (int tap = 0; tap < 9; ++tap) weight[tap] = sum[tap][e];
    }
  }
  __syncthreads();
  for (int k = threadIdx.x; kParts > 1 && k < C * real * 9; k += kThreads) {
    const int from = k / (real * 9) * In * 9 + k % (real * 9);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kParts; ++i) sum += x[i * kSize + from];
    to[k] = sum;
  }
}

}  // namespace secureafl::cuda
