#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <vector>

#include "round/ops_impl.h"
#include "round/step_cpu.h"
#include "round/tiles.h"

namespace secureafl {

struct CpuRound {
  static constexpr bool kHostReads = true;

  explicit CpuRound(const Tensor&) {}

  static int64_t columns(const char* op, int64_t n, int64_t m) {
    if (n < 1 || n > kMaxClients || m < 0 || m > kMaxPairs) {
      refuse(op, "slots must hold 1 to ", kMaxClients, " clients and 0 to ", kMaxPairs, " pairs of each, got ", n,
             " and ", m);
    }
    return kCpuColumns;
  }

  bool fits(int64_t, int64_t, bool, std::optional<int64_t>) const { return true; }

  static int64_t pass_blocks(int64_t, int64_t m, bool, int64_t) { return m == 0 ? 0 : 1; }

  // Leaves nothing pending.
  void step(const Round& r, Verdict* verdict, const double* changes, const Tensor&) const {
    if (r.m > 0) settle(r, verdict, changes, pass_blocks(r.n, r.m, r.half, r.tiles));
    cpu::step(r);
  }

  void settle(const Round& r, Verdict* verdict, const double* changes, int64_t blocks) const {
    if (verdict->pending == 0) return;
    cpu::renew(r, *verdict, cpu::add_parts(changes, pass_sums(r.n, r.m), blocks).data());
    verdict->pending = 0;
  }

  void update_sums(const Round& r, double* out, const Tensor&) const {
    const std::vector<double> sums = cpu::update_sums(r);
    std::copy(sums.begin(), sums.end(), out);
  }

  void apply(const Round& r, const double* sums, Verdict* verdict, double* changes, const Tensor&) const {
    *verdict = cpu::judge_update(r, sums);
    const std::vector<double> found = cpu::apply(r, *verdict);
    std::copy(found.begin(), found.end(), changes);
  }

  void renew(const Round& r, const Verdict* verdict, const double* changes) const { cpu::renew(r, *verdict, changes); }

  void refresh(const Round& r) const { cpu::refresh(r); }
};

}  // namespace secureafl

SECUREAFL_REGISTER_STEP(CpuRound, CPU)
