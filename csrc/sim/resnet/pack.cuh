#pragma once

#include "sim/resnet/net.cuh"

namespace secureafl::cuda {

// Computes the prescale of the weights of a convolution and an upper bound of the outputs of its norm. Block: a
// convolution.
constexpr int kMeasureThreads = 1024;
static __global__ void __launch_bounds__(kMeasureThreads) measure_kernel(Resnet net) {
  __shared__ uint32_t parts[3][32];
  const int conv = blockIdx.x, out = channels_of(conv), real = real_inputs_of(conv, net.channels);
  const int first[4] = {0, out * real * 9, out * real * 9 + out, out * real * 9 + 2 * out};
  for (int kind = 0; kind < 3; ++kind) {  // weights of the convolution, weights and biases of the norm
    uint32_t most = 0;
    for (int i = first[kind] + threadIdx.x; i < first[kind + 1]; i += kMeasureThreads) {
      most = max_bits(most, bits_of(net.vector[net.weight[conv] + i]));
    }
    parts[kind][threadIdx.x / 32] = warp_max(most);
  }
  __syncthreads();
  float most[3];
  for (int kind = 0; kind < 3; ++kind) most[kind] = __uint_as_float(warp_max(parts[kind][threadIdx.x % 32]));
  if (threadIdx.x > 0) return;
  const float side = 512 / out, farthest = sqrtf(8 * side * side);  // largest normalized value
  net.measures[conv] = prescale_for(most[0]);
  net.measures[kConvs + conv] = farthest * most[1] + most[2];
}

// Packs the prescaled weights (out, in, 9) of every convolution in the order in which lanes load them: forward b = (in,
// out); backward, for the input gradient, b = (out, in).
//   packs_at (2, .. conv: (9 k / 16, n / 8, 32, 4))   Block: a slice of a convolution, one direction
constexpr int kSlices = 8, kPackBlocks = kConvs * 2 * kSlices;
static __global__ void pack_kernel(Resnet net) {
  const int conv = blockIdx.x / 2 % kConvs, slice = blockIdx.x / (2 * kConvs), warps = blockDim.x / 32;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const bool back = blockIdx.x % 2;
  const int in = inputs_of(conv), out = channels_of(conv), real = real_inputs_of(conv, net.channels);
  const int k = back ? out : in, n = back ? in : out;
  const float* weight = net.vector + net.weight[conv];
  const float prescale = net.measures[conv];
  OperandB* to = reinterpret_cast<OperandB*>(net.packs_at + (back ? net.packs : 0) + net.packed[conv]);
  for (int tile = slice * warps + threadIdx.x / 32; tile < 9 * k / 16 * (n / 8); tile += kSlices * warps) {
    const int step = tile / (n / 8), tap = step / (k / 16), column = tile % (n / 8) * 8 + g;
    const auto factor = [&](int row) {
      const int o = back ? row : column, i = back ? column : row;
      return i < real ? weight[(o * real + i) * 9 + tap] * prescale : 0;
    };
    const int row = step % (k / 16) * 16 + 2 * t;
    to[tile * 32 + lane] = {{to_pair(factor(row), factor(row + 1)), to_pair(factor(row + 8), factor(row + 9))}};
  }
}

}  // namespace secureafl::cuda
