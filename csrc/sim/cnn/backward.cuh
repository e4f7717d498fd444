#pragma once

#include "sim/cnn/forward.cuh"

namespace secureafl::cuda {

// Block: minibatch, a tile of da2 or of the gradients of fc1 or fc2.      dz3, dz4, a2, a3 -> da2, result
static __global__ void __launch_bounds__(kThreads) fc_backward_kernel(Cnn net, int jobs) {
  pdl_trigger();
  pdl_wait();
  const int64_t minibatch = blockIdx.x / jobs, first = minibatch * net.batch;
  int job = blockIdx.x % jobs;
  float* result = net.result + minibatch * net.size;
  const float* dz3 = net.dz3 + first * net.hidden;
  const int across = tiles(net.features);
  if (job < tiles(net.batch) * across) {  // first, because the next kernel needs it
    const Matrix d{dz3, net.batch, net.hidden, net.hidden, 1};
    const Matrix weight{net.vector + net.fc1, net.hidden, net.features, net.features, 1};
    const Tile out(job / across, job % across);
    float sum[4] = {};
    multiply(d, weight, out, 0, net.hidden, sum);
    for (int i = 0; i < 4; ++i) {
      if (out.m + i >= net.batch || out.n >= net.features) continue;
      net.da2[(first + out.m + i) * net.features + out.n] = sum[i];
    }
    return;
  }
  job -= tiles(net.batch) * across;
  const int fc1_jobs = tiles(net.hidden) * tiles(net.features + 1);
  if (job < fc1_jobs) {
    linear_gradient(dz3, net.hidden, net.a2 + first * net.features, net.features, net.batch, job, result + net.fc1);
  } else {
    linear_gradient(net.dz4 + first * net.classes, net.classes, net.a3 + first * net.hidden, net.hidden, net.batch,
                    job - fc1_jobs, result + net.fc2);
  }
}

inline int fc_backward_jobs(const Cnn& net) {
  return tiles(net.batch) * tiles(net.features) + tiles(net.hidden) * tiles(net.features + 1) +
         tiles(net.classes) * tiles(net.hidden + 1);
}

// Offset of the maximum of a pooling window, in rows of `row` floats. across: windows per row.
__device__ inline int position(int window, int across, uint8_t from, int row) {
  return (window / across * 2 + from / 2) * row + window % across * 2 + from % 2;
}

// Block: image, channels of the first convolution.      da2 -> da1 in shared memory -> dconv1
__device__ inline void conv1_gradient(const Cnn& net, int64_t image, int first, float* shared) {
  const int windows = net.h2 * net.w2, rows = 2 * net.h2 + 4, plane = rows * kRow;
  const int high = 2 * net.h2 + 2, wide = 2 * net.w2 + 2, pixels = high * wide;  // pixels of a1 in a window
  const int here = min(kGroup1, kConv1 - first);
  float* weights = shared;                            // (kGroup1, kConv2, kSpread): taps in reverse order
  float* dz2 = weights + kGroup1 * kConv2 * kSpread;  // (kConv2, rows, kRow): padded with two zeros on every side
  float* da1 = dz2 + kConv2 * plane;                  // (kParts, kGroup1, high, wide)
  float* x = da1 + kParts * kGroup1 * pixels;         // (channels, height, kImageRow)
#pragma unroll 4
  for (int i = threadIdx.x; i < kConv2 * here * kTaps; i += kThreads) {
    const int o = i / (here * kTaps), c = i / kTaps % here, e = i % kTaps;
    weights[(c * kConv2 + o) * kSpread + kTaps - 1 - e] = net.vector[net.conv2 + (o * kConv1 + first + c) * kTaps + e];
  }
  for (int i = threadIdx.x; i < kConv2 * plane / 4; i += kThreads) {
    reinterpret_cast<float4*>(dz2)[i] = make_float4(0, 0, 0, 0);
  }
  load_image(net, image, x);
  __syncthreads();
  pdl_wait();
  for (int i = threadIdx.x; i < net.features; i += kThreads) {
    const uint8_t from = net.from2[image * net.features + i];
    if (from == kDead) continue;
    dz2[i / windows * plane + position(i % windows, net.w2, from, kRow) + 2 * kRow + 2] =
        net.da2[image * net.features + i];
  }
  __syncthreads();

  constexpr int kOut = 4, kPart = (kConv2 + kParts - 1) / kParts;
  const int patches = pixels / 4;
  for (int item = threadIdx.x; item < patches * (kGroup1 / kOut) * kParts; item += kThreads) {
    const int patch = item % patches, o = item / patches % (kGroup1 / kOut) * kOut;
    const int part = item / patches / (kGroup1 / kOut), from = part * kPart;
    const int corner_y = patch / (net.w2 + 1) * 2, corner_x = patch % (net.w2 + 1) * 2;
    float sum[kOut][4] = {};
    convolve<kRow>(dz2 + from * plane + corner_y * kRow + corner_x, plane, weights + (o * kConv2 + from) * kSpread,
                   kConv2 * kSpread, min(kPart, kConv2 - from), sum);
#pragma unroll
    for (int i = 0; i < kOut; ++i) {
      float* to = da1 + (part * kGroup1 + o + i) * pixels + corner_y * wide + corner_x;
      to[0] = sum[i][0], to[1] = sum[i][1], to[wide] = sum[i][2], to[wide + 1] = sum[i][3];
    }
  }
  __syncthreads();

  const int channel = threadIdx.x / 32, lane = threadIdx.x % 32;  // one warp per channel
  if (channel >= here) return;
  const uint8_t* from1 = net.from1 + (image * kConv1 + first + channel) * net.h1 * net.w1;
  float* result = net.dconv1 + image * net.conv2;
  for (int c = 0; c < net.channels; ++c) {
    float sum[kTaps + 1] = {};  // the last one is for the bias
    for (int i = lane; i < pixels; i += 32) {
      const uint8_t from = from1[i / wide * net.w1 + i % wide];
      if (from == kDead) continue;
      float d = 0;
#pragma unroll
      for (int part = 0; part < kParts; ++part) d += da1[(part * kGroup1 + channel) * pixels + i];
      const float* at = x + c * net.height * kImageRow + position(i, wide, from, kImageRow);
#pragma unroll
      for (int e = 0; e < kTaps; ++e) sum[e] = fmaf(d, at[e / 3 * kImageRow + e % 3], sum[e]);
      sum[kTaps] += d;
    }
#pragma unroll
    for (int e = 0; e <= kTaps; ++e) {
      sum[e] = warp_sum(sum[e]);
      const int weight = ((first + channel) * net.channels + c) * kTaps + e;
      if (lane == 0) result[e < kTaps ? weight : net.conv1_bias + first + channel] = sum[e];
    }
  }
}

// Block: minibatch, chunk of its images, channels of the second convolution, a warp each.      da2, a1 -> dconv2
__device__ inline void conv2_gradient(const Cnn& net, int job, float* shared) {
  const int group = job % kGroupsW, chunk = job / kGroupsW % net.chunks, windows = net.h2 * net.w2;
  const int64_t minibatch = job / kGroupsW / net.chunks;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = group * kGroupW, channel = first + warp;
  const int here = min(kGroupW, kConv2 - first), pairs = (net.w1 + 1) / 2;
  const int plane = net.h1 * kRow + 1;   // odd: the planes of the lanes start in different banks
  float* a1 = shared;                    // (kConv1 + 1, plane): the last plane is all ones, for the bias
  float* d = a1 + (kConv1 + 1) * plane;  // (kGroupW, windows)
  int* at = reinterpret_cast<int*>(d + kGroupW * windows);  // (kGroupW, windows): offset of the maximum, -1 if dead
  for (int i = threadIdx.x; i < plane; i += kThreads) a1[kConv1 * plane + i] = 1;
  pdl_wait();
  const float* own = a1 + min(lane, kConv1) * plane;
  float sum[kTaps] = {};
  for (int b = chunk * kChunk; b < min(chunk * kChunk + kChunk, net.batch); ++b) {
    const int64_t image = minibatch * net.batch + b;
    const float2* from = reinterpret_cast<const float2*>(net.a1 + image * kConv1 * net.h1 * kRow);
#pragma unroll 4
    for (int i = threadIdx.x; i < kConv1 * net.h1 * pairs; i += kThreads) {
      const int row = i / pairs, pair = i % pairs;
      const float2 two = from[row * (kRow / 2) + pair];
      float* to = a1 + row / net.h1 * plane + row % net.h1 * kRow + 2 * pair;
      to[0] = two.x, to[1] = two.y;
    }
    for (int i = threadIdx.x; i < here * windows; i += kThreads) {
      const int64_t feature = image * net.features + first * windows + i;
      const uint8_t from = net.from2[feature];
      at[i] = from == kDead ? -1 : position(i % windows, net.w2, from, kRow);
      d[i] = net.da2[feature];
    }
    __syncthreads();
    for (int i = warp * windows; warp < here && i < (warp + 1) * windows; ++i) {
      if (at[i] < 0) continue;
      const float value = d[i];
      const float* patch = own + at[i];
#pragma unroll
      for (int e = 0; e < kTaps; ++e) sum[e] = fmaf(value, patch[e / 3 * kRow + e % 3], sum[e]);
    }
    __syncthreads();
  }
  if (warp >= here || lane > kConv1) return;
  float* result = net.dconv2 + (minibatch * net.chunks + chunk) * kConv2Size;
  if (lane == kConv1) {
    result[kConv2 * kConv1 * kTaps + channel] = sum[0];
    return;
  }
#pragma unroll
  for (int e = 0; e < kTaps; ++e) result[(channel * kConv1 + lane) * kTaps + e] = sum[e];
}

static __global__ void __launch_bounds__(kThreads) conv_backward_kernel(Cnn net) {
  extern __shared__ float4 shared[];
  pdl_trigger();
  float* memory = reinterpret_cast<float*>(shared);
  const unsigned longer = net.images * kGroups1;  // the longer jobs start first
  if (blockIdx.x < longer) {
    conv1_gradient(net, blockIdx.x / kGroups1, blockIdx.x % kGroups1 * kGroup1, memory);
  } else {
    conv2_gradient(net, static_cast<int>(blockIdx.x - longer), memory);
  }
}

// Block: minibatch, kThreads parameters of the convolutions.      dconv1, dconv2 -> result
static __global__ void __launch_bounds__(kThreads) sum_kernel(Cnn net) {
  pdl_wait();
  const int count = net.conv2 + kConv2Size, blocks = (count + kThreads - 1) / kThreads;
  const int64_t minibatch = blockIdx.x / blocks;
  const int i = blockIdx.x % blocks * kThreads + threadIdx.x;
  if (i >= count) return;
  const bool first = i < net.conv2;
  const int rows = first ? net.batch : net.chunks, row = first ? net.conv2 : kConv2Size;
  const float* parts = (first ? net.dconv1 + i : net.dconv2 + i - net.conv2) + minibatch * rows * row;
  float sum = 0;
#pragma unroll 8
  for (int r = 0; r < rows; ++r) sum += parts[r * row];
  net.result[minibatch * net.size + i] = sum;
}

}  // namespace secureafl::cuda
