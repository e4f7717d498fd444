#pragma once

#include "tensor_core.cuh"

// How one block of sixteen warps holds an image and convolves it with tensor cores. A level is an image's size after so
// many halvings, named by its channels: 16 of 32 x 32 pixels, 32 of 16 x 16, 64 of 8 x 8.
//
// A plane lies in shared memory, pixel by pixel, with a frame of zeros, so that all nine taps of a pixel are there;
// from pixel to pixel it is four floats more than there are channels, which keeps the lanes of a warp in different
// banks. What a convolution gives stays in registers: a warp has kTall x 2 tiles of 16 pixels and 8 channels, one below
// the other where a row has 16 pixels. Eight channels are also a group of the norm.

namespace secureafl::cuda {

constexpr int kThreads = 512, kSixteen = kThreads / 32;
constexpr int kFramed = 34, kLargest = 32 * 32 * 16;  // a framed side; floats of an output
constexpr int kPlane = kFramed * kFramed * 20;        // floats of the largest plane
constexpr int kTogether = 18432;                      // floats of all warps' parts of a weight gradient

__device__ constexpr int pitch(int channels) { return channels + 4; }

struct Shared {
  float x[kPlane];   // what is convolved
  float dz[kPlane];  // gradient of a convolution's output
  float2 groups[kSixteen * 2];       // two numbers of each warp's groups: (C / 8, kDown)
  float2 channels[kSixteen * 16];    // two sums over each warp's pixels: (kDown, C)
  float2 moments[19 * 8];            // mean and 1 / deviation of each convolution's groups
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
  static constexpr int kAbreast = kSide < 16 ? 1 : kSide / 16;  // tiles side by side
  // Row 0 .. 15 of tile i of this warp. Spread: one of four lattices of every second pixel, the same for all i.
  template <bool kSpread>
  __device__ static int pixel(int i, int row) {
    constexpr int kHalf = kSide / 2;
    if (!kSpread) return (down() / kAbreast * kTall + i) * kAbreast * 16 + down() % kAbreast * 16 + row;
    const int tile = down() * kTall + i;
    const int within = tile % (kPixels / 64) * 16 + row, lattice = tile / (kPixels / 64);
    return (within / kHalf * 2 + lattice / 2) * kSide + within % kHalf * 2 + lattice % 2;
  }
  // In global memory numbers lie as the lanes hold them in tiles that are not spread: (warps, kTall, 2, 32, 4).
  __device__ static int own_place(int i, int j) {
    return (((warp() * kTall + i) * 2 + j) * 32 + static_cast<int>(threadIdx.x) % 32) * 4;
  }
  // The same of any pixel and even channel, the next one lies behind.
  __device__ static int place_of(int pixel, int channel) {
    const int strip = pixel / (kAbreast * 16), row = pixel % 16;
    const int owner = (strip / kTall * kAbreast + pixel % (kAbreast * 16) / 16) * kAcross + channel / 16;
    const int tile = (owner * kTall + strip % kTall) * 2 + channel / 8 % 2;
    return (tile * 32 + row % 8 * 4 + channel % 8 / 2) * 4 + row / 8 * 2;
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

// what(i, j) for every tile of this lane
template <int C, typename What>
__device__ inline void for_own(const What& what) {
#pragma unroll
  for (int i = 0; i < Level<C>::kTall * 2; ++i) what(i / 2, i % 2);
}

// Which of these numbers a ReLU lets through, a bit each; as torch has it where there is NaN.
template <int C>
__device__ inline uint32_t open_of(const Tiles<C>& tiles) {
  uint32_t open = 0;
  for_tiles<C>([&](int i, int j, int e) { open |= (tiles[i][j][e] <= 0 ? 0u : 1u) << (i * 8 + j * 4 + e); });
  return open;
}
template <int C>
__device__ inline void pass(uint32_t open, Tiles<C>& gradient) {
  for_tiles<C>([&](int i, int j, int e) {
    if (!(open >> (i * 8 + j * 4 + e) & 1)) gradient[i][j][e] = 0;
  });
}

// Between tiles and global memory. All loads before anything else: each may take as long as a tile's products. They
// pass by the L1 cache, where the weights are.
template <int C, bool kSpread>
__device__ inline void load_tiles(const float* from, Tiles<C>& to) {
  if constexpr (kSpread) {
    for_pairs<C, true>([&](int i, int j, int row, int pixel, int channel) {
      const float2 two = __ldcg(reinterpret_cast<const float2*>(from + Level<C>::place_of(pixel, channel)));
      to[i][j][2 * row] = two.x, to[i][j][2 * row + 1] = two.y;
    });
  } else {
    for_own<C>([&](int i, int j) {
      const float4 four = __ldcg(reinterpret_cast<const float4*>(from + Level<C>::own_place(i, j)));
      to[i][j][0] = four.x, to[i][j][1] = four.y, to[i][j][2] = four.z, to[i][j][3] = four.w;
    });
  }
}
template <int C, bool kSpread>
__device__ inline void store_tiles(const Tiles<C>& from, float* to) {
  if constexpr (kSpread) {
    for_pairs<C, true>([&](int i, int j, int row, int pixel, int channel) {
      *reinterpret_cast<float2*>(to + Level<C>::place_of(pixel, channel)) =
          make_float2(from[i][j][2 * row], from[i][j][2 * row + 1]);
    });
  } else {
    for_own<C>([&](int i, int j) {
      const float (&four)[4] = from[i][j];
      *reinterpret_cast<float4*>(to + Level<C>::own_place(i, j)) = make_float4(four[0], four[1], four[2], four[3]);
    });
  }
}
// Rounded, as factors.
template <int C, bool kSpread>
__device__ inline void store_plane(const Tiles<C>& from, float* plane) {
  for_pairs<C, kSpread>([&](int i, int j, int row, int pixel, int channel) {
    *reinterpret_cast<float2*>(plane + Level<C>::place(pixel) + channel) =
        make_float2(to_tf32(from[i][j][2 * row]), to_tf32(from[i][j][2 * row + 1]));
  });
}

// Its frame, all but the pixels.
template <int C>
__device__ inline void clear_frame(float* plane) {
  constexpr int kSide = Level<C>::kSide, kWidth = kSide + 2;
  for (int i = threadIdx.x; i < 4 * (kSide + 1) * C; i += kThreads) {
    const int k = i / C % (kSide + 1), side = i / C / (kSide + 1);  // each side up to its next corner
    const int y = side == 0 ? 0 : side == 1 ? k : side == 2 ? kSide + 1 : kSide + 1 - k;
    const int x = side == 0 ? k : side == 1 ? kSide + 1 : side == 2 ? kSide + 1 - k : 0;
    plane[(y * kWidth + x) * pitch(C) + i % C] = 0;
  }
}
template <int C>
__device__ inline void clear_plane(float* plane) {
  for (int i = threadIdx.x; i < Level<C>::kFloats; i += kThreads) plane[i] = 0;
  __syncthreads();
}

// Tiles of a level are to be loaded soon.
__device__ inline void expect(const float* tiles, int channels) {
  constexpr int kLine = 32;
  if (threadIdx.x * channels < kLargest / kLine * 16) fetch_far(tiles + threadIdx.x * kLine);
}
// So are a convolution's weights, at once; of many the first, for the L1 cache would not hold all.
__device__ inline void expect_weights(const float* packed, int count) {
  const int line = threadIdx.x * 32;
  if (line < count && line < 9 * 32 * 32) fetch_near(packed + line);
}

// A warp works on two groups at once, the first in lanes 0 .. 15, the second in the others. A number of each, in all.
struct Two {
  float of[2];
};
__device__ inline Two both(float own) {
  const float other = __shfl_xor_sync(0xffffffffu, own, 16);
  const bool upper = threadIdx.x & 16;
  return {{upper ? other : own, upper ? own : other}};
}
// The sum over kLanes neighbouring lanes, in each of them.
template <int kLanes>
__device__ inline float sum_lanes(float value) {
#pragma unroll
  for (int far = kLanes / 2; far > 0; far /= 2) value += __shfl_xor_sync(0xffffffffu, value, far);
  return value;
}
// Over the whole warp, of a number for each group.
__device__ inline float sum_warp(float first, float second) {
  const bool upper = threadIdx.x & 16;
  return sum_lanes<16>((upper ? second : first) + __shfl_xor_sync(0xffffffffu, upper ? first : second, 16));
}

// Two sums over a warp's pixels of each of a lane's channels (group, which of its two) -> at.channels, and what this
// lane wrote: with bits 4 to 2 of its number that of group, channel and sum.
template <int C>
__device__ inline float sum_channels(Shared& at, const float (&sums)[2][2][2]) {
  const int t = threadIdx.x % 4;
  const bool j = threadIdx.x & 16, e = threadIdx.x & 8, which = threadIdx.x & 4;
  float two[2][2], one[2];  // every lane keeps half of what it has, and gives the rest to the one that keeps that
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float first = sums[0][i / 2][i % 2], second = sums[1][i / 2][i % 2];
    two[i / 2][i % 2] = (j ? second : first) + __shfl_xor_sync(0xffffffffu, j ? first : second, 16);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    one[i] = (e ? two[1][i] : two[0][i]) + __shfl_xor_sync(0xffffffffu, e ? two[0][i] : two[1][i], 8);
  }
  const float sum = (which ? one[1] : one[0]) + __shfl_xor_sync(0xffffffffu, which ? one[0] : one[1], 4);
  (&at.channels[Level<C>::down() * C + Level<C>::group(j) * 8 + 2 * t + e].x)[which] = sum;
  return sum;
}
// Their sum over all pixels, after a barrier.
template <int C>
__device__ inline float2 total_of(const Shared& at, int channel) {
  float2 sum = at.channels[channel];
#pragma unroll
  for (int k = 1; k < Level<C>::kDown; ++k) {
    const float2 more = at.channels[k * C + channel];
    sum.x += more.x, sum.y += more.y;
  }
  return sum;
}

// Where the row of a tile begins that this lane loads: see load_rows.
__device__ inline int own_row() { return threadIdx.x % 16; }
__device__ inline int own_column() { return threadIdx.x % 32 / 16 * 4; }

// sum += rows of a plane times one tap's weights.
//   rows: where this lane's rows of each tile begin; `off` to the tap
//   packed: this tap's (K / 8, n / 8, 32, 2) at this warp's first tile and lane
template <int K, int kTall>
__device__ inline void add_tap(const float* plane, const int (&rows)[kTall], int off, const float2* packed, int next,
                               float (&sum)[kTall][2][4]) {
#pragma unroll
  for (int k = 0; k < K; k += 8) {
    const float2 b[2] = {packed[k / 8 * next], packed[k / 8 * next + 32]};
#pragma unroll
    for (int i = 0; i < kTall; ++i) {
      float a[4];
      load_rows(a, plane + rows[i] + off + k);
      add_product(sum[i][0], a, b[0]);
      add_product(sum[i][1], a, b[1]);
    }
  }
}

// sum += all nine taps of tiles that lie one below the other: the taps of a column read mostly the same rows.
//   corner: where this lane's row of the first tile's first tap begins; `line` from a line of the plane to the next
//   packed: (9, K / 8, n / 8, 32, 2) at this warp's first tile and lane; back: the last tap first
template <int K, bool kBack, int kTall>
__device__ inline void add_columns(const float* corner, int line, const float2* packed, int next,
                                   float (&sum)[kTall][2][4]) {
#pragma unroll 1
  for (int x = 0; x < 3; ++x) {
#pragma unroll
    for (int k = 0; k < K; k += 8) {
      float2 b[3][2];
#pragma unroll
      for (int y = 0; y < 3; ++y) {
        const int tap = kBack ? 8 - 3 * y - x : 3 * y + x;
        b[y][0] = packed[(tap * (K / 8) + k / 8) * next], b[y][1] = packed[(tap * (K / 8) + k / 8) * next + 32];
      }
#pragma unroll
      for (int row = 0; row < kTall + 2; ++row) {
        float a[4];
        load_rows(a, corner + row * line + x * pitch(K) + k);
#pragma unroll
        for (int y = 0; y < 3; ++y) {
          if (row < y || row - y >= kTall) continue;
          add_product(sum[row - y][0], a, b[y][0]);
          add_product(sum[row - y][1], a, b[y][1]);
        }
      }
    }
  }
}

// The same of the smallest level, where each warp would read many weights for its one tile: here four warps work on the
// same quarter of the output, two steps of a tap each, and add up in `parts`.
template <bool kBack>
__device__ inline void add_quarters(const float* plane, const float2* packed, float* parts, Tiles<64>& to) {
  constexpr int kSide = Level<64>::kSide, kWidth = kSide + 2;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int lower = warp % 2 * 2, right = warp / 2 % 2 * 4, part = warp / 4;  // first tile of pixels, of channels
  const float* corner[2];
  float sum[2][4][4] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int pixel = (lower + i) * 16 + own_row();
    corner[i] = plane + (pixel / kSide * kWidth + pixel % kSide) * pitch(64) + part * 16 + own_column();
  }
  packed += (part * 2 * 8 + right) * 32 + lane;
#pragma unroll 3
  for (int tap = 0; tap < 9; ++tap) {
    const int off = (tap / 3 * kWidth + tap % 3) * pitch(64);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      float2 b[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) b[j] = packed[(((kBack ? 8 - tap : tap) * 8 + k) * 8 + j) * 32];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float a[4];
        load_rows(a, corner[i] + off + k * 8);
#pragma unroll
        for (int j = 0; j < 4; ++j) add_product(sum[i][j], a, b[j]);
      }
    }
  }
  float4* all = reinterpret_cast<float4*>(parts);  // (4 parts, 4 tiles of pixels, 8 of channels, 32)
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float (&four)[4] = sum[i / 4][i % 4];
    all[((part * 4 + lower + i / 4) * 8 + right + i % 4) * 32 + lane] = make_float4(four[0], four[1], four[2], four[3]);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int j = i % 2;
    const float4 four = all[((i / 2 * 4 + Level<64>::down()) * 8 + Level<64>::group(j)) * 32 + lane];
    to[0][j][0] += four.x, to[0][j][1] += four.y, to[0][j][2] += four.z, to[0][j][3] += four.w;
  }
}

template <int C>
__device__ inline const float2* own_weights(const float* packed) {
  return reinterpret_cast<const float2*>(packed) + Level<C>::group(0) * 32 + threadIdx.x % 32;
}

// z += the 3 x 3 convolution of the plane x (In channels), over every second pixel where that is of a larger level;
// `free` is memory for it, as large as a plane.
template <int In, int C>
__device__ inline void convolve(const float* x, const float* packed, float* free, Tiles<C>& z) {
  constexpr int kStep = In > 8 && In != C ? 2 : 1, kSide = Level<C>::kSide, kWidth = kSide * kStep + 2;
  constexpr int kNext = C / 8 * 32;
  if constexpr (In == 64) {
    add_quarters<false>(x, reinterpret_cast<const float2*>(packed), free, z);
  } else {
    int rows[Level<C>::kTall];  // of the first taps
#pragma unroll
    for (int i = 0; i < Level<C>::kTall; ++i) {
      const int pixel = Level<C>::template pixel<false>(i, own_row());
      rows[i] = (pixel / kSide * kStep * kWidth + pixel % kSide * kStep) * pitch(In) + own_column();
    }
    const float2* weights = own_weights<C>(packed);
    if constexpr (kStep == 1) {
      add_columns<In, false>(x + rows[0], kWidth * pitch(In), weights, kNext, z);
    } else {
#pragma unroll 1
      for (int tap = 0; tap < 9; ++tap, weights += In / 8 * kNext) {
        add_tap<In>(x, rows, (tap / 3 * kWidth + tap % 3) * pitch(In), weights, kNext, z);
      }
    }
  }
}

// dx += the gradient of that convolution's input, from the plane dz (C channels). Where that is of a smaller level, dx
// is spread: a lattice of every second pixel has one to four taps that reach it.
template <int In, int C>
__device__ inline void convolve_back(const float* dz, const float* packed, float* free, Tiles<In>& dx) {
  constexpr int kWidth = Level<C>::kSide + 2, kNext = In / 8 * 32;
  if constexpr (In == 64) {
    add_quarters<true>(dz, reinterpret_cast<const float2*>(packed), free, dx);
  } else if constexpr (In == C) {
    const int pixel = Level<C>::template pixel<false>(0, own_row());
    const int corner = (pixel / Level<C>::kSide * kWidth + pixel % Level<C>::kSide) * pitch(C) + own_column();
    add_columns<C, true>(dz + corner, kWidth * pitch(C), own_weights<In>(packed), kNext, dx);
  } else {
    int rows[Level<In>::kTall], odd_y = 0, odd_x = 0;
#pragma unroll
    for (int i = 0; i < Level<In>::kTall; ++i) {
      const int pixel = Level<In>::template pixel<true>(i, own_row());
      const int y = pixel / Level<In>::kSide, x = pixel % Level<In>::kSide;
      odd_y = y % 2, odd_x = x % 2;
      rows[i] = ((y / 2 + 1) * kWidth + x / 2 + 1) * pitch(C) + own_column();
    }
    const float2* weights = own_weights<In>(packed);
#pragma unroll 1
    for (int tap = 0; tap < 9; ++tap, weights += C / 8 * kNext) {
      const int y = odd_y - (tap / 3 - 1), x = odd_x - (tap % 3 - 1);
      if (y % 2 != 0 || x % 2 != 0) continue;
      add_tap<C>(dz, rows, (y / 2 * kWidth + x / 2) * pitch(C), weights, kNext, dx);
    }
  }
}

// The gradient of that convolution's weights -> to, as lanes hold it (pairs, 9, 32, 4): see place_of. A warp sums 16
// output and 8 input channels down a strip of pixels, all nine taps: of three lines that they see two were there
// before. x is the memory in which the warps' parts meet.
template <int In, int C>
__device__ inline void weight_products(float* x, const float* dz, float* to) {
  constexpr int kStep = In > 8 && In != C ? 2 : 1, kSide = Level<C>::kSide, kWidth = kSide * kStep + 2;
  constexpr int kPairs = C / 16 * (In / 8), kParts = kPairs < kSixteen ? kSixteen / kPairs : 1;
  constexpr int kLines = Level<C>::kPixels / kParts / 8, kSize = C * In * 9;  // of a strip eight pixels wide
  static_assert(kParts == 1 || kParts * kSize == kTogether, "all parts in a plane");
  static_assert(kTogether <= kPlane && kLines * 8 * kParts == Level<C>::kPixels && kSide % kLines == 0, "whole strips");
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int part = kParts > 1 ? warp / kPairs : 0, left = part % (kSide / 8) * 8, top = part / (kSide / 8) * kLines;
#pragma unroll 1
  for (int pair = kParts > 1 ? warp % kPairs : warp; pair < kPairs; pair += kSixteen) {
    const int o = pair / (In / 8) * 16 + g, i = pair % (In / 8) * 8;
    float sum[9][4] = {};
    // A lane's two pixels are neighbours, in both factors: two pixels are eight banks from lane to lane.
    const float* own = dz + Level<C>::place(top * kSide + left + 2 * t) + o;
    const float* corner = x + (top * kStep * kWidth + (left + 2 * t) * kStep) * pitch(In) + i + g;
    float near[3][3 + kStep];  // what they see in three lines; in the middle both see the same
    const auto see = [&](int line, float (&to)[3 + kStep]) {
#pragma unroll
      for (int k = 0; k < 3 + kStep; ++k) to[k] = corner[(line * kWidth + k) * pitch(In)];
    };
#pragma unroll
    for (int line = 0; line < 3 - kStep; ++line) see(line, near[line + kStep]);
#pragma unroll 4
    for (int y = 0; y < kLines; ++y, own += (kSide + 2) * pitch(C)) {
      const float a[4] = {own[0], own[8], own[pitch(C)], own[pitch(C) + 8]};
#pragma unroll
      for (int line = 0; line < 3; ++line) {
        if (line >= 3 - kStep) {
          see(y * kStep + line, near[line]);
          continue;
        }
#pragma unroll
        for (int k = 0; k < 3 + kStep; ++k) near[line][k] = near[line + kStep][k];
      }
#pragma unroll
      for (int tap = 0; tap < 9; ++tap) {
        add_product(sum[tap], a, make_float2(near[tap / 3][tap % 3], near[tap / 3][tap % 3 + kStep]));
      }
    }
    if (kParts > 1) __syncthreads();  // all have read x; a single pair each
    float4* out = reinterpret_cast<float4*>(kParts > 1 ? x + part * kSize : to) + pair * 9 * 32 + lane;
#pragma unroll
    for (int tap = 0; tap < 9; ++tap) {
      out[tap * 32] = make_float4(sum[tap][0], sum[tap][1], sum[tap][2], sum[tap][3]);
    }
  }
  __syncthreads();
  const float4* each = reinterpret_cast<const float4*>(x);
  for (int k = threadIdx.x; kParts > 1 && k < kSize / 4; k += kThreads) {
    float4 sum = each[k];
#pragma unroll
    for (int i = 1; i < kParts; ++i) {
      const float4 more = each[i * kSize / 4 + k];
      sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
    }
    reinterpret_cast<float4*>(to)[k] = sum;
  }
}

}  // namespace secureafl::cuda
