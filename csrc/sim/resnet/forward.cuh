#pragma once

#include "sim/resnet/convolve.cuh"

// ResNet-20 with group norm, and what it says of images. A sample's output depends on that sample alone, so one block
// takes one image all the way through the net and back, and nothing but the sum over images needs all of them. The 19
// convolutions are numbered as they come: 0 is the stem, 2 b - 1 and 2 b are those of block b = 1 .. 9.

namespace secureafl::cuda {

constexpr int kBlocks = 9, kMostClasses = 256;
constexpr float kEpsilon = 1e-5f;  // of torch's group norm

struct Resnet {
  int batch, channels, classes;
  // of each convolution: where its weights begin in a vector (then the norm's weight and bias), in `packed`, and its
  // output, before the norm, in an image's memory
  int weight[kConvs], packed[kConvs], z[kConvs];
  int a[kBlocks + 1];  // the same of the input of block 1 and of the blocks' outputs
  int held, memory;    // of two gradients that go past a block; floats of an image's memory
  int norm[kConvs];    // where the gradients of a norm's weight and bias begin in an image's, behind all convolutions'
  int norms, part;     // floats of all norms' gradients; of an image's
  int head, packs, size;

  const float* vector;   // (size)
  const float* x;        // (images, channels, 32, 32)
  const int64_t* label;  // (images) of a classification
  const float* target;   // (images) of a regression: classes 0, mean squared error
  float* measures;       // (2, kConvs): lifts of the weights, and what no output of a norm exceeds
  Factor* packs_at;      // (2, packs): the weights as a warp loads them, forward and backward
  float* scratch;        // (images, memory)
  float* parts;          // (images, part): gradients; of convolutions where `packed` says, of norms, of the head
  float* result;         // (images / batch, size): mean gradients; or (images, outputs): what the net says
};

__host__ __device__ constexpr int channels_of(int conv) { return conv < 7 ? 16 : conv < 13 ? 32 : 64; }
// A warp's products take 16 input channels at a time: the image gets zeros for those that it does not have.
__host__ __device__ constexpr int inputs_of(int conv) { return conv == 0 ? 16 : channels_of(conv - 1); }
// Without those zeros, as the vector has its weights.
__host__ __device__ constexpr int real_inputs_of(int conv, int channels) {
  return conv == 0 ? channels : inputs_of(conv);
}
__host__ __device__ constexpr int weights_of(int conv) { return channels_of(conv) * inputs_of(conv) * 9; }

// All but the pointers and the number of images.
inline Resnet shape_of_resnet(int batch, int channels, int classes) {
  Resnet net{};
  net.batch = batch, net.channels = channels, net.classes = classes;
  for (int i = 0; i < kConvs; ++i) {
    const int out = channels_of(i), real = real_inputs_of(i, channels);
    const int side = 512 / out;
    net.weight[i] = net.head, net.head += out * real * 9 + 2 * out;
    net.packed[i] = net.packs, net.packs += weights_of(i);
    net.z[i] = net.memory, net.memory += out * side * side;
    if (i % 2 == 0) net.a[i / 2] = net.memory, net.memory += out * side * side;
    net.norm[i] = net.norms, net.norms += 2 * out;
  }
  net.held = net.memory, net.memory += 2 * kLargest;
  net.size = net.head + (classes ? classes : 1) * 65;
  net.part = (net.packs + net.norms + net.size - net.head + 3) / 4 * 4;
  return net;
}

// How large a convolution's weights are, and the outputs of its norm can be. Block: a convolution.
constexpr int kMeasureThreads = 1024;
static __global__ void __launch_bounds__(kMeasureThreads) measure_kernel(Resnet net) {
  __shared__ uint32_t parts[3][32];
  const int conv = blockIdx.x, out = channels_of(conv), real = real_inputs_of(conv, net.channels);
  const int first[4] = {0, out * real * 9, out * real * 9 + out, out * real * 9 + 2 * out};
  for (int kind = 0; kind < 3; ++kind) {  // weights of the convolution, weights and biases of the norm
    uint32_t most = 0;
    for (int i = first[kind] + threadIdx.x; i < first[kind + 1]; i += kMeasureThreads) {
      most = larger(most, bits_of(net.vector[net.weight[conv] + i]));
    }
    parts[kind][threadIdx.x / 32] = most_of_warp(most);
  }
  __syncthreads();
  float most[3];
  for (int kind = 0; kind < 3; ++kind) most[kind] = __uint_as_float(most_of_warp(parts[kind][threadIdx.x % 32]));
  if (threadIdx.x > 0) return;
  const float side = 512 / out, farthest = sqrtf(8 * side * side);  // in deviations, of so many numbers
  net.measures[conv] = lift_of(most[0]);
  net.measures[kConvs + conv] = farthest * most[1] + most[2];
}

// Weights (out, in, 9) of every convolution, lifted, in the order in which lanes hold them: forward b = (in, out),
// backward, for the gradient of the input, b = (out, in).
//   packs_at (2, .. conv: (9 k / 16, n / 8, 32, 4))   Block: a slice of a convolution, one way
constexpr int kSlices = 8, kPackBlocks = kConvs * 2 * kSlices;
static __global__ void pack_kernel(Resnet net) {
  const int conv = blockIdx.x / 2 % kConvs, slice = blockIdx.x / (2 * kConvs), warps = blockDim.x / 32;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const bool back = blockIdx.x % 2;
  const int in = inputs_of(conv), out = channels_of(conv), real = real_inputs_of(conv, net.channels);
  const int k = back ? out : in, n = back ? in : out;
  const float* weight = net.vector + net.weight[conv];
  const float lift = net.measures[conv];
  Right* to = reinterpret_cast<Right*>(net.packs_at + (back ? net.packs : 0) + net.packed[conv]);
  for (int tile = slice * warps + threadIdx.x / 32; tile < 9 * k / 16 * (n / 8); tile += kSlices * warps) {
    const int step = tile / (n / 8), tap = step / (k / 16), column = tile % (n / 8) * 8 + g;
    const auto factor = [&](int row) {
      const int o = back ? row : column, i = back ? column : row;
      return i < real ? weight[(o * real + i) * 9 + tap] * lift : 0;
    };
    const int row = step % (k / 16) * 16 + 2 * t;
    to[tile * 32 + lane] = {{to_pair(factor(row), factor(row + 1)), to_pair(factor(row + 8), factor(row + 9))}};
  }
}

// All that a block has at hand.
struct Image {
  const Resnet& net;
  Shared& at;
  const float* pixels;  // (channels, 32, 32)
  float* memory;        // (net.memory)
  float* part;          // (net.part)

  __device__ const Factor* packed(int conv, bool back) const {
    return net.packs_at + (back ? net.packs : 0) + net.packed[conv];
  }
  __device__ int gamma(int conv) const {
    const int real = real_inputs_of(conv, net.channels);
    return net.weight[conv] + channels_of(conv) * real * 9;
  }
  __device__ int beta(int conv) const { return gamma(conv) + channels_of(conv); }
  // The gradient that goes past a convolution's block; by turns: others may still read the last block's.
  __device__ float* past(int conv) const { return memory + net.held + (conv + 1) / 2 % 2 * kLargest; }
  // Where gradients go: (C) of a norm's weight, then of its bias; of the last layer.
  __device__ float* norm_part(int conv) const { return part + net.packs + net.norm[conv]; }
  __device__ float* head_part() const { return part + net.packs + net.norms; }
};

// A convolution's weights, on their way to where they are read: they are there after await_copies and a barrier.
__device__ inline void fetch_weights(const Image& image, int conv, bool back) {
  Factor* to = image.at.weights(channels_of(conv));
  const Factor* from = image.packed(conv, back);
  for (int i = threadIdx.x * 8; i < weights_of(conv); i += kThreads * 8) copy_ahead(to + i, from + i);
}

// z -> normalized, weighted and shifted
struct Norm {
  float mean, scale, gamma, beta;
  __device__ float normal(float z) const { return (z - mean) * scale; }
  __device__ float output(float normal) const { return normal * gamma + beta; }
};

// Of the channels of this lane's tiles: group, which of its two.
template <int C>
struct Norms {
  Norm at[2][2];
  // The weights alone: they are asked for before a convolution, the moments come with its output.
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

// With the moments that the way there has left.
template <int C>
__device__ inline Norms<C> norms_of(const Image& image, int conv) {
  Norms<C> norms(image, conv);
#pragma unroll
  for (int j = 0; j < 2; ++j) norms.set(j, image.at.moments[conv * 8 + Level<C>::group(j)]);
  return norms;
}

// As torch has it where there is NaN.
__device__ inline float relu(float value) { return value <= 0 ? 0 : value; }

// The moments of a convolution's output, which the block holds in its tiles: each warp's mean, then its squares around
// that, then all warps' together, each as many numbers (Chan et al. 1979).
template <int C>
__device__ inline void take_moments(const Image& image, int conv, const Tiles<C>& z, Norms<C>& norms) {
  constexpr int kDown = Level<C>::kDown;
  constexpr float kOwn = Level<C>::kTall * 128, kCount = kOwn * kDown;
  const bool upper = threadIdx.x & 16;
  float2* parts = image.at.groups + Level<C>::group(upper) * kDown;
  float sum[2] = {}, square[2] = {};
  for_tiles<C>([&](int i, int j, int e) { sum[j] += z[i][j][e]; });
  const float own = sum_warp(sum[0], sum[1]) / kOwn;
  const Two mean = both(own);
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
  const Two middles = both(middle), scales = both(scale);
#pragma unroll
  for (int j = 0; j < 2; ++j) norms.set(j, make_float2(middles.of[j], scales.of[j]));
}

// What goes past a block and is added to its output: the input, of level P; where that is larger, every second pixel of
// it, with zeros for new channels, half of them on each side.
template <int P, int C>
__device__ inline void load_past(const float* past, Tiles<C>& to) {
  if constexpr (P == C) {
    load_tiles<C>(past, to);
  } else {
    for_pairs<C, false>([&](int i, int j, int row, int pixel, int channel) {
      const int from = channel - (C - P) / 2, y = pixel / Level<C>::kSide * 2, x = pixel % Level<C>::kSide * 2;
      const bool there = from >= 0 && from < P;  // both of the two, for P is even
      const float* at = past + (there ? Level<P>::place_of(y * Level<P>::kSide + x, from) : 0);
      to[i][j][2 * row] = there ? at[0] : 0, to[i][j][2 * row + 1] = there ? at[1] : 0;
    });
  }
}

// The convolution `conv` of the plane x (In channels), normalized, with its block's input added where it ends one, and
// ReLU. That becomes the plane x, and a block's output in memory. Only a way back needs what is kept of it.
template <int In, int C, bool kKeep>
__device__ inline void forward(const Image& image, int conv) {
  const bool ends = conv % 2 == 0;
  Tiles<C> z = {}, past = {};
  Norms<C> norms(image, conv);
  convolve<In, C>(image.at, z);
  scale<C>(z, inverse(image.at.lift[conv] * image.at.lift_weights[conv]));
  if (In == C && ends && conv > 0) {
    const float* from = image.memory + image.net.a[conv / 2 - 1];
    if (C > 16 && inputs_of(conv - 1) != C) {
      load_past<(C > 16 ? C / 2 : C), C>(from, past);
    } else {
      load_past<C, C>(from, past);
    }
  }
  if (kKeep) store_tiles<C, false>(z, image.memory + image.net.z[conv]);
  take_moments<C>(image, conv, z, norms);
  if (conv + 1 < kConvs) fetch_weights(image, conv + 1, false);  // all have read this one's
  if (In != C) clear_plane<C>(image.at.x);                       // a frame of another size
  for_tiles<C>([&](int i, int j, int e) {
    const Norm& norm = norms(j, e);
    z[i][j][e] = relu(norm.output(norm.normal(z[i][j][e])) + past[i][j][e]);
  });
  store_plane<C>(z, image.at.lift[conv + 1], image.at.x);
  if (ends) store_tiles<C, false>(z, image.memory + image.net.a[conv / 2]);
  await_copies();
  __syncthreads();
}

// How far each plane is lifted: the image by what it holds, the others by what no output can exceed.
__device__ inline void take_lifts(const Image& image) {
  const int lane = threadIdx.x % 32;
  uint32_t most = 0;
  for (int i = threadIdx.x; i < image.net.channels * 1024; i += kThreads) most = larger(most, bits_of(image.pixels[i]));
  most = most_of_warp(most);
  if (lane == 0) image.at.most[threadIdx.x / 32] = most;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  most = most_of_warp(image.at.most[lane % kSixteen]);
  if (lane < kConvs) image.at.lift_weights[lane] = image.net.measures[lane];
  if (lane > 0) return;
  const float* bounds = image.net.measures + kConvs;
  image.at.lift[0] = lift_of(most);
  float block = 0;  // all that has been added up
  for (int conv = 0; conv < kConvs; ++conv) {
    if (conv % 2 == 0) block += bounds[conv];
    image.at.lift[conv + 1] = lift_of(conv % 2 == 0 ? block : bounds[conv]);
  }
}

// The image as the plane x.
__device__ inline void load_image(const Image& image) {
  const float lift = image.at.lift[0];
  for (int i = threadIdx.x; i < kFramed * kFramed * 8; i += kThreads) {
    const int c = i % 8 * 2, y = i / 8 / kFramed - 1, x = i / 8 % kFramed - 1;
    const bool inside = y >= 0 && y < 32 && x >= 0 && x < 32;
    const float* at = image.pixels + (c * 32 + y) * 32 + x;
    const float first = inside && c < image.net.channels ? at[0] * lift : 0;
    const float second = inside && c + 1 < image.net.channels ? at[1024] * lift : 0;
    reinterpret_cast<Pair*>(image.at.x + i / 8 * pitch(16))[i % 8] = to_pair(first, second);
  }
}

// The image through all convolutions; the last block's output is a[kBlocks].
template <bool kKeep>
__device__ inline void forward_all(const Image& image) {
  fetch_weights(image, 0, false);
  take_lifts(image);
  __syncthreads();
  load_image(image);
  await_copies();
  __syncthreads();
  // Loops: the code of each is long, and read from far away when it is new.
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
// The last layer: means over the pixels -> at.features, what the net says -> at.logits; and where the last block's ReLU
// lets through.
__device__ inline uint32_t take_outputs(const Image& image) {
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
  return open_of<64>(out);
}

// Block: an image.      what the net says of it -> result (images, outputs)
static __global__ void __launch_bounds__(kThreads, 1) predict_kernel(Resnet net) {
  Shared& at = shared_memory<Shared>();
  const int64_t i = blockIdx.x;
  const int outputs = outputs_of(net);
  const Image image{net, at, net.x + i * net.channels * 1024, net.scratch + i * net.memory, nullptr};
  forward_all<false>(image);
  take_outputs(image);
  for (int k = threadIdx.x; k < outputs; k += kThreads) net.result[i * outputs + k] = at.logits[k];
}

}  // namespace secureafl::cuda
