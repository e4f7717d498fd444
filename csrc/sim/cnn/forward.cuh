#pragma once

#include "common/launch.cuh"
#include "sim/cnn/tiles.cuh"

// Gradient of the CNN of the paper, in seven kernels with programmatic dependent launch: each kernel first reads data
// that no kernel writes (parameters, pixels), then waits for the previous kernel. All sums have a fixed order that does
// not depend on the other minibatches. This file: the net, and the forward pass up to the loss.

namespace secureafl::cuda {

constexpr int kConv1 = 30, kConv2 = 50;  // output channels
constexpr int kConv2Size = kConv2 * kConv1 * kTaps + kConv2;
// Row stride in shared memory, in floats; even, for float2 loads. Two rows of kRow are 12 banks apart: the windows that
// a half warp reads (five or six per row) are in different banks.
constexpr int kImageRow = 34, kRow = 22;
constexpr int kSplit = 64;                 // features summed by one block of fc1
constexpr int kGroup1 = 8, kGroups1 = 4;   // conv1: channels per block; number of blocks
constexpr int kGroup2 = 14, kGroups2 = 4;  // conv2, forward: the same
constexpr int kGroupW = 8, kGroupsW = 7;   // conv2, weight gradient: the same, one warp per channel
constexpr int kChunk = 2;                  // images per block in the weight gradient of conv2
constexpr int kParts = 3;                  // parts of the sum over channels in the input gradient of conv2
constexpr int kConvThreads = 192;

struct Cnn {
  // images = minibatches * batch, each (channels, height, width). After pooling: (h1, w1), then (h2, w2).
  int64_t minibatches, images;
  int batch, channels, height, width, h1, w1, h2, w2, features, hidden, classes;
  int splits, chunks;  // of the features in fc1; of the batch in the weight gradient of conv2
  // offsets of the parameters in a vector; total size
  int conv1_bias, conv2, conv2_bias, fc1, fc1_bias, fc2, fc2_bias, size;

  const float* vector;  // (size)
  const float* x;       // (images, channels, height, width)
  const int64_t* y;     // (images)
  float* result;        // (minibatches, size)

  float* a1;       // (images, kConv1, h1, kRow): pooled; only w1 floats of each row are used
  float* a2;       // (images, features), features = (kConv2, h2, w2)
  float* z3;       // (splits, images, hidden): partial sums of fc1
  float* a3;       // (images, hidden)
  float* dz4;      // (images, classes): d loss / d logits
  float* dz3;      // (images, hidden)
  float* da2;      // (images, features)
  float* dconv1;   // (images, conv2): gradients of weight and bias, in the order of a vector
  float* dconv2;   // (minibatches, chunks, kConv2Size): the same
  uint8_t* from1;  // (images, kConv1, h1, w1): position of the maximum in its window (0 .. 3), or kDead
  uint8_t* from2;  // (images, features)
};

// x (channels, height, width) of one image -> shared (channels, height, kImageRow)
__device__ inline void load_image(const Cnn& net, int64_t image, float* pixels) {
  const int count = net.channels * net.height * net.width;
  const float* from = net.x + image * count;
#pragma unroll 4
  for (int i = threadIdx.x; i < count; i += blockDim.x) pixels[i / net.width * kImageRow + i % net.width] = from[i];
}

// Block: image, channels.      x -> a1, from1
static __global__ void __launch_bounds__(kConvThreads) conv1_kernel(Cnn net) {
  extern __shared__ float4 shared[];
  pdl_trigger();
  const int64_t image = blockIdx.x / kGroups1;
  const int first = blockIdx.x % kGroups1 * kGroup1, windows = net.h1 * net.w1, taps = net.channels * kTaps;
  float* weights = reinterpret_cast<float*>(shared);           // (kGroup1, channels, kSpread)
  float* pixels = weights + kGroup1 * net.channels * kSpread;  // (channels, height, kImageRow)
  const int here = min(kGroup1, kConv1 - first);
  spread_weights(net.vector + first * taps, here * taps, weights);
  load_image(net, image, pixels);
  __syncthreads();

  constexpr int kOut = 4;
  for (int item = threadIdx.x; item < windows * (kGroup1 / kOut); item += kConvThreads) {
    const int window = item % windows, o = item / windows * kOut, y = window / net.w1, x = window % net.w1;
    float sum[kOut][4];
    for (int i = 0; i < kOut; ++i) fill(sum[i], o + i < here ? net.vector[net.conv1_bias + first + o + i] : 0);
    convolve<kImageRow>(pixels + 2 * y * kImageRow + 2 * x, net.height * kImageRow,
                        weights + o * net.channels * kSpread, net.channels * kSpread, net.channels, sum);
#pragma unroll
    for (int i = 0; i < kOut; ++i) {
      if (o + i >= here) continue;
      const int64_t plane = image * kConv1 + first + o + i;
      net.from1[plane * windows + window] = pool(sum[i], net.a1[(plane * net.h1 + y) * kRow + x]);
    }
  }
  const int spare = kRow - net.w1;  // unused floats of each row, set to zero: later kernels load whole rows
  float* rows = net.a1 + (image * kConv1 + first) * net.h1 * kRow;
  for (int i = threadIdx.x; i < here * net.h1 * spare; i += kConvThreads) {
    rows[i / spare * kRow + net.w1 + i % spare] = 0;
  }
}

// Block: image, channels.      a1 -> a2, from2
static __global__ void __launch_bounds__(kConvThreads) conv2_kernel(Cnn net) {
  extern __shared__ float4 shared[];
  pdl_trigger();
  const int64_t image = blockIdx.x / kGroups2;
  const int first = blockIdx.x % kGroups2 * kGroup2, windows = net.h2 * net.w2, plane = net.h1 * kRow;
  const int here = min(kGroup2, kConv2 - first);
  float* weights = reinterpret_cast<float*>(shared);    // (kGroup2, kConv1, kSpread)
  float* input = weights + kGroup2 * kConv1 * kSpread;  // (kConv1, h1, kRow)
  spread_weights(net.vector + net.conv2 + first * kConv1 * kTaps, here * kConv1 * kTaps, weights);
  pdl_wait();
  const float4* from = reinterpret_cast<const float4*>(net.a1 + image * kConv1 * plane);
#pragma unroll 6
  for (int i = threadIdx.x; i < kConv1 * plane / 4; i += kConvThreads) reinterpret_cast<float4*>(input)[i] = from[i];
  __syncthreads();

  constexpr int kOut = 2;
  for (int item = threadIdx.x; item < windows * (here / kOut); item += kConvThreads) {
    const int window = item % windows, o = item / windows * kOut, y = window / net.w2, x = window % net.w2;
    float sum[kOut][4];
    for (int i = 0; i < kOut; ++i) fill(sum[i], net.vector[net.conv2_bias + first + o + i]);
    convolve<kRow>(input + 2 * y * kRow + 2 * x, plane, weights + o * kConv1 * kSpread, kConv1 * kSpread, kConv1, sum);
#pragma unroll
    for (int i = 0; i < kOut; ++i) {
      const int64_t at = image * net.features + (first + o + i) * windows + window;
      net.from2[at] = pool(sum[i], net.a2[at]);
    }
  }
}

// Block: minibatch, split of the features, tile of (batch, hidden).      a2 -> z3
static __global__ void __launch_bounds__(kThreads) fc1_kernel(Cnn net) {
  pdl_trigger();
  pdl_wait();
  const int across = tiles(net.hidden), each = tiles(net.batch) * across, jobs = net.splits * each;
  const int64_t minibatch = blockIdx.x / jobs, first = minibatch * net.batch;
  const int split = blockIdx.x % jobs / each, tile = blockIdx.x % each, begin = split * kSplit;
  const Matrix a2{net.a2 + first * net.features, net.batch, net.features, net.features, 1};
  const Matrix weight{net.vector + net.fc1, net.features, net.hidden, 1, net.features};  // transposed
  const Tile out(tile / across, tile % across);
  float sum[4] = {};
  multiply(a2, weight, out, begin, min(begin + kSplit, net.features), sum);
  for (int i = 0; i < 4; ++i) {
    if (out.m + i >= net.batch || out.n >= net.hidden) continue;
    net.z3[(split * net.images + first + out.m + i) * net.hidden + out.n] = sum[i];
  }
}

// Block: image.      z3 -> a3, logits, softmax -> dz4, dz3
static __global__ void __launch_bounds__(kThreads) head_kernel(Cnn net) {
  extern __shared__ float4 shared[];
  pdl_trigger();
  pdl_wait();
  const int64_t image = blockIdx.x;
  const int lane = threadIdx.x % 32;
  float* a3 = reinterpret_cast<float*>(shared);  // (hidden)
  float* z4 = a3 + net.hidden;                   // (classes): logits
  float* dz4 = z4 + net.classes;                 // (classes)
  const float* weight = net.vector + net.fc2;    // (classes, hidden)
  for (int j = threadIdx.x; j < net.hidden; j += kThreads) {
    float sum = net.vector[net.fc1_bias + j];
#pragma unroll 8
    for (int s = 0; s < net.splits; ++s) sum += net.z3[(s * net.images + image) * net.hidden + j];
    net.a3[image * net.hidden + j] = a3[j] = sum <= 0 ? 0 : sum;  // keeps NaN
  }
  __syncthreads();
  for (int c = threadIdx.x / 32; c < net.classes; c += kThreads / 32) {
    float sum = 0;
    for (int j = lane; j < net.hidden; j += 32) sum = fmaf(a3[j], weight[c * net.hidden + j], sum);
    sum = warp_sum(sum);
    if (lane == 0) z4[c] = sum + net.vector[net.fc2_bias + c];
  }
  __syncthreads();
  float most = z4[0], total = 0;
  for (int c = 1; c < net.classes; ++c) most = fmaxf(most, z4[c]);
  for (int c = 0; c < net.classes; ++c) total += expf(z4[c] - most);
  // A label out of range matches no class. The host does not check labels; no address depends on them.
  for (int c = threadIdx.x; c < net.classes; c += kThreads) {
    dz4[c] = (expf(z4[c] - most) / total - (c == net.y[image] ? 1 : 0)) / net.batch;
    net.dz4[image * net.classes + c] = dz4[c];
  }
  __syncthreads();
  for (int j = threadIdx.x; j < net.hidden; j += kThreads) {
    float sum = 0;
#pragma unroll 4
    for (int c = 0; c < net.classes; ++c) sum = fmaf(dz4[c], weight[c * net.hidden + j], sum);
    net.dz3[image * net.hidden + j] = a3[j] <= 0 ? 0 : sum;
  }
}

}  // namespace secureafl::cuda
