#include <torch/csrc/stable/library.h>

#include "row_wise/mean_steps/mean_steps_cpu.h"
#include "row_wise/mean_steps/ops_impl.h"

namespace secureafl {

struct CpuMeanSteps {
  static constexpr bool kHostReads = true;

  explicit CpuMeanSteps(const Tensor&) {}

  void mean_step(const MeanRound& r, const Refresh& refresh_args, const Tensor&) const {
    cpu::mean_step(r, refresh_args);
  }
};

}  // namespace secureafl

SECUREAFL_REGISTER_MEAN_STEPS(CpuMeanSteps, CPU)
