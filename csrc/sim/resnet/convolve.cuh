#pragma once

#include "sim/resnet/tiles.cuh"

// Convolution of a plane, and its gradients: of its input and of its weights.

namespace secureafl::cuda {

// Offset of the row of a tile that this lane loads (see load_rows).
__device__ inline int own_row() { return threadIdx.x % 16; }
__device__ inline int own_column() { return threadIdx.x % 32 / 16 * 8; }

// sum += rows of a plane times the weights of one tap.
//   rows: offsets of the rows of this lane, per tile; off: offset of the tap
//   packed: weights of this tap (K / 16, n / 8, 32), at the first tile of this warp and at this lane
template <int K, int kTilesPerWarp>
__device__ inline void add_tap(const Operand* plane, const int (&rows)[kTilesPerWarp], int off, const OperandB* packed,
                               int next, float (&sum)[kTilesPerWarp][2][4]) {
#pragma unroll
  for (int k = 0; k < K; k += 16) {
    const OperandB b[2] = {packed[k / 16 * next], packed[k / 16 * next + 32]};
#pragma unroll
    for (int i = 0; i < kTilesPerWarp; ++i) {
      Pair a[4];
      load_rows(a, plane + rows[i] + off + k);
      add_product(sum[i][0], a, b[0]);
      add_product(sum[i][1], a, b[1]);
    }
  }
}

// sum += all nine taps, for tiles one below the other: the taps of a column read mostly the same rows.
//   corner: row of this lane for the first tap of the first tile; line: stride between lines of the plane
//   packed: (9, K / 16, n / 8, 32), at the first tile of this warp and at this lane; kBack: taps in reverse order
template <int K, bool kBack, int kTilesPerWarp>
__device__ inline void add_columns(const Operand* corner, int line, const OperandB* packed, int next,
                                   float (&sum)[kTilesPerWarp][2][4]) {
#pragma unroll 1
  for (int x = 0; x < 3; ++x) {
#pragma unroll
    for (int k = 0; k < K; k += 16) {
      OperandB b[3][2];
#pragma unroll
      for (int y = 0; y < 3; ++y) {
        const int tap = kBack ? 8 - 3 * y - x : 3 * y + x;
        b[y][0] = packed[(tap * (K / 16) + k / 16) * next], b[y][1] = packed[(tap * (K / 16) + k / 16) * next + 32];
      }
#pragma unroll
      for (int row = 0; row < kTilesPerWarp + 2; ++row) {
        Pair a[4];
        load_rows(a, corner + row * line + x * pitch(K) + k);
#pragma unroll
        for (int y = 0; y < 3; ++y) {
          if (row < y || row - y >= kTilesPerWarp) continue;
          add_product(sum[row - y][0], a, b[y][0]);
          add_product(sum[row - y][1], a, b[y][1]);
        }
      }
    }
  }
}

// The same for level 64, where each warp would read many weights for its single tile. Here four warps compute the same
// quarter of the output, each from a quarter of the input channels. They add up their results in the unused part of the
// planes.
template <bool kBack>
__device__ inline void add_split_channels(Shared& at, Tiles<64>& to) {
  constexpr int kSide = Level<64>::kSide, kWidth = kSide + 2;
  static_assert((kPlane - Level<64>::kOperands) * sizeof(Operand) >= 2 * 64 * 64 * sizeof(float), "two in each plane");
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int lower = warp % 2 * 2, right = warp / 2 % 2 * 4, part = warp / 4;  // first tiles; quarter of the inputs
  const Operand* corner[2];
  float sum[2][4][4] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int pixel = (lower + i) * 16 + own_row();
    const int place = (pixel / kSide * kWidth + pixel % kSide) * pitch(64) + part * 16 + own_column();
    corner[i] = (kBack ? at.dz : at.x) + place;
  }
  const OperandB* packed = reinterpret_cast<const OperandB*>(at.weights_64) + (part * 8 + right) * 32 + lane;
#pragma unroll 3
  for (int tap = 0; tap < 9; ++tap) {
    OperandB b[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) b[j] = packed[((kBack ? 8 - tap : tap) * 4 * 8 + j) * 32];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Pair a[4];
      load_rows(a, corner[i] + (tap / 3 * kWidth + tap % 3) * pitch(64));
#pragma unroll
      for (int j = 0; j < 4; ++j) add_product(sum[i][j], a, b[j]);
    }
  }
  const auto parts = [&](int k) {  // (4 tiles of pixels, 8 of channels, 32)
    return reinterpret_cast<float4*>((k / 2 ? at.dz : at.x) + Level<64>::kOperands) + k % 2 * 4 * 8 * 32;
  };
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float (&four)[4] = sum[i / 4][i % 4];
    parts(part)[((lower + i / 4) * 8 + right + i % 4) * 32 + lane] = make_float4(four[0], four[1], four[2], four[3]);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int j = i % 2;
    const float4 four = parts(i / 2)[(Level<64>::down() * 8 + Level<64>::group(j)) * 32 + lane];
    to[0][j][0] += four.x, to[0][j][1] += four.y, to[0][j][2] += four.z, to[0][j][3] += four.w;
  }
}

template <int C>
__device__ inline const OperandB* own_weights(const Operand* packed) {
  return reinterpret_cast<const OperandB*>(packed) + Level<C>::group(0) * 32 + threadIdx.x % 32;
}

// z += 3 x 3 convolution of the plane x (In channels) with the weights; with stride 2 if x is of a larger level.
template <int In, int C>
__device__ inline void convolve(Shared& at, Tiles<C>& z) {
  constexpr int kStep = In != C ? 2 : 1, kSide = Level<C>::kSide, kWidth = kSide * kStep + 2;
  constexpr int kNext = C / 8 * 32;
  if constexpr (In == 64) {
    add_split_channels<false>(at, z);
  } else {
    int rows[Level<C>::kTilesPerWarp];  // offsets for the first tap
#pragma unroll
    for (int i = 0; i < Level<C>::kTilesPerWarp; ++i) {
      const int pixel = Level<C>::template pixel<false>(i, own_row());
      rows[i] = (pixel / kSide * kStep * kWidth + pixel % kSide * kStep) * pitch(In) + own_column();
    }
    const OperandB* weights = own_weights<C>(at.weights(C));
    if constexpr (kStep == 1) {
      add_columns<In, false>(at.x + rows[0], kWidth * pitch(In), weights, kNext, z);
    } else {
#pragma unroll 1
      for (int tap = 0; tap < 9; ++tap, weights += In / 16 * kNext) {
        add_tap<In>(at.x, rows, (tap / 3 * kWidth + tap % 3) * pitch(In), weights, kNext, z);
      }
    }
  }
}

// dx += gradient of the input of that convolution, from the plane dz (C channels). If dz is of a smaller level, dx is
// spread: the pixels of one lattice are reached by the same one to four taps.
template <int In, int C>
__device__ inline void convolve_back(Shared& at, Tiles<In>& dx) {
  constexpr int kWidth = Level<C>::kSide + 2, kNext = In / 8 * 32;
  if constexpr (In == 64) {
    add_split_channels<true>(at, dx);
  } else if constexpr (In == C) {
    const int pixel = Level<C>::template pixel<false>(0, own_row());
    const int corner = (pixel / Level<C>::kSide * kWidth + pixel % Level<C>::kSide) * pitch(C) + own_column();
    add_columns<C, true>(at.dz + corner, kWidth * pitch(C), own_weights<In>(at.weights(C)), kNext, dx);
  } else {
    int rows[Level<In>::kTilesPerWarp], odd_y = 0, odd_x = 0;
#pragma unroll
    for (int i = 0; i < Level<In>::kTilesPerWarp; ++i) {
      const int pixel = Level<In>::template pixel<true>(i, own_row());
      const int y = pixel / Level<In>::kSide, x = pixel % Level<In>::kSide;
      odd_y = y % 2, odd_x = x % 2;
      rows[i] = ((y / 2 + 1) * kWidth + x / 2 + 1) * pitch(C) + own_column();
    }
    const OperandB* weights = own_weights<In>(at.weights(C));
#pragma unroll 1
    for (int tap = 0; tap < 9; ++tap, weights += C / 16 * kNext) {
      const int y = odd_y - (tap / 3 - 1), x = odd_x - (tap % 3 - 1);
      if (y % 2 != 0 || x % 2 != 0) continue;
      add_tap<C>(at.dz, rows, (y / 2 * kWidth + x / 2) * pitch(C), weights, kNext, dx);
    }
  }
}

// Gradient of the weights of that convolution -> to, as lanes hold it: (pairs, 9, 32, 4), see place_of. A warp sums 16
// output and 8 input channels over a strip of eight pixels, two lines at a time, for all nine taps; lines that are
// needed again stay in registers. The partial sums of the warps are added in at.weights_64. down: inverse of the
// prescales.
template <int In, int C>
__device__ inline void weight_products(Shared& at, float down, float* to) {
  constexpr int kStep = In != C ? 2 : 1, kSide = Level<C>::kSide, kWidth = kSide * kStep + 2;
  constexpr int kPairs = C / 16 * (In / 8), kParts = kPairs < kWarps ? kWarps / kPairs : 1;
  constexpr int kLines = Level<C>::kPixels / kParts / 8, kSize = C * In * 9;  // of a strip
  static_assert(C == 64 ? kParts == 1 : kParts * kSize == kPartialSums, "parts are not where weights are");
  static_assert(kLines % 2 == 0 && kSide % kLines == 0, "whole strips");
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tile = lane / 8, column = lane % 8;
  float* parts = reinterpret_cast<float*>(at.weights_64);
  const int part = kParts > 1 ? warp / kPairs : 0, left = part % (kSide / 8) * 8, top = part / (kSide / 8) * kLines;
#pragma unroll 1
  for (int pair = kParts > 1 ? warp % kPairs : warp; pair < kPairs; pair += kWarps) {
    const int o = pair / (In / 8) * 16, i = pair % (In / 8) * 8;
    // Addresses of this lane: in tiles of outputs, two lines of two groups; in tiles of inputs, two lines of two
    // columns, and of a third column.
    const Operand* own = at.dz + Level<C>::place((top + tile / 2) * kSide + left + column) + o + tile % 2 * 8;
    const Operand* corner = at.x + ((top + tile % 2) * kStep * kWidth + (left + column) * kStep) * pitch(In) + i;
    const auto see = [&](int line, OperandB(&taps)[3]) {
      Pair two[4], third[2];
      load_transposed(two, corner + (line * kWidth + tile / 2) * pitch(In));
      load_transposed(third, corner + (line * kWidth + 2) * pitch(In));
      taps[0] = {two[0], two[1]}, taps[1] = {two[2], two[3]}, taps[2] = {third[0], third[1]};
    };
    float sum[9][4] = {};
    OperandB seen[3][3];
    if (kStep == 1) see(0, seen[2]);
#pragma unroll 4
    for (int y = 0; y < kLines; y += 2, own += 2 * (kSide + 2) * pitch(C)) {
      Pair a[4];
      load_transposed(a, own);
#pragma unroll
      for (int k = 0; k < 3; ++k) {
        if (kStep == 2) see(y * kStep + k, seen[k]);
        if (kStep == 1) seen[0][k] = seen[2][k];
      }
      if (kStep == 1) see(y + 2, seen[2]);
#pragma unroll
      for (int k = 0; k < 3 && kStep == 1; ++k) seen[1][k] = {seen[0][k].at[1], seen[2][k].at[0]};
#pragma unroll
      for (int tap = 0; tap < 9; ++tap) add_product(sum[tap], a, seen[tap / 3][tap % 3]);
    }
    float4* out = reinterpret_cast<float4*>(kParts > 1 ? parts + part * kSize : to) + pair * 9 * 32 + lane;
#pragma unroll
    for (int tap = 0; tap < 9; ++tap) {
      const float (&four)[4] = sum[tap];
      out[tap * 32] = make_float4(four[0] * down, four[1] * down, four[2] * down, four[3] * down);
    }
  }
  if constexpr (kParts == 1) return;
  __syncthreads();
  const float4* each = reinterpret_cast<const float4*>(parts);
  for (int k = threadIdx.x; k < kSize / 4; k += kThreads) {
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
