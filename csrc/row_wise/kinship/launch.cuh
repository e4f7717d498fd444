#pragma once

#include "common/launch.cuh"
#include "common/tensors.h"
#include "row_wise/kinship/kin_step.cuh"

// A round of a row-wise rule in three kernels (kin_step.cuh). Nothing waits for the device.

namespace secureafl {

class CudaKin {
 public:
  static constexpr bool kHostReads = false;

  explicit CudaKin(const Tensor& on) : launch_(on.get_device_index()) {}

  // R: KinRound, or one with a `choose` of its own
  template <typename R>
  void kin_step(const R& r, const Tensor& like) const {
    const auto aligned = [](const float* at) { return reinterpret_cast<uintptr_t>(at) % 16 == 0; };
    const bool wide = r.d % 4 == 0 && aligned(r.last_updates) && aligned(r.last_models);
    return wide ? launch<4>(r, like) : launch<1>(r, like);
  }

 protected:
  cuda::Launcher launch_;

 private:
  template <int kVector, typename R>
  void launch(const R& r, const Tensor& like) const {
    const auto plan = cuda::KinPlan::of(r);
    constexpr int64_t kChoice = (sizeof(Choice) + sizeof(double) - 1) / sizeof(double);
    const int64_t sums = r.sums() * plan.chunks;
    // Choice, parts (r.sums(), chunks), then rows and weights (n): they have four bytes each.
    const Tensor memory = allocate(like, ScalarType::Double, {kChoice + sums + r.n});
    double *at = mutable_data<double>(memory), *parts = at + kChoice;
    auto* choice = reinterpret_cast<Choice*>(at);
    auto* rows = reinterpret_cast<int32_t*>(parts + sums);
    auto* weights = reinterpret_cast<float*>(rows + r.n);
    const int64_t warps = plan.groups * plan.chunks, columns = 32 * kVector;
    constexpr int64_t kWarps = cuda::kSumThreads / 32;
    launch_(cuda::kin_sums_kernel<kVector>, (warps + kWarps - 1) / kWarps, cuda::kSumThreads, 0,
            static_cast<const KinRound&>(r), plan, parts);
    launch_.launch_pdl(cuda::kin_choose_kernel<R>, 1, cuda::BlockTeam::kSize, cuda::choose_bytes(r), r, plan.chunks,
                       static_cast<const double*>(parts), choice, rows, weights);
    launch_.launch_pdl(cuda::kin_step_kernel<kVector>, (r.d + columns - 1) / columns, cuda::kStepThreads, 0,
                       static_cast<const KinRound&>(r), static_cast<const Choice*>(choice));
  }
};

}  // namespace secureafl
