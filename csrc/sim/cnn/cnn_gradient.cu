#include <torch/csrc/stable/library.h>

#include "sim/check.h"
#include "sim/cnn/backward.cuh"

namespace secureafl {

namespace cuda {

struct Piece {
  float** start;
  int64_t count;
};

// Buffers between the kernels. a1 is first, because it is read as float4 and must be aligned.
inline std::vector<Piece> pieces(Cnn& net) {
  return {{&net.a1, net.images * kConv1 * net.h1 * kRow},
          {&net.a2, net.images * net.features},
          {&net.z3, net.splits * net.images * net.hidden},
          {&net.a3, net.images * net.hidden},
          {&net.dz4, net.images * net.classes},
          {&net.dz3, net.images * net.hidden},
          {&net.da2, net.images * net.features},
          {&net.dconv1, net.images * net.conv2},
          {&net.dconv2, net.minibatches * net.chunks * kConv2Size}};
}

// Sets everything except the pointers.
inline Cnn shape_of_cnn(int64_t minibatches, int batch, int channels, int height, int width, int hidden, int classes) {
  Cnn net{};
  net.minibatches = minibatches, net.images = minibatches * batch;
  net.batch = batch, net.channels = channels, net.height = height, net.width = width;
  net.h1 = (height - 2) / 2, net.w1 = (width - 2) / 2, net.h2 = (net.h1 - 2) / 2, net.w2 = (net.w1 - 2) / 2;
  net.features = kConv2 * net.h2 * net.w2, net.hidden = hidden, net.classes = classes;
  net.splits = (net.features + kSplit - 1) / kSplit, net.chunks = (batch + kChunk - 1) / kChunk;
  net.conv1_bias = kConv1 * channels * kTaps;
  net.conv2 = net.conv1_bias + kConv1;
  net.conv2_bias = net.conv2 + kConv2 * kConv1 * kTaps;
  net.fc1 = net.conv2_bias + kConv2;
  net.fc1_bias = net.fc1 + hidden * net.features;
  net.fc2 = net.fc1_bias + hidden;
  net.fc2_bias = net.fc2 + classes * hidden;
  net.size = net.fc2_bias + classes;
  return net;
}

// Bytes of shared memory of the kernels that hold an image.
inline int64_t conv1_bytes(const Cnn& net) { return 4 * net.channels * (kGroup1 * kSpread + net.height * kImageRow); }
inline int64_t conv2_bytes(const Cnn& net) { return 4 * kConv1 * (kGroup2 * kSpread + net.h1 * kRow); }
inline int64_t backward_bytes(const Cnn& net) {
  const int dz2 = kConv2 * (2 * net.h2 + 4) * kRow, da1 = kParts * kGroup1 * (2 * net.h2 + 2) * (2 * net.w2 + 2);
  const int first = kGroup1 * kConv2 * kSpread + dz2 + da1 + net.channels * net.height * kImageRow;
  const int second = (kConv1 + 1) * (net.h1 * kRow + 1) + 2 * kGroupW * net.h2 * net.w2;
  return 4 * (first > second ? first : second);
}

inline void launch_cnn(const Launcher& launch, const Cnn& net) {
  const int64_t k = net.minibatches;
  launch(conv1_kernel, net.images * kGroups1, kConvThreads, conv1_bytes(net), net);
  launch.launch_pdl(conv2_kernel, net.images * kGroups2, kConvThreads, conv2_bytes(net), net);
  launch.launch_pdl(fc1_kernel, k * net.splits * tiles(net.batch) * tiles(net.hidden), kThreads, kTileBytes, net);
  launch.launch_pdl(head_kernel, net.images, kThreads, 4 * (net.hidden + 2 * net.classes), net);
  const int jobs = fc_backward_jobs(net);
  launch.launch_pdl(fc_backward_kernel, k * jobs, kThreads, kTileBytes, net, jobs);
  launch.launch_pdl(conv_backward_kernel, net.images * kGroups1 + k * net.chunks * kGroupsW, kThreads,
                    backward_bytes(net), net);
  launch.launch_pdl(sum_kernel, k * ((net.fc1 + kThreads - 1) / kThreads), kThreads, 0, net);
}

}  // namespace cuda

// One row per minibatch: the gradient at `vector` (d) of the mean cross entropy over its images.
//   x (k, B, C, H, W)   y (k, B)   -> (k, d)
Tensor cnn_gradient(const Tensor& vector, const Tensor& x, const Tensor& y, int64_t hidden, int64_t classes) {
  constexpr const char* op = "cnn_gradient";
  const Check check = check_net(op, vector);
  check.floats("x", x, "(k, B, C, H, W)", {-1, -1, -1, -1, -1});
  check.typed("y", y, ScalarType::Long, "(k, B)", {x.size(0), x.size(1)});
  check.within("hidden must lie in", hidden, 1, 256);
  check.within("classes must lie in", classes, 1, 256);
  check.within("x must hold a number of minibatches k in", x.size(0), 0, 65536);  // limit of the grid size
  check.within("x must hold a number of images B in", x.size(1), 1, 256);
  check.within("x must hold a number of channels C in", x.size(2), 1, 3);
  check.within("x must have a height H in", x.size(3), 10, 32);
  check.within("x must have a width W in", x.size(4), 10, 32);
  const auto size = [&](int64_t dim) { return static_cast<int>(x.size(dim)); };
  cuda::Cnn net = cuda::shape_of_cnn(x.size(0), size(1), size(2), size(3), size(4), static_cast<int>(hidden),
                                     static_cast<int>(classes));
  check.shape("vector", vector, "(d,)", {net.size});
  const cuda::Launcher launch(vector.get_device_index());
  if (cuda::backward_bytes(net) > launch.max_shared_bytes()) {
    refuse(op, "x must hold images whose gradients fit into ", launch.max_shared_bytes(),
           " bytes of shared memory, got ", cuda::backward_bytes(net));
  }

  const Tensor parameters = dense(vector), images = dense(x), labels = dense(y);
  const Tensor result = allocate(vector, ScalarType::Float, {net.minibatches, net.size});
  net.vector = data<float>(parameters);
  net.x = data<float>(images);
  net.y = data<int64_t>(labels);
  net.result = mutable_data<float>(result);

  int64_t floats = 0;
  for (const cuda::Piece& piece : cuda::pieces(net)) floats += piece.count;
  const int64_t pooled = net.images * cuda::kConv1 * net.h1 * net.w1;
  const Tensor memory = allocate(vector, ScalarType::Float, {floats});
  const Tensor origins = allocate(vector, ScalarType::Byte, {pooled + net.images * net.features});
  float* at = mutable_data<float>(memory);
  for (const cuda::Piece& piece : cuda::pieces(net)) {
    *piece.start = at;
    at += piece.count;
  }
  net.from1 = mutable_data<uint8_t>(origins);
  net.from2 = net.from1 + pooled;
  cuda::launch_cnn(launch, net);
  return result;
}

}  // namespace secureafl

STABLE_TORCH_LIBRARY_IMPL(secureafl_sim, CUDA, m) { m.impl("cnn_gradient", TORCH_BOX(&secureafl::cnn_gradient)); }
