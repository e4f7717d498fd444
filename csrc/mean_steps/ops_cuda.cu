#include <torch/csrc/stable/library.h>

#include "kinship/launch.cuh"
#include "mean_steps/mean_steps.cuh"
#include "mean_steps/ops_impl.h"

namespace secureafl {

// Six kernels: those of kin_step.cuh, and three of a refresh. Nothing waits for the device.
class CudaMeanSteps : public CudaKin {
 public:
  using CudaKin::CudaKin;

  void mean_step(const MeanRound& r, const Refresh& refresh, const Tensor& like) const {
    kin_step(r, like);
    const auto plan = cuda::MeansPlan::of(r.n, r.d);
    const Tensor memory = allocate(like, ScalarType::Double, {cuda::MeansScratch::doubles(r.n, plan)});
    const int64_t room = cuda::refresh_room(r.n, launch_.max_shared_bytes());
    cuda::launch_refresh(launch_, r, plan, refresh, mutable_data<double>(memory), room);
  }
};

}  // namespace secureafl

SECUREAFL_REGISTER_MEAN_STEPS(CudaMeanSteps, CUDA)
