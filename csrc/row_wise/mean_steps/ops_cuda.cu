#include <torch/csrc/stable/library.h>

#include "row_wise/kinship/launch.cuh"
#include "row_wise/mean_steps/mean_steps.cuh"
#include "row_wise/mean_steps/ops_impl.h"

namespace secureafl {

// Whether this memory is the host's, mapped into the GPU's addresses (history_device="cpu").
inline bool is_on_host(const void* at) {
  cudaPointerAttributes attributes{};
  return at && cudaPointerGetAttributes(&attributes, at) == cudaSuccess && attributes.type == cudaMemoryTypeHost;
}

// Six kernels: those of kin_step.cuh, and three of a refresh. Nothing waits for the device.
class CudaMeanSteps : public CudaKin {
 public:
  using CudaKin::CudaKin;

  void mean_step(const MeanRound& r, const Refresh& refresh, const Tensor& like) const {
    r.two_bytes ? run<__nv_bfloat16>(r, refresh, like) : run<float>(r, refresh, like);
  }

 private:
  // S: of the means
  template <typename S>
  void run(const MeanRound& r, const Refresh& refresh, const Tensor& like) const {
    const auto means = cuda::MeansPlan::of(r.n, r.d);
    const auto plan = cuda::RefreshPlan::of(launch_, r.n);
    const Tensor memory = allocate(like, ScalarType::Double, {cuda::MeansScratch::doubles(r.n, means, plan)});
    const cuda::MeansScratch scratch(mutable_data<double>(memory), r.n, means, plan);
    MeanRound round = r;
    round.barrier = scratch.refresh.barrier;
    // Over the bus wide stores took seven times as long as narrow ones.
    const bool wide_fits = is_aligned(r.own_means) && is_aligned(r.model) && !is_on_host(r.last_updates);
    const auto narrow = cuda::mean_step_kernel<S, 1>, wide = cuda::mean_step_kernel<S, 4>;
    kin_step(round, like, StepKernel<MeanRound>{narrow, wide, cuda::kStepThreads, wide_fits});
    cuda::launch_refresh<cuda::ManyTeam, S>(launch_, round, means, plan, refresh, scratch);
  }
};

}  // namespace secureafl

SECUREAFL_REGISTER_MEAN_STEPS(CudaMeanSteps, CUDA)
