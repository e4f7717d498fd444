#include <torch/csrc/stable/library.h>

#include "common/launch.cuh"
#include "lipschitz/lipschitz.cuh"
#include "lipschitz/ops_impl.h"

namespace secureafl {

class CudaLipschitz {
 public:
  explicit CudaLipschitz(const Tensor& on) : launch_(on.get_device_index()) {}

  template <typename T>
  void factor(const T* g, const T* last_g, const T* w, const T* last_w, int64_t d, double* out,
              const Tensor& like) const {
    const int64_t wanted = d / (4 * cuda::kNormThreads) + 1;
    const int64_t blocks = wanted < cuda::kNormBlocks ? wanted : cuda::kNormBlocks;
    const Tensor partial = allocate(like, ScalarType::Double, {2, blocks});
    launch_(cuda::squares_kernel<T>, blocks, cuda::kNormThreads, 0, g, last_g, w, last_w, d,
            mutable_data<double>(partial));
    launch_(cuda::factor_kernel, 1, cuda::kNormThreads, 0, data<double>(partial), blocks, out);
  }

 private:
  cuda::Launcher launch_;
};

}  // namespace secureafl

SECUREAFL_REGISTER_LIPSCHITZ(CudaLipschitz, CUDA)
