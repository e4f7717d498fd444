#include <torch/csrc/stable/library.h>

#include "coordinate_wise/columns.cuh"
#include "lbfgs/estimate.cuh"
#include "lbfgs/ops_impl.h"
#include "lbfgs/products.cuh"

namespace secureafl {

class CudaLbfgs {
 public:
  static constexpr bool kHostReads = false;

  explicit CudaLbfgs(const Tensor& on) : launch_(on.get_device_index()) {}

  template <typename T>
  void solve_all(const History<T>& h, const Wanted& wanted, double trust, double* factors, Status* status,
                 const Tensor& like) const {
    const auto chunks = cuda::Chunks::of(h.d);
    const int64_t products = products_of(h.m);
    const Tensor partial = allocate(like, ScalarType::Double, {h.n, chunks.count, products});
    const int64_t tile_bytes = (rows_of(h.m) + 1) * (cuda::kProductTile + 1) * static_cast<int64_t>(sizeof(double));
    launch_(cuda::products_kernel<T>, h.m > 0 ? h.n * chunks.count : 0, cuda::kProductThreads, tile_bytes, h, wanted,
            chunks, mutable_data<double>(partial));
    const int64_t gram_bytes = (products + scratch_of(h.m)) * static_cast<int64_t>(sizeof(double));
    launch_(cuda::coefficients_kernel<T>, h.n, 32, gram_bytes, h, wanted, chunks.count, data<double>(partial), trust,
            factors, status);
  }

  template <typename T>
  void write_estimates(const History<T>& h, const Corrections& corrections, T* out) const {
    const int64_t chunks = (h.d + cuda::kEstimateChunk - 1) / cuda::kEstimateChunk;
    launch_(cuda::estimates_kernel<T>, h.n * chunks, cuda::kEstimateThreads, 0, h, corrections, chunks, out);
  }

  template <typename Rows, typename out_t>
  void reduce_columns(const Rows& rows, Rule rule, int64_t trim, out_t* out) const {
    cuda::reduce_columns(launch_, rows, rule, trim, out);
  }

 private:
  cuda::Launcher launch_;
};

}  // namespace secureafl

SECUREAFL_REGISTER_LBFGS(CudaLbfgs, CUDA)
