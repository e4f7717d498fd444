#include <torch/csrc/stable/library.h>

// Schemas of the simulator's ops. Only CUDA has kernels: cnn/cnn_gradient.cu and resnet/resnet.cu. On a CPU the
// simulator uses autograd.
STABLE_TORCH_LIBRARY(secureafl_sim, m) {
  m.def("cnn_gradient(Tensor vector, Tensor x, Tensor y, int hidden, int classes) -> Tensor");
  m.def("resnet_gradient(Tensor vector, Tensor x, Tensor y, int classes) -> Tensor");
  m.def("resnet_predict(Tensor vector, Tensor x, int classes) -> Tensor");
}
