#pragma once

#include "resnet_tiles.cuh"

// ResNet-20 with group norm, and what it says of images. A sample's output depends on that sample alone, so one block
// takes one image all the way through the net and back, and nothing but the sum over images needs all of them. The 19
// convolutions are numbered as they come: 0 is the stem, 2 b - 1 and 2 b are those of block b = 1 .. 9.

namespace secureafl::cuda {

constexpr int kConvs = 19, kBlocks = 9, kMostClasses = 256;
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
  float* packs_at;       // (2, packs): the weights as a warp loads them, forward and backward
  float* scratch;        // (images, memory)
  float* parts;          // (images, part): gradients; of convolutions where `packed` says, of norms, of the head
  float* result;         // (images / batch, size): mean gradients; or (images, outputs): what the net says
};

__host__ __device__ constexpr int channels_of(int conv) { return conv < 7 ? 16 : conv < 13 ? 32 : 64; }
// A warp's products take eight input channels at a time: the image gets zeros for those that it does not have.
__host__ __device__ constexpr int inputs_of(int conv) { return conv == 0 ? 8 : channels_of(conv - 1); }

__host__ __device__ constexpr int weights_of(int conv) { return channels_of(conv) * inputs_of(conv) * 9; }

// All but the pointers and the number of images.
inline Resnet shape_of_resnet(int batch, int channels, int classes) {
  Resnet net{};
  net.batch = batch, net.channels = channels, net.classes = classes;
  for (int i = 0; i < kConvs; ++i) {
    const int in = inputs_of(i), out = channels_of(i), real = i == 0 ? channels : in;
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

// Weights (out, in, 9) of every convolution in the order in which lanes hold them: forward b = (in, out), backward, for
// the gradient of the input, b = (out, in).
//   packs_at (2, .. conv: (9 k / 8, n / 8, 32, 2))   Block: a slice of a convolution, one way
constexpr int kSlices = 8, kPackBlocks = kConvs * 2 * kSlices;
static __global__ void pack_kernel(Resnet net) {
  const int conv = blockIdx.x / 2 % kConvs, slice = blockIdx.x / (2 * kConvs), warps = blockDim.x / 32;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const bool back = blockIdx.x % 2;
  const int in = inputs_of(conv), out = channels_of(conv), real = conv == 0 ? net.channels : in;
  const int k = back ? out : in, n = back ? in : out;
  const float* weight = net.vector + net.weight[conv];
  float* to = net.packs_at + (back ? net.packs : 0) + net.packed[conv];
  for (int tile = slice * warps + threadIdx.x / 32; tile < 9 * k / 8 * (n / 8); tile += kSlices * warps) {
    const int step = tile / (n / 8), tap = step / (k / 8);
    for (int half = 0; half < 2; ++half) {
      const int row = step % (k / 8) * 8 + t + 4 * half, column = tile % (n / 8) * 8 + g;
      const int o = back ? row : column, i = back ? column : row;
      to[(tile * 32 + lane) * 2 + half] = i < real ? to_tf32(weight[(o * real + i) * 9 + tap]) : 0;
    }
  }
}

// All that a block has at hand.
struct Image {
  const Resnet& net;
  Shared& at;
  const float* pixels;  // (channels, 32, 32)
  float* memory;        // (net.memory)
  float* part;          // (net.part)

  __device__ const float* packed(int conv, bool back) const {
    return net.packs_at + (back ? net.packs : 0) + net.packed[conv];
  }
  __device__ int gamma(int conv) const {
    const int real = conv == 0 ? net.channels : inputs_of(conv);
    return net.weight[conv] + channels_of(conv) * real * 9;
  }
  __device__ int beta(int conv) const { return gamma(conv) + channels_of(conv); }
  // The gradient that goes past a convolution's block; by turns: others may still read the last block's.
  __device__ float* past(int conv) const { return memory + net.held + (conv + 1) / 2 % 2 * kLargest; }
  // Where gradients go: (C) of a norm's weight, then of its bias; of the last layer.
  __device__ float* norm_part(int conv) const { return part + net.packs + net.norm[conv]; }
  __device__ float* head_part() const { return part + net.packs + net.norms; }
};

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
    load_tiles<C, false>(past, to);
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
  convolve<In, C>(image.at.x, image.packed(conv, false), image.at.dz, z);
  if (In == C && ends) {
    const float* from = image.memory + image.net.a[conv / 2 - 1];
    if (C > 16 && inputs_of(conv - 1) != C) {
      load_past<(C > 16 ? C / 2 : C), C>(from, past);
    } else {
      load_past<C, C>(from, past);
    }
  }
  if (kKeep) store_tiles<C, false>(z, image.memory + image.net.z[conv]);
  if (conv + 1 < kConvs) expect_weights(image.packed(conv + 1, false), weights_of(conv + 1));
  take_moments<C>(image, conv, z, norms);
  if (In != C) clear_plane<C>(image.at.x);  // a frame of another size
  for_tiles<C>([&](int i, int j, int e) {
    const Norm& norm = norms(j, e);
    z[i][j][e] = relu(norm.output(norm.normal(z[i][j][e])) + past[i][j][e]);
  });
  store_plane<C, false>(z, image.at.x);
  if (ends) store_tiles<C, false>(z, image.memory + image.net.a[conv / 2]);
  __syncthreads();
}

// The image as the plane x.
__device__ inline void load_image(const Image& image) {
  for (int i = threadIdx.x; i < kFramed * kFramed * 8; i += kThreads) {
    const int c = i % 8, y = i / 8 / kFramed - 1, x = i / 8 % kFramed - 1;
    const bool inside = c < image.net.channels && y >= 0 && y < 32 && x >= 0 && x < 32;
    image.at.x[i / 8 * pitch(8) + c] = inside ? to_tf32(image.pixels[(c * 32 + y) * 32 + x]) : 0;
  }
}

// The image through all convolutions; the last block's output is a[kBlocks].
template <bool kKeep>
__device__ inline void forward_all(const Image& image) {
  load_image(image);
  __syncthreads();
  // Loops: the code of each is long, and read from far away when it is new.
  forward<8, 16, kKeep>(image, 0);
#pragma unroll 1
  for (int conv = 1; conv < 7; ++conv) forward<16, 16, kKeep>(image, conv);
  forward<16, 32, kKeep>(image, 7);
#pragma unroll 1
  for (int conv = 8; conv < 13; ++conv) forward<32, 32, kKeep>(image, conv);
  forward<32, 64, kKeep>(image, 13);
#pragma unroll 1
  for (int conv = 14; conv < kConvs; ++conv) forward<64, 64, kKeep>(image, conv);
}

// The last layer: means over the pixels -> at.features, what the net says -> at.logits. A regression has one output.
__device__ inline int outputs_of(const Resnet& net) { return net.classes ? net.classes : 1; }
// Where the last block's ReLU lets through.
__device__ inline uint32_t take_outputs(const Image& image) {
  const int outputs = outputs_of(image.net);
  Tiles<64> out;
  float sums[2][2][2] = {};
  load_tiles<64, false>(image.memory + image.net.a[kBlocks], out);
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
