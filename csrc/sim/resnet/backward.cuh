#pragma once

#include "sim/resnet/forward.cuh"

// Backward pass of ResNet-20, and the mean of the gradients of all images.

namespace secureafl::cuda {

// Backward pass of a norm. dy: gradient of its output, in tiles -> gradient of its input, in the plane dz; returns the
// prescale of dz. z: the output of the convolution; normalized in place. Calls `meanwhile` after a barrier, when all
// threads have finished the previous convolution, to start slow loads.
template <int C, typename What>
__device__ inline float norm_backward(const Image& image, int conv, Tiles<C>& z, Tiles<C>& dy, const What& meanwhile) {
  constexpr int kDown = Level<C>::kDown;
  constexpr float kCount = 8 * Level<C>::kPixels;
  Tiles<C>& normal = z;
  const Norms<C> norms = norms_of<C>(image, conv);
  uint32_t most = 0;
  float sums[2][2][2] = {};  // group; channel; sum of dy, sum of dy * normalized z
  for_tiles<C>([&](int i, int j, int e) {
    normal[i][j][e] = norms(j, e).normal(normal[i][j][e]);
    sums[j][e % 2][0] += dy[i][j][e];
    sums[j][e % 2][1] += dy[i][j][e] * normal[i][j][e];
    dy[i][j][e] *= norms(j, e).gamma * norms(j, e).scale;
    most = max_bits(most, bits_of(dy[i][j][e]));
  });
  most = warp_max(most);
  if (threadIdx.x % 32 == 0) image.at.most[threadIdx.x / 32] = most;
  const bool own_j = threadIdx.x & 16, own_e = threadIdx.x & 8, own_sum = threadIdx.x & 4;
  const float first = own_e ? norms(0, 1).gamma : norms(0, 0).gamma;
  const float gamma = own_j ? own_e ? norms(1, 1).gamma : norms(1, 0).gamma : first;
  float whole = gamma * sum_channels<C>(image.at, sums);  // over the eight channels of the group
#pragma unroll
  for (int i = 0; i < 3; ++i) whole += __shfl_xor_sync(0xffffffffu, whole, i < 2 ? 1 << i : 8);
  float2* parts = image.at.groups + Level<C>::group(own_j) * kDown;
  if (threadIdx.x % 4 == 0 && !own_e) (&parts[Level<C>::down()].x)[own_sum] = whole;
  __syncthreads();
  meanwhile();
  for (int c = threadIdx.x; c < C; c += kThreads) {
    const float2 total = total_of<C>(image.at, c);
    image.norm_part(conv)[c] = total.y, image.norm_part(conv)[C + c] = total.x;
  }
  const float2 part = parts[threadIdx.x % kDown];
  const PerGroup of_dy = exchange_groups(sum_lanes<kDown>(part.x) / kCount);    // mean of dy * gamma
  const PerGroup of_both = exchange_groups(sum_lanes<kDown>(part.y) / kCount);  // mean of dy * gamma * normalized z
  for_tiles<C>(
      [&](int i, int j, int e) { dy[i][j][e] -= norms(j, e).scale * (of_dy.of[j] + normal[i][j][e] * of_both.of[j]); });
  // Bound of the result: neither mean exceeds the largest value, and the factor of the second is at most 91 deviations.
  // So the result is at most 93 times the largest value, and the prescale leaves 2^9 of room.
  const float prescale = prescale_for(warp_max(image.at.most[threadIdx.x % kWarps])) / 64;
  store_plane<C>(dy, prescale, image.at.dz);
  return prescale;
}

// Input of convolution `conv` in memory: the input of its residual block, or the output of the first convolution of the
// block.
__device__ inline const float* input_of(const Image& image, int conv) {
  return image.memory + (conv % 2 ? image.net.a[conv / 2] : image.net.z[conv - 1]);
}
// Stores it as the plane x and returns its ReLU mask.
template <int In>
__device__ inline uint32_t store_input(const Image& image, int conv, Tiles<In>& input) {
  if (conv % 2 == 0) {
    const Norms<In> norms = norms_of<In>(image, conv - 1);
    for_tiles<In>([&](int i, int j, int e) {
      const Norm& norm = norms(j, e);
      input[i][j][e] = relu(norm.output(norm.normal(input[i][j][e])));
    });
  }
  store_plane<In>(input, image.at.prescale[conv], image.at.x);
  return relu_mask_of<In>(input);
}

// Gradient of the weights of a convolution. Needs the planes x and dz, and its weights in shared memory.
template <int In, int C>
__device__ inline void weights_backward(const Image& image, int conv, float dz_prescale) {
  wait_copies();
  __syncthreads();
  weight_products<In, C>(image.at, inverse(image.at.prescale[conv] * dz_prescale), image.part + image.net.packed[conv]);
}

// Adds the gradient of its input to dx; dx is spread if the levels differ.
template <int In, int C>
__device__ inline void input_backward(const Image& image, int conv, float dz_prescale, Tiles<In>& dx) {
  const float prescale = dz_prescale * image.at.weight_prescale[conv];
  scale<In>(dx, prescale);
  convolve_back<In, C>(image.at, dx);
  scale<In>(dx, inverse(prescale));
}

// Backward pass of all convolutions of a level, last one first. dy: gradient of the output of the last block ->
// gradient dz of the first convolution, whose input is of another level; returns the prescale of dz. relu_mask: of the
// output of the level -> of its input. All loads start some time before they are needed.
template <int C>
__device__ inline float level_backward(const Image& image, int first, int last, Tiles<C>& dy, uint32_t& relu_mask) {
  constexpr bool kRoom = C == 64;  // registers for three tiles; at.weights_64 is in use at this level
  Tiles<C> z, input;
  load_tiles<C>(image.memory + image.net.z[last], z);
#pragma unroll 1
  for (int conv = last;; --conv) {
    apply_relu_mask<C>(relu_mask, dy);
    if (conv % 2 == 0 && conv > 0) store_tiles<C, false>(dy, image.shortcut(conv));
    const float prescale = norm_backward<C>(image, conv, z, dy, [&] {
      if (conv > 0) fetch_weights(image, conv, true);
      if (conv == first) return;
      if constexpr (kRoom) {
        load_tiles<C>(input_of(image, conv), input);
      } else {
        copy_tiles<C>(input_of(image, conv), image.at.weights_64);
      }
    });
    if (conv == first) return prescale;
    const auto begin = [&] {  // initial values of the sums that become dy
      for_tiles<C>([&](int i, int j, int e) { dy[i][j][e] = 0; });
      if (conv % 2) load_tiles<C>(image.shortcut(conv), dy);
    };
    if (kRoom) begin();
    if (conv > 1) prefetch_tiles(input_of(image, conv - 1), inputs_of(conv - 1));  // the image is not stored in tiles
    if (conv % 2) prefetch_tiles(image.memory + image.net.z[conv - 1], C);
    if (!kRoom) finish_copy<C>(image.at.weights_64, input);
    relu_mask = store_input<C>(image, conv, input);
    weights_backward<C, C>(image, conv, prescale);
    if (!kRoom) begin();
    load_tiles<C>(image.memory + image.net.z[conv - 1], z);
    input_backward<C, C>(image, conv, prescale, dy);
  }
}

// Backward pass of the first convolution of a level, which halves the image: dx, the gradient of its input. At the end
// the plane dz is cleared for the larger level.
template <int In, int C>
__device__ inline void halving_backward(const Image& image, int conv, float prescale, Tiles<In>& dx,
                                        uint32_t& relu_mask) {
  const float* shortcut = image.shortcut(conv);
  float* other = image.shortcut(conv - 1);
  load_tiles<In>(input_of(image, conv), dx);
  prefetch_tiles(input_of(image, conv - 1), In);
  prefetch_tiles(image.memory + image.net.z[conv - 1], In);
  relu_mask = store_input<In>(image, conv, dx);
  clear_frame<In>(image.at.x);
  weights_backward<In, C>(image, conv, prescale);
  for_tiles<In>([&](int i, int j, int e) { dx[i][j][e] = 0; });
  input_backward<In, C>(image, conv, prescale, dx);
  for_pairs<In, true>([&](int i, int j, int row, int pixel, int channel) {
    const int y = pixel / Level<In>::kSide, x = pixel % Level<In>::kSide;
    if (y % 2 || x % 2) return;
    const float* at = shortcut + Level<C>::place_of(y / 2 * Level<C>::kSide + x / 2, channel + (C - In) / 2);
    dx[i][j][2 * row] += at[0], dx[i][j][2 * row + 1] += at[1];
  });
  store_tiles<In, true>(dx, other);
  __syncthreads();
  load_tiles<In>(other, dx);
  clear_plane<In>(image.at.dz);
}

// Gradients of the loss: of the last layer, and dout, of the output of the last block.
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

// Kernel of `resnet_gradient`. Block: an image.
static __global__ void __launch_bounds__(kThreads, 1) resnet_kernel(Resnet net) {
  Shared& at = shared_memory<Shared>();
  const int64_t i = blockIdx.x;
  const Image image{net, at, net.x + i * net.channels * 1024, net.scratch + i * net.memory, net.parts + i * net.part};
  forward_all<true>(image);

  Tiles<64> d64;
  Tiles<32> d32;
  Tiles<16> d16;
  uint32_t relu_mask = compute_outputs(image);
  head_backward(image, i, d64);
  clear_plane<64>(at.dz);
  float prescale = level_backward<64>(image, 13, 18, d64, relu_mask);
  halving_backward<32, 64>(image, 13, prescale, d32, relu_mask);
  prescale = level_backward<32>(image, 7, 12, d32, relu_mask);
  halving_backward<16, 32>(image, 7, prescale, d16, relu_mask);
  prescale = level_backward<16>(image, 0, 6, d16, relu_mask);
  load_image(image);
  weights_backward<16, 16>(image, 0, prescale);
}

// Index in a vector of element i of the gradient of an image; -1: none (padding).
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
    const int real = real_inputs_of(conv, net.channels);
    return k < real ? net.weight[conv] + (o * real + k) * 9 + tap : -1;
  }
  const int at = i - net.packs;
  if (at < net.norms) {
    const int conv = conv_at(net.norm, at), real = real_inputs_of(conv, net.channels);
    return net.weight[conv] + channels_of(conv) * real * 9 + at - net.norm[conv];
  }
  const int to = net.head + at - net.norms;
  return to < net.size ? to : -1;
}

// Mean of the gradients of all images, in order.    parts (minibatches, batch, part) -> result (minibatches, size)
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
