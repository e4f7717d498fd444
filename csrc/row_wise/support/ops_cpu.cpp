#include <torch/csrc/stable/library.h>

#include <memory>
#include <vector>

#include "row_wise/kinship/kin_step_cpu.h"
#include "row_wise/support/ops_impl.h"
#include "row_wise/support/refresh.h"

namespace secureafl {

struct CpuSupport {
  static constexpr bool kHostReads = true;

  explicit CpuSupport(const Tensor&) {}

  void support_step(const KinRound& r, Refresh refresh_args, int64_t every, const Tensor&) const {
    const bool due = (*r.rounds + 1) % every == 0;
    // Before the round: one that runs out of memory must change nothing.
    std::vector<double> scratch(due ? static_cast<size_t>(RefreshTables::doubles(r.n, Solo::kDown)) : 0);
    const std::unique_ptr<bool[]> counts(new bool[due ? static_cast<size_t>(r.n) : 0]);
    cpu::kin_step(r);
    if (!due) return;
    for (int64_t k = 0; k < r.n; ++k) counts[k] = r.presence.counts(r.seen[k], k);
    refresh_args.counts = counts.get();
    refresh(Solo(), refresh_args, RefreshTables({scratch.data(), nullptr, 0}, r.n, Solo::kDown));
  }
};

}  // namespace secureafl

SECUREAFL_REGISTER_SUPPORT(CpuSupport, CPU)
