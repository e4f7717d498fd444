#include <torch/csrc/stable/library.h>

#include "row_wise/kinship/launch.cuh"
#include "row_wise/support/ops_impl.h"
#include "row_wise/support/refresh.cuh"

namespace secureafl {

class CudaSupport : public CudaKin {
 public:
  using CudaKin::CudaKin;

  void support_step(const KinRound& r, const Refresh& refresh_args, int64_t every, const Tensor& like) const {
    const auto plan = cuda::RefreshPlan::of(launch_, r.n);
    const Tensor memory = allocate(like, ScalarType::Double, {plan.doubles()});
    const cuda::RefreshScratch scratch(mutable_data<double>(memory), plan);
    KinRound round = r;
    round.barrier = scratch.barrier;
    kin_step(round, like);
    cuda::launch_refresh_kernel(launch_, plan, cuda::support_refresh_kernel<cuda::BlockTeam>,
                                cuda::support_refresh_kernel<cuda::ManyTeam>, round, refresh_args, every, scratch,
                                plan.room);
  }
};

}  // namespace secureafl

SECUREAFL_REGISTER_SUPPORT(CudaSupport, CUDA)
