#include <torch/csrc/stable/library.h>

#include "common/launch.cuh"
#include "sim/check.h"
#include "sim/resnet/backward.cuh"
#include "sim/resnet/pack.cuh"

namespace secureafl {

static_assert(sizeof(cuda::Shared) == 194336, "secureafl_ext/sim/models.py asks the GPU for as much");
constexpr int64_t kMaxImages = 1024;  // per launch: 2.5 GB of memory

namespace {

// The net without its pointers.
cuda::Resnet resnet_of(const char* op, const Check& check, const Tensor& vector, const cuda::Launcher& launch,
                       int64_t batch, int64_t channels, int64_t classes) {
  check.within("classes must lie in", classes, 0, cuda::kMaxClasses);
  check.within("x must hold a number of channels C in", channels, 1, 8);
  const cuda::Resnet net =
      cuda::shape_of_resnet(static_cast<int>(batch), static_cast<int>(channels), static_cast<int>(classes));
  check.shape("vector", vector, "(d,)", {net.size});
  if (static_cast<int64_t>(sizeof(cuda::Shared)) > launch.max_shared_bytes()) {
    refuse(op, "vector must be on a GPU that gives a block ", static_cast<int64_t>(sizeof(cuda::Shared)),
           " bytes of shared memory, got ", launch.max_shared_bytes());
  }
  return net;
}

// Tensors that the kernels use. They must live until the last kernel is launched.
struct Ready {
  Tensor vector, packs, measures, memory;
};

// Packs the weights and allocates memory for `images` images at once, `each` floats per image.
Ready make_ready(cuda::Resnet& net, const Tensor& vector, const cuda::Launcher& launch, int64_t images, int64_t each) {
  const Ready ready{dense(vector), allocate(vector, ScalarType::Half, {2 * net.packs}),
                    allocate(vector, ScalarType::Float, {2 * cuda::kConvs}),
                    allocate(vector, ScalarType::Float, {images, each})};
  net.vector = data<float>(ready.vector);
  net.packs_at = static_cast<__half*>(ready.packs.mutable_data_ptr());
  net.measures = mutable_data<float>(ready.measures);
  net.scratch = mutable_data<float>(ready.memory);
  launch(cuda::measure_kernel, images ? cuda::kConvs : 0, cuda::kMeasureThreads, 0, net);
  launch(cuda::pack_kernel, images ? cuda::kPackBlocks : 0, 256, 0, net);
  return ready;
}

}  // namespace

// One row per minibatch: the gradient at `vector` (d) of the mean loss over its images. Cross entropy; squared error if
// classes is 0. Operands of products are rounded to 11 bits.
//   x (k, B, C, 32, 32)   y (k, B) int64, or float32 if classes is 0   -> (k, d)
Tensor resnet_gradient(const Tensor& vector, const Tensor& x, const Tensor& y, int64_t classes) {
  constexpr const char* op = "resnet_gradient";
  const Check check = check_net(op, vector);
  check.floats("x", x, "(k, B, C, 32, 32)", {-1, -1, -1, 32, 32});
  check.typed("y", y, classes ? ScalarType::Long : ScalarType::Float, "(k, B)", {x.size(0), x.size(1)});
  const int64_t k = x.size(0), batch = x.size(1), channels = x.size(2);
  check.within("x must hold a number of minibatches k in", k, 0, 65536);
  check.within("x must hold a number of images B in", batch, 1, kMaxImages);
  const cuda::Launcher launch(vector.get_device_index());
  cuda::Resnet net = resnet_of(op, check, vector, launch, batch, channels, classes);

  const Tensor images = dense(x), labels = dense(y);
  const int64_t max_minibatches = kMaxImages / batch, most = k < max_minibatches ? k : max_minibatches;
  const Tensor result = allocate(vector, ScalarType::Float, {k, net.size});
  const Ready ready = make_ready(net, vector, launch, most * batch, net.memory + net.part);
  net.parts = net.scratch + most * batch * net.memory;
  for (int64_t first = 0; first < k; first += most) {
    const int64_t count = k - first < most ? k - first : most;
    net.x = data<float>(images) + first * batch * channels * 1024;
    net.label = classes ? data<int64_t>(labels) + first * batch : nullptr;
    net.target = classes ? nullptr : data<float>(labels) + first * batch;
    net.result = mutable_data<float>(result) + first * net.size;
    launch(cuda::resnet_kernel, count * batch, cuda::kThreads, sizeof(cuda::Shared), net);
    launch(cuda::mean_kernel, count * ((net.part + 255) / 256), 256, 0, net);
  }
  return result;
}

// Outputs of the net for each image: logits, or one value if classes is 0.
//   x (B, C, 32, 32)   -> (B, classes or 1)
Tensor resnet_predict(const Tensor& vector, const Tensor& x, int64_t classes) {
  constexpr const char* op = "resnet_predict";
  const Check check = check_net(op, vector);
  check.floats("x", x, "(B, C, 32, 32)", {-1, -1, 32, 32});
  const int64_t count = x.size(0), channels = x.size(1);
  const cuda::Launcher launch(vector.get_device_index());
  cuda::Resnet net = resnet_of(op, check, vector, launch, 1, channels, classes);

  const Tensor images = dense(x);
  const int64_t outputs = classes ? classes : 1, most = count < kMaxImages ? count : kMaxImages;
  const Tensor result = allocate(vector, ScalarType::Float, {count, outputs});
  const Ready ready = make_ready(net, vector, launch, most, net.memory);
  for (int64_t first = 0; first < count; first += most) {
    net.x = data<float>(images) + first * channels * 1024;
    net.result = mutable_data<float>(result) + first * outputs;
    launch(cuda::predict_kernel, count - first < most ? count - first : most, cuda::kThreads, sizeof(cuda::Shared),
           net);
  }
  return result;
}

}  // namespace secureafl

STABLE_TORCH_LIBRARY_IMPL(secureafl_sim, CUDA, m) {
  m.impl("resnet_gradient", TORCH_BOX(&secureafl::resnet_gradient));
  m.impl("resnet_predict", TORCH_BOX(&secureafl::resnet_predict));
}
