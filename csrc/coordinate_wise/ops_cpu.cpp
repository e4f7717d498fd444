#include <torch/csrc/stable/library.h>

#include "coordinate_wise/columns_cpu.h"
#include "coordinate_wise/ops_impl.h"

// Loops on the threads of torch. The work of each sum does not depend on the number of threads, so neither does the
// result.

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
