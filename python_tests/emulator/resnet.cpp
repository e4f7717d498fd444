#pragma GCC optimize("O3")  // these run longer than they take to compile, unlike the others

#include "sim/resnet/backward.cuh"
#include "sim/resnet/pack.cuh"

// resnet_gradient and resnet_predict on a CPU: runs the kernels of csrc/sim/resnet, block after block.

using namespace secureafl::cuda;

extern "C" int resnet_gradient(const float* vector, const float* x, const int64_t* label, const float* target,
                               int minibatches, int batch, int channels, int classes, float* result, unsigned seed) {
  Resnet net = shape_of_resnet(batch, channels, classes);
  const int images = minibatches * batch, columns = (net.part + 255) / 256;
  std::vector<float> packs(2 * net.packs), measures(2 * kConvs);
  std::vector<float> memory(images * (net.memory + net.part), std::nanf(""));
  net.vector = vector, net.x = x, net.label = label, net.target = target, net.result = result;
  net.packs_at = packs.data(), net.measures = measures.data();
  net.scratch = memory.data(), net.parts = net.scratch + images * net.memory;
  emulator::launch(kConvs, kMeasureThreads, 0, seed, [&] { measure_kernel(net); });
  emulator::launch(kPackBlocks, 256, 0, seed, [&] { pack_kernel(net); });
  emulator::launch(images, kThreads, sizeof(Shared) / sizeof(float), seed, [&] { resnet_kernel(net); });
  emulator::launch(minibatches * columns, 256, 0, seed, [&] { mean_kernel(net); });
  return net.size;
}

extern "C" int resnet_predict(const float* vector, const float* x, int images, int channels, int classes, float* result,
                              unsigned seed) {
  Resnet net = shape_of_resnet(1, channels, classes);
  std::vector<float> packs(2 * net.packs), measures(2 * kConvs), memory(images * net.memory, std::nanf(""));
  net.vector = vector, net.x = x, net.result = result, net.scratch = memory.data();
  net.packs_at = packs.data(), net.measures = measures.data();
  emulator::launch(kConvs, kMeasureThreads, 0, seed, [&] { measure_kernel(net); });
  emulator::launch(kPackBlocks, 256, 0, seed, [&] { pack_kernel(net); });
  emulator::launch(images, kThreads, sizeof(Shared) / sizeof(float), seed, [&] { predict_kernel(net); });
  return net.size;
}
