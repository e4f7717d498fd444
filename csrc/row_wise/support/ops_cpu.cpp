#include <torch/csrc/stable/library.h>

#include <optional>

#include "row_wise/kinship/kin_step_cpu.h"
#include "row_wise/support/ops_impl.h"
#include "row_wise/support/refresh_cpu.h"

namespace secureafl {

struct CpuSupport {
  static constexpr bool kHostReads = true;

  explicit CpuSupport(const Tensor&) {}

  void support_step(const KinRound& r, const Refresh& refresh_args, int64_t every, const Tensor&) const {
    std::optional<cpu::RefreshScratch> scratch;
    if ((*r.rounds + 1) % every == 0) scratch.emplace(r.n);
    cpu::kin_step(r);
    if (scratch) cpu::refresh_clients(r, refresh_args, *scratch);
  }
};

}  // namespace secureafl

SECUREAFL_REGISTER_SUPPORT(CpuSupport, CPU)
