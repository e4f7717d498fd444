#include <torch/csrc/stable/library.h>

#include "kinship/launch.cuh"
#include "support/ops_impl.h"
#include "support/refresh.cuh"

namespace secureafl {

class CudaSupport : public CudaKin {
 public:
  using CudaKin::CudaKin;

  void support_step(const KinRound& r, const Refresh& refresh_args, int64_t every, const Tensor& like) const {
    kin_step(r, like);
    const Tensor memory = allocate(like, ScalarType::Double, {RefreshTables::doubles(r.n) + (r.n + 7) / 8});
    double* scratch = mutable_data<double>(memory);
    auto* counts = reinterpret_cast<bool*>(scratch + RefreshTables::doubles(r.n));
    const int64_t room = cuda::refresh_room(r.n, launch_.max_shared_bytes());
    launch_.launch_pdl(cuda::support_refresh_kernel, 1, cuda::BlockTeam::kSize, room * sizeof(double), r, refresh_args,
                       every, scratch, room, counts);
  }
};

}  // namespace secureafl

SECUREAFL_REGISTER_SUPPORT(CudaSupport, CUDA)
