#pragma once

#include "common/launch.cuh"
#include "coordinate_wise/in_registers.cuh"
#include "coordinate_wise/in_shared.cuh"

namespace secureafl::cuda {

// Picks the kernel for a rule.      out (d)
template <typename Rows, typename out_t>
void reduce_columns(const Launcher& launch, const Rows& rows, Rule rule, int64_t trim, out_t* out) {
  if constexpr (Rows::kStored && sizeof(typename Rows::value_type) == 4) {
    if (rule == Rule::kMedian && reduce_in_registers<Rule::kMedian>(launch, rows, trim, out)) return;
    if (rule == Rule::kTrimmedMean && reduce_in_registers<Rule::kTrimmedMean>(launch, rows, trim, out)) return;
  }
  constexpr int kThreads = 256;
  constexpr int64_t kMaxBlocks = 1 << 20;
  const int64_t most = launch.max_shared_bytes();
  const auto bytes = [&](int bits) {
    return rows.n * ((1 << bits) | 1) * static_cast<int64_t>(sizeof(Key<typename Rows::value_type>));
  };
  int bits = 5;
  while (bits > 0 && bytes(bits) > most / 2) --bits;  // two blocks per multiprocessor if possible
  if (bytes(bits) > most) {
    throw std::runtime_error("secureafl: a column of " + std::to_string(rows.n) +
                             " rows does not fit this GPU's shared memory of " + std::to_string(most) + " bytes");
  }
  const int64_t tiles = (rows.d + (1 << bits) - 1) >> bits;
  launch(reduce_columns_kernel<Rows, out_t>, tiles < kMaxBlocks ? tiles : kMaxBlocks, kThreads, bytes(bits), rows, rule,
         trim, bits, out);
}

}  // namespace secureafl::cuda
