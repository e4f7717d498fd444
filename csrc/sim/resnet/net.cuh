#pragma once

#include <cstdint>

#include "sim/resnet/tiles.cuh"

// ResNet-20 with group norm. The output for an image depends only on that image, so one block processes one image
// forward and backward. Only the sum over images combines blocks. The 19 convolutions are numbered in order: 0 is the
// stem; 2 b - 1 and 2 b belong to residual block b = 1 .. 9.

namespace secureafl::cuda {

constexpr int kBlocks = 9, kMaxClasses = 256;

struct Resnet {
  int batch, channels, classes;
  // per convolution: offset of its weights in a vector (followed by weight and bias of the norm), offset in `packed`,
  // offset of its output before the norm in the memory of an image
  int weight[kConvs], packed[kConvs], z[kConvs];
  int a[kBlocks + 1];     // offsets of the input of block 1 and of the outputs of all blocks
  int held, memory;       // offset of two shortcut gradients; floats of memory per image
  int norm[kConvs];       // offsets of the gradients of the norms in the gradient of an image, after those of all
                          // convolutions
  int norms, part;        // floats of the gradients of all norms; of the whole gradient of an image
  int head, packs, size;  // offset of the last layer in a vector; packed weights of all convolutions; parameters

  const float* vector;   // (size)
  const float* x;        // (images, channels, 32, 32)
  const int64_t* label;  // (images): classification
  const float* target;   // (images): regression (classes 0), mean squared error
  float* measures;       // (2, kConvs): prescales of the weights; upper bounds of the outputs of the norms
  Operand* packs_at;     // (2, packs): the weights in the order in which a warp loads them, forward and backward
  float* scratch;        // (images, memory)
  float* parts;          // (images, part): gradients of the convolutions (offsets `packed`), the norms, the head
  float* result;         // (images / batch, size): mean gradients; or (images, outputs): the outputs of the net
};

__host__ __device__ constexpr int channels_of(int conv) { return conv < 7 ? 16 : conv < 13 ? 32 : 64; }
// A warp multiplies 16 input channels at a time. The image is padded with channels of zeros.
__host__ __device__ constexpr int inputs_of(int conv) { return conv == 0 ? 16 : channels_of(conv - 1); }
// Without padding, as in the vector.
__host__ __device__ constexpr int real_inputs_of(int conv, int channels) {
  return conv == 0 ? channels : inputs_of(conv);
}
__host__ __device__ constexpr int weights_of(int conv) { return channels_of(conv) * inputs_of(conv) * 9; }

// Sets everything except the pointers and the number of images.
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

// The data of a block.
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
  // The gradient on the shortcut of the residual block of a convolution. Two buffers alternate: other threads may still
  // read that of the previous block.
  __device__ float* shortcut(int conv) const { return memory + net.held + (conv + 1) / 2 % 2 * kLargest; }
  // Destinations of gradients: (C) weight, then (C) bias of a norm; the last layer.
  __device__ float* norm_part(int conv) const { return part + net.packs + net.norm[conv]; }
  __device__ float* head_part() const { return part + net.packs + net.norms; }
};

// Starts the copy of the weights of a convolution to shared memory. They are available after wait_copies and a barrier.
__device__ inline void fetch_weights(const Image& image, int conv, bool back) {
  Operand* to = image.at.weights(channels_of(conv));
  const Operand* from = image.packed(conv, back);
  for (int i = threadIdx.x * 8; i < weights_of(conv); i += kThreads * 8) copy_async(to + i, from + i);
}

}  // namespace secureafl::cuda
