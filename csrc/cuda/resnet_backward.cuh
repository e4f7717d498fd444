#pragma once

#include "resnet.cuh"

// ResNet-20's way back, and the mean of the images' gradients.

namespace secureafl::cuda {

// What a convolution gave, normalized.
template <int C, bool kSpread>
__device__ inline void load_normal(const Image& image, int conv, const Norms<C>& norms, Tiles<C>& normal) {
  load_tiles<C, kSpread>(image.memory + image.net.z[conv], normal);
  for_tiles<C>([&](int i, int j, int e) { normal[i][j][e] = norms(j, e).normal(normal[i][j][e]); });
}

// dy: the gradient of a norm's output, in tiles -> that of the convolution's, in the plane dz.
template <int C, bool kSpread>
__device__ inline void norm_backward(const Image& image, int conv, const Norms<C>& norms, const Tiles<C>& normal,
                                     Tiles<C>& dy) {
  constexpr float kCount = 8 * Level<C>::kPixels;
  float sums[2][2][2] = {};  // group, channel of this lane's two; of dy, and of dy times what was normalized
  for_tiles<C>([&](int i, int j, int e) {
    sums[j][e % 2][0] += dy[i][j][e];
    sums[j][e % 2][1] += dy[i][j][e] * normal[i][j][e];
  });
  sum_channels<C>(image.at, sums);
  const float* total = image.at.totals;  // (C, 2)
  const float* gamma = image.net.vector + image.gamma(conv);
  for (int c = threadIdx.x; c < C; c += kThreads) {
    image.norm_part(conv)[c] = total[2 * c + 1];
    image.norm_part(conv)[C + c] = total[2 * c];
  }
  float means[2][2] = {};  // group; of dy gamma, and of dy gamma times what was normalized
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int c = Level<C>::group(i / 8) * 8 + i % 8;
    means[i / 8][0] += gamma[c] * total[2 * c] / kCount;
    means[i / 8][1] += gamma[c] * total[2 * c + 1] / kCount;
  }
  for_tiles<C>([&](int i, int j, int e) {
    const Norm& norm = norms(j, e);
    dy[i][j][e] = norm.scale * (norm.gamma * dy[i][j][e] - means[j][0] - normal[i][j][e] * means[j][1]);
  });
  store_plane<C, kSpread>(dy, image.at.dz);
}

// The gradient of a convolution's weights, from the planes x and dz. Ends with x free for others.
template <int In, int C>
__device__ inline void weight_backward(const Image& image, int conv) {
  weight_products<In, C>(image.at.x, image.at.dz, image.part + image.net.packed[conv]);
}

// The same, and the gradient of its input, which stands in tiles and becomes that.
template <int In, int C>
__device__ inline void conv_backward(const Image& image, int conv, Tiles<In>& input) {
  store_plane<In, false>(input, image.at.x);
  clear_frame<In>(image.at.x);
  __syncthreads();
  weight_backward<In, C>(image, conv);
  for_tiles<In>([&](int i, int j, int e) { input[i][j][e] = 0; });
  convolve_back<In, C>(image.at.dz, image.packed(conv, true), image.at.x, input);
}

// Block b, of level C, whose input is of level In: dout, the gradient of its output, in tiles that are spread or not,
// -> that of its input.
template <int In, int C, bool kSpread>
__device__ inline void block_backward(const Image& image, int b, Tiles<C>& dout, Tiles<In>& din) {
  const int first = 2 * b - 1, second = 2 * b;
  float* memory = image.memory;
  float* past = memory + image.net.held + b % 2 * kLargest;  // by turns: others may still read the last one's
  {
    Tiles<C> normal;
    load_tiles<C, kSpread>(memory + image.net.a[b], normal);
    for_tiles<C>([&](int i, int j, int e) { dout[i][j][e] = through(dout[i][j][e], normal[i][j][e]); });
    store_tiles<C, kSpread>(dout, past);
    const Norms<C> norms(image, second);
    load_normal<C, kSpread>(image, second, norms, normal);
    norm_backward<C, kSpread>(image, second, norms, normal, dout);
  }
  {
    Tiles<C> inner, normal;
    const Norms<C> norms(image, first);
    load_normal<C, false>(image, first, norms, normal);
    for_tiles<C>([&](int i, int j, int e) { inner[i][j][e] = relu(norms(j, e).output(normal[i][j][e])); });
    conv_backward<C, C>(image, second, inner);
    for_tiles<C>(
        [&](int i, int j, int e) { inner[i][j][e] = through(inner[i][j][e], norms(j, e).output(normal[i][j][e])); });
    norm_backward<C, false>(image, first, norms, normal, inner);
  }
  load_tiles<In, false>(memory + image.net.a[b - 1], din);
  conv_backward<In, C>(image, first, din);
  if constexpr (In == C) {
    Tiles<C> other;
    load_tiles<C, false>(past, other);
    for_tiles<C>([&](int i, int j, int e) { din[i][j][e] += other[i][j][e]; });
  } else {
    for_pairs<In, true>([&](int i, int j, int row, int pixel, int channel) {
      const int y = pixel / Level<In>::kSide, x = pixel % Level<In>::kSide;
      if (y % 2 || x % 2) return;
      const float* at = past + Level<C>::place_of(y / 2 * Level<C>::kSide + x / 2, channel + (C - In) / 2);
      din[i][j][2 * row] += at[0], din[i][j][2 * row + 1] += at[1];
    });
  }
}

// The loss's gradient, from these on: of the last layer, and dout, of the last block's output.
__device__ inline void head_backward(const Image& image, int64_t i, Tiles<64>& dout) {
  const Resnet& net = image.net;
  const int outputs = outputs_of(net);
  float *features = image.at.features, *logits = image.at.logits;
  float most = logits[0], whole = 0;
  for (int k = 1; k < outputs; ++k) most = logits[k] > most ? logits[k] : most;
  for (int k = 0; k < outputs; ++k) whole += expf(logits[k] - most);
  __syncthreads();
  for (int k = threadIdx.x; k < outputs; k += kThreads) {
    const float wanted = net.classes ? k == net.label[i] : net.target[i];
    logits[k] = net.classes ? expf(logits[k] - most) / whole - wanted : 2 * (logits[k] - wanted);
    image.head_part()[outputs * 64 + k] = logits[k];
  }
  __syncthreads();
  for (int k = threadIdx.x; k < outputs * 64; k += kThreads) {
    image.head_part()[k] = logits[k / 64] * features[k % 64];
  }
  __syncthreads();
  const float* weight = net.vector + net.head;  // (outputs, 64)
  for (int c = threadIdx.x; c < 64; c += kThreads) {
    float sum = 0;
    for (int k = 0; k < outputs; ++k) sum = fmaf(logits[k], weight[k * 64 + c], sum);
    features[c] = sum / 64;
  }
  __syncthreads();
  for_pairs<64, false>([&](int m, int j, int row, int, int channel) {
    dout[m][j][2 * row] = features[channel], dout[m][j][2 * row + 1] = features[channel + 1];
  });
}

// Block: an image.
static __global__ void __launch_bounds__(kThreads, 1) resnet_kernel(Resnet net) {
  Shared& at = shared_memory<Shared>();
  const int64_t i = blockIdx.x;
  const Image image{net, at, net.x + i * net.channels * 1024, net.scratch + i * net.memory, net.parts + i * net.part};
  forward_all<true>(image);

  Tiles<64> d64;
  Tiles<32> d32;
  Tiles<16> d16;
  take_outputs(image);
  head_backward(image, i, d64);
  clear_plane<64>(at.dz);
  for (int b = 9; b >= 8; --b) block_backward<64, 64, false>(image, b, d64, d64);
  block_backward<32, 64, false>(image, 7, d64, d32);
  __syncthreads();
  clear_plane<32>(at.dz);
  block_backward<32, 32, true>(image, 6, d32, d32);
  block_backward<32, 32, false>(image, 5, d32, d32);
  block_backward<16, 32, false>(image, 4, d32, d16);
  __syncthreads();
  clear_plane<16>(at.dz);
  block_backward<16, 16, true>(image, 3, d16, d16);
  for (int b = 2; b >= 1; --b) block_backward<16, 16, false>(image, b, d16, d16);

  const Norms<16> norms(image, 0);
  Tiles<16> normal;
  load_normal<16, false>(image, 0, norms, normal);
  for_tiles<16>(
      [&](int k, int j, int e) { d16[k][j][e] = through(d16[k][j][e], norms(j, e).output(normal[k][j][e])); });
  norm_backward<16, false>(image, 0, norms, normal, d16);
  load_image(image);
  __syncthreads();
  weight_backward<8, 16>(image, 0);
}

// Where a number of an image's gradient belongs in a vector; -1: nowhere.
__device__ inline int place_of(const Resnet& net, int i) {
  const auto conv_at = [](const int* first, int at) {
    int conv = kConvs - 1;
    while (first[conv] > at) --conv;
    return conv;
  };
  if (i < net.packs) {  // (pairs, 9, 32, 4)
    const int conv = conv_at(net.packed, i), within = i - net.packed[conv], in = inputs_of(conv);
    const int e = within % 4, lane = within / 4 % 32, tap = within / 128 % 9, pair = within / 1152;
    const int o = pair / (in / 8) * 16 + lane / 4 + e / 2 * 8, k = pair % (in / 8) * 8 + lane % 4 * 2 + e % 2;
    const int real = conv == 0 ? net.channels : in;
    return k < real ? net.weight[conv] + (o * real + k) * 9 + tap : -1;
  }
  const int at = i - net.packs;
  if (at < net.norms) {
    const int conv = conv_at(net.norm, at), real = conv == 0 ? net.channels : inputs_of(conv);
    return net.weight[conv] + channels_of(conv) * real * 9 + at - net.norm[conv];
  }
  const int to = net.head + at - net.norms;
  return to < net.size ? to : -1;
}

// The mean of the images' gradients, in their order.    parts (minibatches, batch, part) -> result (minibatches, size)
static __global__ void __launch_bounds__(256) mean_kernel(Resnet net) {
  const int64_t blocks = (net.part + 255) / 256, minibatch = blockIdx.x / blocks;
  const int i = static_cast<int>(blockIdx.x % blocks) * 256 + threadIdx.x;
  const int to = i < net.part ? place_of(net, i) : -1;
  if (to < 0) return;
  const float* from = net.parts + minibatch * net.batch * net.part + i;
  float sum = 0;
#pragma unroll 8
  for (int k = 0; k < net.batch; ++k) sum += from[k * static_cast<int64_t>(net.part)];
  net.result[minibatch * net.size + to] = sum / static_cast<float>(net.batch);
}

}  // namespace secureafl::cuda
