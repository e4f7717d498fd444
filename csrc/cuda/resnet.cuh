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

// All but the pointers and the number of images.
inline Resnet shape_of_resnet(int batch, int channels, int classes) {
  Resnet net{};
  net.batch = batch, net.channels = channels, net.classes = classes;
  for (int i = 0; i < kConvs; ++i) {
    const int in = inputs_of(i), out = channels_of(i), real = i == 0 ? channels : in;
    const int side = 512 / out;
    net.weight[i] = net.head, net.head += out * real * 9 + 2 * out;
    net.packed[i] = net.packs, net.packs += out * in * 9;
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

__device__ inline Norm norm_of(const Image& image, int conv, int channel) {
  const float2 moment = image.at.moments[conv * 8 + channel / 8];
  return {moment.x, moment.y, image.net.vector[image.gamma(conv) + channel],
          image.net.vector[image.beta(conv) + channel]};
}

// Of the channels of this lane's tiles: group, which of its two.
template <int C>
struct Norms {
  Norm at[2][2];
  __device__ Norms(const Image& image, int conv) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      at[i / 2][i % 2] = norm_of(image, conv, Level<C>::group(i / 2) * 8 + threadIdx.x % 4 * 2 + i % 2);
    }
  }
  __device__ const Norm& operator()(int j, int e) const { return at[j][e % 2]; }
};

// As torch has them where there is NaN.
__device__ inline float relu(float value) { return value <= 0 ? 0 : value; }
__device__ inline float through(float gradient, float output) { return output <= 0 ? 0 : gradient; }

// The moments of a convolution's output, which the block holds in its tiles: group by group, mean first.
template <int C>
__device__ inline void take_moments(const Image& image, int conv, const Tiles<C>& z) {
  constexpr float kCount = 8 * Level<C>::kPixels;
  float sum[2] = {}, square[2] = {};
  for_tiles<C>([&](int i, int j, int e) { sum[j] += z[i][j][e]; });
  sum_groups<C>(image.at.sums[0], sum);
  for_tiles<C>([&](int i, int j, int e) {
    const float off = z[i][j][e] - sum[j] / kCount;
    square[j] += off * off;
  });
  sum_groups<C>(image.at.sums[1], square);
  if (Level<C>::down() == 0 && threadIdx.x % 32 == 0) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      image.at.moments[conv * 8 + Level<C>::group(j)] =
          make_float2(sum[j] / kCount, 1.0f / sqrtf(square[j] / kCount + kEpsilon));
    }
  }
  __syncthreads();
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

// The convolution `conv` of the plane x (In channels), normalized, with a block's input of level P added if P > 0, and
// ReLU. That becomes the plane x, and a[to] if to >= 0. Only a way back needs what is kept of it.
template <int In, int C, int P, bool kKeep>
__device__ inline void forward(const Image& image, int conv, int past, int to) {
  float* memory = image.memory;
  Tiles<C> z = {}, other = {};
  convolve<In, C>(image.at.x, image.packed(conv, false), image.at.dz, z);
  if constexpr (P > 0) load_past<P, C>(memory + image.net.a[past], other);
  if (kKeep) store_tiles<C, false>(z, memory + image.net.z[conv]);
  take_moments<C>(image, conv, z);
  if (In != C) clear_plane<C>(image.at.x);  // a frame of another size
  const Norms<C> norms(image, conv);
  for_tiles<C>([&](int i, int j, int e) {
    const Norm& norm = norms(j, e);
    z[i][j][e] = relu(norm.output(norm.normal(z[i][j][e])) + (P > 0 ? other[i][j][e] : 0));
  });
  store_plane<C, false>(z, image.at.x);
  if (to >= 0) store_tiles<C, false>(z, memory + image.net.a[to]);
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
  forward<8, 16, 0, kKeep>(image, 0, 0, 0);
  for (int b = 1; b <= 3; ++b) {
    forward<16, 16, 0, kKeep>(image, 2 * b - 1, 0, -1);
    forward<16, 16, 16, kKeep>(image, 2 * b, b - 1, b);
  }
  forward<16, 32, 0, kKeep>(image, 7, 0, -1);
  forward<32, 32, 16, kKeep>(image, 8, 3, 4);
  for (int b = 5; b <= 6; ++b) {
    forward<32, 32, 0, kKeep>(image, 2 * b - 1, 0, -1);
    forward<32, 32, 32, kKeep>(image, 2 * b, b - 1, b);
  }
  forward<32, 64, 0, kKeep>(image, 13, 0, -1);
  forward<64, 64, 32, kKeep>(image, 14, 6, 7);
  for (int b = 8; b <= 9; ++b) {
    forward<64, 64, 0, kKeep>(image, 2 * b - 1, 0, -1);
    forward<64, 64, 64, kKeep>(image, 2 * b, b - 1, b);
  }
}

// The last layer: means over the pixels -> at.features, what the net says -> at.logits. A regression has one output.
__device__ inline int outputs_of(const Resnet& net) { return net.classes ? net.classes : 1; }
__device__ inline void take_outputs(const Image& image) {
  const int outputs = outputs_of(image.net);
  Tiles<64> out;
  float sums[2][2][2] = {};
  load_tiles<64, false>(image.memory + image.net.a[kBlocks], out);
  for_tiles<64>([&](int m, int j, int e) { sums[j][e % 2][0] += out[m][j][e]; });
  sum_channels<64>(image.at, sums);
  float *features = image.at.features, *logits = image.at.logits;
  for (int c = threadIdx.x; c < 64; c += kThreads) features[c] = image.at.totals[2 * c] / 64;
  __syncthreads();
  const float* weight = image.net.vector + image.net.head;  // (outputs, 64), then the bias
  for (int k = threadIdx.x; k < outputs; k += kThreads) {
    float sum = weight[outputs * 64 + k];
    for (int c = 0; c < 64; ++c) sum = fmaf(weight[k * 64 + c], features[c], sum);
    logits[k] = sum;
  }
  __syncthreads();
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
