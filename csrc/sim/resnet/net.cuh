#pragma once

#include <cstdint>

#include "sim/resnet/tiles.cuh"

// ResNet-20 with group norm, and what it says of images. A sample's output depends on that sample alone, so one block
// takes one image all the way through the net and back, and nothing but the sum over images needs all of them. The 19
// convolutions are numbered as they come: 0 is the stem, 2 b - 1 and 2 b are those of block b = 1 .. 9.

namespace secureafl::cuda {

constexpr int kBlocks = 9, kMaxClasses = 256;

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
  Operand* packs_at;     // (2, packs): the weights as a warp loads them, forward and backward
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

// All that a block has at hand.
struct Image {
  const Resnet& net;
  Shared& at;
  const float* pixels;  // (channels, 32, 32)
  float* memory;        // (net.memory)
  float* part;          // (net.part)

  __device__ const Operand* packed(int conv, bool back) const {
    return net.packs_at + (back ? net.packs : 0) + net.packed[conv];
  }
  __device__ int gamma(int conv) const {
    const int real = real_inputs_of(conv, net.channels);
    return net.weight[conv] + channels_of(conv) * real * 9;
  }
  __device__ int beta(int conv) const { return gamma(conv) + channels_of(conv); }
  // The gradient that goes past a convolution's block; by turns: others may still read the last block's.
  __device__ float* shortcut(int conv) const { return memory + net.held + (conv + 1) / 2 % 2 * kLargest; }
  // Where gradients go: (C) of a norm's weight, then of its bias; of the last layer.
  __device__ float* norm_part(int conv) const { return part + net.packs + net.norm[conv]; }
  __device__ float* head_part() const { return part + net.packs + net.norms; }
};

// A convolution's weights, on their way to where they are read: they are there after wait_copies and a barrier.
__device__ inline void fetch_weights(const Image& image, int conv, bool back) {
  Operand* to = image.at.weights(channels_of(conv));
  const Operand* from = image.packed(conv, back);
  for (int i = threadIdx.x * 8; i < weights_of(conv); i += kThreads * 8) copy_async(to + i, from + i);
}

}  // namespace secureafl::cuda
