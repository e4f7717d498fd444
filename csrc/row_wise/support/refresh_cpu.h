#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "common/team.h"
#include "row_wise/kinship/kinship.h"
#include "row_wise/support/refresh.h"

namespace secureafl::cpu {

// Memory of a refresh. Allocate it before the round: a round that runs out of memory must change nothing.
struct RefreshScratch {
  std::vector<double> tables;      // of RefreshTables
  std::unique_ptr<bool[]> counts;  // (n): clients that count

  explicit RefreshScratch(int64_t n)
      : tables(static_cast<size_t>(RefreshTables::doubles(n, Solo::kDown))), counts(new bool[static_cast<size_t>(n)]) {}
};

// From the averages of `args` to the shifts.
inline void refresh_clients(const KinRound& r, Refresh args, RefreshScratch& scratch) {
  for (int64_t k = 0; k < r.n; ++k) scratch.counts[k] = r.presence.counts(r.seen[k], k);
  args.counts = scratch.counts.get();
  refresh(Solo(), args, RefreshTables({scratch.tables.data(), nullptr, 0}, r.n, Solo::kDown));
}

}  // namespace secureafl::cpu
