#include <torch/csrc/stable/library.h>

#include "row_wise/kinship/kin_step_cpu.h"
#include "row_wise/row_rules/choose.h"
#include "row_wise/row_rules/ops_impl.h"

namespace secureafl {

struct CpuRowRules {
  static constexpr bool kHostReads = true;

  explicit CpuRowRules(const Tensor&) {}

  void row_step(const RowRound& r, const Tensor&) const { cpu::kin_step(r); }
};

}  // namespace secureafl

SECUREAFL_REGISTER_ROW_RULES(CpuRowRules, CPU)
