#include <torch/csrc/stable/library.h>

#include "row_wise/kinship/kin_step_cpu.h"
#include "row_wise/kinship/ops_impl.h"

namespace secureafl {

struct CpuKinship {
  static constexpr bool kHostReads = true;

  explicit CpuKinship(const Tensor&) {}

  void kin_step(const KinRound& r, const Tensor&) const { cpu::kin_step(r); }
};

}  // namespace secureafl

SECUREAFL_REGISTER_KIN(CpuKinship, CPU)
