#include <torch/csrc/stable/library.h>

#include "rules/columns_cpu.h"
#include "rules/ops_impl.h"

// Loops over memory on torch's own threads. What a thread sums does not depend on how many threads there are,
// so a result does not either.

namespace secureafl {

struct CpuRules {
  static constexpr bool kHostReads = true;

  explicit CpuRules(const Tensor&) {}

  template <typename Rows, typename out_t>
  void reduce_columns(const Rows& rows, Rule rule, int64_t trim, out_t* out) const {
    cpu::reduce_columns(rows, rule, trim, out);
  }
};

}  // namespace secureafl

SECUREAFL_REGISTER_RULES(CpuRules, CPU)
