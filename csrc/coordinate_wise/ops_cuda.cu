#include <torch/csrc/stable/library.h>

#include "coordinate_wise/columns.cuh"
#include "coordinate_wise/ops_impl.h"

// Launches on the current stream of torch. No float atomics and fixed orders of summation: results repeat bit for bit.

namespace secureafl {

class CudaRules {
 public:
  static constexpr bool kHostReads = false;

  explicit CudaRules(const Tensor& on) : launch_(on.get_device_index()) {}

  template <typename Rows, typename out_t>
  void reduce_columns(const Rows& rows, Rule rule, int64_t trim, out_t* out) const {
    cuda::reduce_columns(launch_, rows, rule, trim, out);
  }

 private:
  cuda::Launcher launch_;
};

}  // namespace secureafl

SECUREAFL_REGISTER_RULES(CudaRules, CUDA)
