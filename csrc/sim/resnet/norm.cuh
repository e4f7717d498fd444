#pragma once

#include "sim/resnet/net.cuh"

namespace secureafl::cuda {

constexpr float kEpsilon = 1e-5f;  // of torch's group norm

// z -> normalized, then scaled and shifted
struct Norm {
  float mean, scale, gamma, beta;
  __device__ float normal(float z) const { return (z - mean) * scale; }
  __device__ float output(float normal) const { return normal * gamma + beta; }
};

// The norms of the channels of this lane: group, and one of its two channels.
template <int C>
struct Norms {
  Norm at[2][2];
  // Loads only the weights: before a convolution, while the moments are known after it.
  __device__ Norms(const Image& image, int conv) {
    const float *gamma = image.net.vector + image.gamma(conv), *beta = image.net.vector + image.beta(conv);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int channel = Level<C>::group(i / 2) * 8 + threadIdx.x % 4 * 2 + i % 2;
      at[i / 2][i % 2].gamma = gamma[channel], at[i / 2][i % 2].beta = beta[channel];
    }
  }
  __device__ void set(int j, float2 moments) {
#pragma unroll
    for (int e = 0; e < 2; ++e) at[j][e].mean = moments.x, at[j][e].scale = moments.y;
  }
  __device__ const Norm& operator()(int j, int e) const { return at[j][e % 2]; }
};

// With the moments that the forward pass has stored.
template <int C>
__device__ inline Norms<C> norms_of(const Image& image, int conv) {
  Norms<C> norms(image, conv);
#pragma unroll
  for (int j = 0; j < 2; ++j) norms.set(j, image.at.moments[conv * 8 + Level<C>::group(j)]);
  return norms;
}

// As in torch, NaN stays NaN.
__device__ inline float relu(float value) { return value <= 0 ? 0 : value; }

// Mean and variance of the output of a convolution, which is in the tiles of the block: per warp the mean and the
// squares around it, then combined over warps of equal size (Chan et al. 1979).
template <int C>
__device__ inline void compute_moments(const Image& image, int conv, const Tiles<C>& z, Norms<C>& norms) {
  constexpr int kDown = Level<C>::kDown;
  constexpr float kOwn = Level<C>::kTilesPerWarp * 128, kCount = kOwn * kDown;
  const bool upper = threadIdx.x & 16;
  float2* parts = image.at.groups + Level<C>::group(upper) * kDown;
  float sum[2] = {}, square[2] = {};
  for_tiles<C>([&](int i, int j, int e) { sum[j] += z[i][j][e]; });
  const float own = sum_warp(sum[0], sum[1]) / kOwn;
  const PerGroup mean = exchange_groups(own);
  for_tiles<C>([&](int i, int j, int e) {
    const float off = z[i][j][e] - mean.of[j];
    square[j] += off * off;
  });
  const float squares = sum_warp(square[0], square[1]);
  if (threadIdx.x % 16 == 0) parts[Level<C>::down()] = make_float2(own, squares);
  __syncthreads();
  const float2 part = parts[threadIdx.x % kDown];
  const float middle = sum_lanes<kDown>(part.x) / kDown, off = part.x - middle;
  const float scale = 1.0f / sqrtf(sum_lanes<kDown>(part.y + kOwn * off * off) / kCount + kEpsilon);
  if (Level<C>::down() == 0 && threadIdx.x % 16 == 0) {
    image.at.moments[conv * 8 + Level<C>::group(upper)] = make_float2(middle, scale);
  }
  const PerGroup middles = exchange_groups(middle), scales = exchange_groups(scale);
#pragma unroll
  for (int j = 0; j < 2; ++j) norms.set(j, make_float2(middles.of[j], scales.of[j]));
}

}  // namespace secureafl::cuda
