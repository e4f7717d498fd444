#pragma once

#include "sim/resnet/tensor_core.cuh"

// How a block of sixteen warps stores an image for convolutions on tensor cores. A level is the image size after some
// halvings, named by its channels: 16 with 32 x 32 pixels, 32 with 16 x 16, 64 with 8 x 8.
//
// A plane is in shared memory, pixel by pixel, with a frame of zeros, so that all nine taps of every pixel exist. The
// stride between pixels is the number of channels plus eight, so that the rows of a tile are in different banks. The
// output of a convolution stays in registers: a warp has kTilesPerWarp x 2 tiles of 16 pixels and 8 channels, one below
// the other if a row has 16 pixels. Eight channels are also one group of the norm.

namespace secureafl::cuda {

constexpr int kThreads = 512, kWarps = kThreads / 32, kConvs = 19;
constexpr int kFramed = 34, kLargest = 32 * 32 * 16;  // side with frame; values of the largest output
constexpr int kPlane = kFramed * kFramed * 24;        // operands of the largest plane
constexpr int kPartialSums = 18432;                   // partial sums of a weight gradient, over all warps

__device__ constexpr int pitch(int channels) { return channels + 8; }

// Maximum of absolute values, as bits: the bits of non-negative floats have the same order, and NaN is the largest.
__device__ inline uint32_t bits_of(float value) { return __float_as_uint(fabsf(value)); }
__device__ inline uint32_t max_bits(uint32_t a, uint32_t b) { return a > b ? a : b; }
__device__ inline uint32_t warp_max(uint32_t value) { return __reduce_max_sync(0xffffffffu, value); }

// Power of two that scales values with this maximum below 2^15, half the range of float16, and the maximum above 2^14.
// 1 if the maximum is infinite or NaN; the result is then infinite or NaN too. Limited, so that the product of two
// prescales is finite.
__device__ inline float prescale_for(uint32_t most) {
  const int exponent = 268 - static_cast<int>(most >> 23);
  return most >= 0x7f800000u ? 1 : __uint_as_float((exponent < 73 ? 73 : exponent > 187 ? 187 : exponent) << 23);
}
__device__ inline float prescale_for(float most) { return prescale_for(bits_of(most)); }
__device__ inline float inverse(float power) { return __uint_as_float((254u << 23) - __float_as_uint(power)); }

template <int C>
struct Level {
  static constexpr int kSide = 512 / C, kPixels = kSide * kSide;
  static constexpr int kAcross = C / 16, kDown = kWarps / kAcross;  // warps over channels, over pixels
  static constexpr int kTilesPerWarp = kPixels / 16 / kDown;        // tiles of pixels per warp
  static constexpr int kOperands = (kSide + 2) * (kSide + 2) * pitch(C);

  __device__ static int warp() { return threadIdx.x / 32; }
  __device__ static int down() { return warp() / kAcross; }
  __device__ static int group(int j) { return warp() % kAcross * 2 + j; }
  // Offset of a pixel in a plane.
  __device__ static constexpr int place(int pixel) {
    return ((pixel / kSide + 1) * (kSide + 2) + pixel % kSide + 1) * pitch(C);
  }
  static constexpr int kAbreast = kSide < 16 ? 1 : kSide / 16;  // tiles side by side
  // The pixel of row 0 .. 15 of tile i of this warp. kSpread: the tiles of a warp cover one of four lattices of every
  // second pixel.
  template <bool kSpread>
  __device__ static int pixel(int i, int row) {
    constexpr int kHalf = kSide / 2;
    if (!kSpread) return (down() / kAbreast * kTilesPerWarp + i) * kAbreast * 16 + down() % kAbreast * 16 + row;
    const int tile = down() * kTilesPerWarp + i;
    const int within = tile % (kPixels / 64) * 16 + row, lattice = tile / (kPixels / 64);
    return (within / kHalf * 2 + lattice / 2) * kSide + within % kHalf * 2 + lattice % 2;
  }
  // Offset in global memory of tile (i, j) of this lane. Values are stored as lanes hold them in tiles that are not
  // spread: (warps, kTilesPerWarp, 2, 32, 4).
  __device__ static int own_place(int i, int j) {
    return (((warp() * kTilesPerWarp + i) * 2 + j) * 32 + static_cast<int>(threadIdx.x) % 32) * 4;
  }
  // Offset in global memory of any pixel and even channel. The next channel follows it.
  __device__ static int place_of(int pixel, int channel) {
    const int strip = pixel / (kAbreast * 16), row = pixel % 16;
    const int owner = (strip / kTilesPerWarp * kAbreast + pixel % (kAbreast * 16) / 16) * kAcross + channel / 16;
    const int tile = (owner * kTilesPerWarp + strip % kTilesPerWarp) * 2 + channel / 8 % 2;
    return (tile * 32 + row % 8 * 4 + channel % 8 / 2) * 4 + row / 8 * 2;
  }
};

struct Shared {
  Operand x[kPlane];                // input of a convolution
  Operand dz[kPlane];               // gradient of the output of a convolution
  Operand weights_64[9 * 64 * 64];  // weights at level 64; at other levels kPartialSums floats, see weight_products
  Operand weights_16[9 * 16 * 16];  // weights at level 16
  float2 groups[kWarps * 2];        // two values per group and warp: (C / 8, kDown)
  float2 channels[kWarps * 16];     // two sums per channel over the pixels of a warp: (kDown, C)
  uint32_t most[kWarps];            // maximum of each warp
  float prescale[kConvs + 1];       // of the input plane of each convolution
  float weight_prescale[kConvs];
  float2 moments[kConvs * 8];  // mean and 1 / deviation of the groups of each convolution
  float features[64];
  float logits[256];

  // The weights of a convolution of a level. Those of level 32 are behind its plane dz, which leaves room.
  __device__ Operand* weights(int channels) {
    return channels == 64 ? weights_64 : channels == 32 ? dz + Level<32>::kOperands : weights_16;
  }
};
static_assert(sizeof(Shared::weights_64) >= kPartialSums * sizeof(float) && kPartialSums >= kLargest,
              "room for all parts");
static_assert(kPlane - Level<32>::kOperands >= 9 * 32 * 32 && Level<32>::kOperands % 8 == 0, "room for weights");

template <int C>
using Tiles = float[Level<C>::kTilesPerWarp][2][4];

// Calls what(i, j, e) for every value of this lane.
template <int C, typename What>
__device__ inline void for_tiles(const What& what) {
#pragma unroll
  for (int i = 0; i < Level<C>::kTilesPerWarp * 8; ++i) what(i / 8, i / 4 % 2, i % 4);
}

// Calls what(i, j, row, pixel, channel) for every two neighbouring channels of this lane: values 2 row and 2 row + 1.
template <int C, bool kSpread, typename What>
__device__ inline void for_pairs(const What& what) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < Level<C>::kTilesPerWarp; ++i) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int pixel = Level<C>::template pixel<kSpread>(i, g + 8 * row);
#pragma unroll
      for (int j = 0; j < 2; ++j) what(i, j, row, pixel, Level<C>::group(j) * 8 + 2 * t);
    }
  }
}

// Calls what(i, j) for every tile of this lane.
template <int C, typename What>
__device__ inline void for_own(const What& what) {
#pragma unroll
  for (int i = 0; i < Level<C>::kTilesPerWarp * 2; ++i) what(i / 2, i % 2);
}

// ReLU mask: one bit per value, set if the ReLU passes it. As in torch, NaN passes.
template <int C>
__device__ inline uint32_t relu_mask_of(const Tiles<C>& tiles) {
  uint32_t relu_mask = 0;
  for_tiles<C>([&](int i, int j, int e) { relu_mask |= (tiles[i][j][e] <= 0 ? 0u : 1u) << (i * 8 + j * 4 + e); });
  return relu_mask;
}
template <int C>
__device__ inline void apply_relu_mask(uint32_t relu_mask, Tiles<C>& gradient) {
  for_tiles<C>([&](int i, int j, int e) {
    if (!(relu_mask >> (i * 8 + j * 4 + e) & 1)) gradient[i][j][e] = 0;
  });
}

// Copies between tiles and global memory. All loads are issued first: each may take as long as the products of a tile.
// They bypass the L1 cache, which holds spilled registers.
template <int C>
__device__ inline void load_tiles(const float* from, Tiles<C>& to) {
  for_own<C>([&](int i, int j) {
    const float4 four = __ldcg(reinterpret_cast<const float4*>(from + Level<C>::own_place(i, j)));
    to[i][j][0] = four.x, to[i][j][1] = four.y, to[i][j][2] = four.z, to[i][j][3] = four.w;
  });
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
template <int C>
__device__ inline void scale(Tiles<C>& tiles, float by) {
  for_tiles<C>([&](int i, int j, int e) { tiles[i][j][e] *= by; });
}
// Stores tiles as operands, prescaled and rounded.
template <int C>
__device__ inline void store_plane(const Tiles<C>& from, float prescale, Operand* plane) {
  for_pairs<C, false>([&](int i, int j, int row, int pixel, int channel) {
    *reinterpret_cast<Pair*>(plane + Level<C>::place(pixel) + channel) =
        to_pair(from[i][j][2 * row] * prescale, from[i][j][2 * row + 1] * prescale);
  });
}

// Sets the frame of a plane to zero.
template <int C>
__device__ inline void clear_frame(Operand* plane) {
  constexpr int kSide = Level<C>::kSide, kWidth = kSide + 2, kPairs = C / 2;
  for (int i = threadIdx.x; i < 4 * (kSide + 1) * kPairs; i += kThreads) {
    const int k = i / kPairs % (kSide + 1), side = i / kPairs / (kSide + 1);  // each side without its second corner
    const int y = side == 0 ? 0 : side == 1 ? k : side == 2 ? kSide + 1 : kSide + 1 - k;
    const int x = side == 0 ? k : side == 1 ? kSide + 1 : side == 2 ? kSide + 1 - k : 0;
    reinterpret_cast<Pair*>(plane + (y * kWidth + x) * pitch(C))[i % kPairs] = to_pair(0, 0);
  }
}
template <int C>
__device__ inline void clear_plane(Operand* plane) {
  Pair* pairs = reinterpret_cast<Pair*>(plane);
  for (int i = threadIdx.x; i < Level<C>::kOperands / 2; i += kThreads) pairs[i] = to_pair(0, 0);
  __syncthreads();
}

// Asynchronous copy of tiles that are not spread, through memory that no other thread uses: (2 kTilesPerWarp,
// kThreads).
template <int C>
__device__ inline void copy_tiles(const float* from, Operand* by) {
  for_own<C>([&](int i, int j) {
    copy_async(reinterpret_cast<float4*>(by) + (i * 2 + j) * kThreads + threadIdx.x,
               reinterpret_cast<const float4*>(from + Level<C>::own_place(i, j)));
  });
}
template <int C>
__device__ inline void finish_copy(const Operand* by, Tiles<C>& to) {
  wait_copies();
  for_own<C>([&](int i, int j) {
    const float4 four = reinterpret_cast<const float4*>(by)[(i * 2 + j) * kThreads + threadIdx.x];
    to[i][j][0] = four.x, to[i][j][1] = four.y, to[i][j][2] = four.z, to[i][j][3] = four.w;
  });
}

// Prefetches the tiles of a level into L2.
__device__ inline void prefetch_tiles(const float* tiles, int channels) {
  constexpr int kLine = 32;
  if (threadIdx.x * channels < kLargest / kLine * 16) prefetch_l2(tiles + threadIdx.x * kLine);
}

// A warp processes two groups at once: the first in lanes 0 .. 15, the second in the others. PerGroup: one value per
// group, known to all lanes.
struct PerGroup {
  float of[2];
};
__device__ inline PerGroup exchange_groups(float own) {
  const float other = __shfl_xor_sync(0xffffffffu, own, 16);
  const bool upper = threadIdx.x & 16;
  return {{upper ? other : own, upper ? own : other}};
}
// Sum over kLanes neighbouring lanes; each of them gets the result.
template <int kLanes>
__device__ inline float sum_lanes(float value) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
  return value;
}
// Sum over the whole warp of one value per group.
__device__ inline float sum_warp(float first, float second) {
  const bool upper = threadIdx.x & 16;
  return sum_lanes<16>((upper ? second : first) + __shfl_xor_sync(0xffffffffu, upper ? first : second, 16));
}

// Sums over the pixels of a warp: two sums for each of the channels of a lane (group, one of two channels) ->
// at.channels. Returns the value that this lane wrote; bits 4 to 2 of the lane number are its group, channel and sum.
template <int C>
__device__ inline float sum_channels(Shared& at, const float (&sums)[2][2][2]) {
  const int t = threadIdx.x % 4;
  const bool j = threadIdx.x & 16, e = threadIdx.x & 8, which = threadIdx.x & 4;
  float two[2][2], one[2];  // butterfly: each lane keeps half of its sums and sends the rest to its partner
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
// Sum over all pixels; call it after a barrier.
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

}  // namespace secureafl::cuda
