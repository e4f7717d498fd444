#pragma once

#include "common/launch.cuh"
#include "common/tensors.h"
#include "row_wise/kinship/kin_step.cuh"

// A round of a row-wise rule in three kernels (kin_step.cuh). Nothing waits for the device.

namespace secureafl {

inline bool is_aligned(const void* at) { return reinterpret_cast<uintptr_t>(at) % 16 == 0; }

// The third kernel of a round: kStepThreads threads a block, `lanes` of them along d.
template <typename R>
struct StepKernel {
  void (*narrow)(R, const Choice*);  // a thread loads one float at a time
  void (*wide)(R, const Choice*);    // four
  int64_t lanes;
  bool wide_fits;  // what only this kernel loads and stores is aligned for the wide one, and on the GPU
};

inline StepKernel<KinRound> rows_step() { return {cuda::kin_step_kernel<1>, cuda::kin_step_kernel<4>, 32, true}; }

class CudaKin {
 public:
  static constexpr bool kHostReads = false;

  explicit CudaKin(const Tensor& on) : launch_(on.get_device_index()) {}

  // R: KinRound, or one with a `choose` of its own
  template <typename R, typename S = KinRound>
  void kin_step(const R& r, const Tensor& like, const StepKernel<S>& step = rows_step()) const {
    const bool wide = r.d % 4 == 0 && is_aligned(r.last_updates) && is_aligned(r.last_models);
    if (!wide) return launch<1>(r, like, step.narrow, step.lanes);
    step.wide_fits ? launch<4>(r, like, step.wide, 4 * step.lanes) : launch<4>(r, like, step.narrow, step.lanes);
  }

 protected:
  cuda::Launcher launch_;

 private:
  // columns: coordinates of a block of the third kernel
  template <int kVector, typename R, typename S>
  void launch(const R& r, const Tensor& like, void (*step)(S, const Choice*), int64_t columns) const {
    const auto plan = cuda::KinPlan::of(r);
    constexpr int64_t kChoice = (sizeof(Choice) + sizeof(double) - 1) / sizeof(double);
    const int64_t sums = r.sums() * plan.chunks;
    // Choice, parts (r.sums(), chunks), then rows and weights (n): they have four bytes each.
    const Tensor memory = allocate(like, ScalarType::Double, {kChoice + sums + r.n});
    double *at = mutable_data<double>(memory), *parts = at + kChoice;
    auto* choice = reinterpret_cast<Choice*>(at);
    auto* rows = reinterpret_cast<int32_t*>(parts + sums);
    auto* weights = reinterpret_cast<float*>(rows + r.n);
    const int64_t warps = plan.groups * plan.chunks;
    constexpr int64_t kWarps = cuda::kSumThreads / 32;
    launch_(cuda::kin_sums_kernel<kVector>, (warps + kWarps - 1) / kWarps, cuda::kSumThreads, 0,
            static_cast<const KinRound&>(r), plan, parts);
    launch_.launch_pdl(cuda::kin_choose_kernel<R>, 1, cuda::BlockTeam::kSize, cuda::choose_bytes(r), r, plan.chunks,
                       static_cast<const double*>(parts), choice, rows, weights);
    launch_.launch_pdl(step, (r.d + columns - 1) / columns, cuda::kStepThreads, 0, static_cast<const S&>(r),
                       static_cast<const Choice*>(choice));
  }
};

}  // namespace secureafl
