#pragma once

#include "sim/resnet/convolve.cuh"
#include "sim/resnet/net.cuh"
#include "sim/resnet/norm.cuh"

namespace secureafl::cuda {

// Loads the shortcut of a residual block: its input, of level P. If that level is larger: every second pixel, with
// zeros for new channels, half of them on each side.
template <int P, int C>
__device__ inline void load_shortcut(const float* shortcut, Tiles<C>& to) {
  if constexpr (P == C) {
    load_tiles<C>(shortcut, to);
  } else {
    for_pairs<C, false>([&](int i, int j, int row, int pixel, int channel) {
      const int from = channel - (C - P) / 2, y = pixel / Level<C>::kSide * 2, x = pixel % Level<C>::kSide * 2;
      const bool there = from >= 0 && from < P;  // true for both channels or for none: P is even
      const float* at = shortcut + (there ? Level<P>::place_of(y * Level<P>::kSide + x, from) : 0);
      to[i][j][2 * row] = there ? at[0] : 0, to[i][j][2 * row + 1] = there ? at[1] : 0;
    });
  }
}

// Convolution `conv` of the plane x (In channels), norm, shortcut if it ends a residual block, ReLU. The result becomes
// the plane x; the output of a block also goes to memory. kKeep: stores what the backward pass needs.
template <int In, int C, bool kKeep>
__device__ inline void forward(const Image& image, int conv) {
  const bool ends = conv % 2 == 0;
  Tiles<C> z = {}, shortcut = {};
  Norms<C> norms(image, conv);
  convolve<In, C>(image.at, z);
  scale<C>(z, inverse(image.at.prescale[conv] * image.at.weight_prescale[conv]));
  if (In == C && ends && conv > 0) {
    const float* from = image.memory + image.net.a[conv / 2 - 1];
    if (C > 16 && inputs_of(conv - 1) != C) {
      load_shortcut<(C > 16 ? C / 2 : C), C>(from, shortcut);
    } else {
      load_shortcut<C, C>(from, shortcut);
    }
  }
  if (kKeep) store_tiles<C, false>(z, image.memory + image.net.z[conv]);
  compute_moments<C>(image, conv, z, norms);
  if (conv + 1 < kConvs) fetch_weights(image, conv + 1, false);  // all threads have read the previous weights
  if (In != C) clear_plane<C>(image.at.x);                       // the frame has another size
  for_tiles<C>([&](int i, int j, int e) {
    const Norm& norm = norms(j, e);
    z[i][j][e] = relu(norm.output(norm.normal(z[i][j][e])) + shortcut[i][j][e]);
  });
  store_plane<C>(z, image.at.prescale[conv + 1], image.at.x);
  if (ends) store_tiles<C, false>(z, image.memory + image.net.a[conv / 2]);
  wait_copies();
  __syncthreads();
}

// Prescale of each plane: of the image from its largest value, of the others from the upper bounds of the norms.
__device__ inline void compute_prescales(const Image& image) {
  const int lane = threadIdx.x % 32;
  uint32_t most = 0;
  for (int i = threadIdx.x; i < image.net.channels * 1024; i += kThreads)
    most = max_bits(most, bits_of(image.pixels[i]));
  most = warp_max(most);
  if (lane == 0) image.at.most[threadIdx.x / 32] = most;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  most = warp_max(image.at.most[lane % kWarps]);
  if (lane < kConvs) image.at.weight_prescale[lane] = image.net.measures[lane];
  if (lane > 0) return;
  const float* bounds = image.net.measures + kConvs;
  image.at.prescale[0] = prescale_for(most);
  float block = 0;  // bound of the sum of all blocks so far
  for (int conv = 0; conv < kConvs; ++conv) {
    if (conv % 2 == 0) block += bounds[conv];
    image.at.prescale[conv + 1] = prescale_for(conv % 2 == 0 ? block : bounds[conv]);
  }
}

// Stores the image as the plane x.
__device__ inline void load_image(const Image& image) {
  const float prescale = image.at.prescale[0];
  for (int i = threadIdx.x; i < kFramed * kFramed * 8; i += kThreads) {
    const int c = i % 8 * 2, y = i / 8 / kFramed - 1, x = i / 8 % kFramed - 1;
    const bool inside = y >= 0 && y < 32 && x >= 0 && x < 32;
    const float* at = image.pixels + (c * 32 + y) * 32 + x;
    const float first = inside && c < image.net.channels ? at[0] * prescale : 0;
    const float second = inside && c + 1 < image.net.channels ? at[1024] * prescale : 0;
    reinterpret_cast<Pair*>(image.at.x + i / 8 * pitch(16))[i % 8] = to_pair(first, second);
  }
}

// Runs the image through all convolutions. The output of the last block is a[kBlocks].
template <bool kKeep>
__device__ inline void forward_all(const Image& image) {
  fetch_weights(image, 0, false);
  compute_prescales(image);
  __syncthreads();
  load_image(image);
  wait_copies();
  __syncthreads();
  // Not unrolled: the code of each is long, and new code is slow to fetch.
#pragma unroll 1
  for (int conv = 0; conv < 7; ++conv) forward<16, 16, kKeep>(image, conv);
  forward<16, 32, kKeep>(image, 7);
#pragma unroll 1
  for (int conv = 8; conv < 13; ++conv) forward<32, 32, kKeep>(image, conv);
  forward<32, 64, kKeep>(image, 13);
#pragma unroll 1
  for (int conv = 14; conv < kConvs; ++conv) forward<64, 64, kKeep>(image, conv);
}

// A regression has one output.
__device__ inline int outputs_of(const Resnet& net) { return net.classes ? net.classes : 1; }
// The last layer: means over the pixels -> at.features, outputs of the net -> at.logits. Returns the ReLU mask of the
// last block.
__device__ inline uint32_t compute_outputs(const Image& image) {
  const int outputs = outputs_of(image.net);
  Tiles<64> out;
  float sums[2][2][2] = {};
  load_tiles<64>(image.memory + image.net.a[kBlocks], out);
  for_tiles<64>([&](int m, int j, int e) { sums[j][e % 2][0] += out[m][j][e]; });
  sum_channels<64>(image.at, sums);
  __syncthreads();
  float *features = image.at.features, *logits = image.at.logits;
  for (int c = threadIdx.x; c < 64; c += kThreads) features[c] = total_of<64>(image.at, c).x / 64;
  __syncthreads();
  const float* weight = image.net.vector + image.net.head;  // (outputs, 64), then the bias
  for (int k = threadIdx.x; k < outputs; k += kThreads) {
    float sum = weight[outputs * 64 + k];
    for (int c = 0; c < 64; ++c) sum = fmaf(weight[k * 64 + c], features[c], sum);
    logits[k] = sum;
  }
  __syncthreads();
  return relu_mask_of<64>(out);
}

// Kernel of `resnet_predict`. Block: an image.      outputs of the net -> result (images, outputs)
static __global__ void __launch_bounds__(kThreads, 1) predict_kernel(Resnet net) {
  Shared& at = shared_memory<Shared>();
  const int64_t i = blockIdx.x;
  const int outputs = outputs_of(net);
  const Image image{net, at, net.x + i * net.channels * 1024, net.scratch + i * net.memory, nullptr};
  forward_all<false>(image);
  compute_outputs(image);
  for (int k = threadIdx.x; k < outputs; k += kThreads) net.result[i * outputs + k] = at.logits[k];
}

}  // namespace secureafl::cuda
