#include "arguments.h"
#include "coordinate_wise/in_registers.cuh"
#include "coordinate_wise/rows.h"

// `median` and `trimmed_mean` on a CPU: runs the kernels of csrc/coordinate_wise/in_registers.cuh, block after block.

using namespace secureafl;

// at: updates (n, d), mask (n), out (d)    whole: n, d, whether there is a mask, the rule, the trim
extern "C" void columns(void** at, const int64_t* whole, const double*, unsigned seed) {
  Reader tensor{at};
  float *updates, *out;
  bool* mask;
  tensor(updates), tensor(mask), tensor(out);
  const StoredRows<float, float> rows{updates, whole[2] ? mask : nullptr, whole[0], whole[1]};
  const cuda::Launcher launch(seed);
  const bool median = static_cast<Rule>(whole[3]) == Rule::kMedian;
  const bool fits = median ? cuda::reduce_in_registers<Rule::kMedian>(launch, rows, 0, out)
                           : cuda::reduce_in_registers<Rule::kTrimmedMean>(launch, rows, whole[4], out);
  if (!fits) std::abort();
}
