#pragma once

#include <math.h>

#include <cstdint>

#include "common/host_device.h"

namespace secureafl::SECUREAFL_KIND {

// Scratch memory of `choose`; shared memory on a GPU.
struct Table {
  static constexpr int kParts = 32, kTotals = 9, kResults = 9;
  double* norms;            // (n): norms of the rows of this round
  double* lengths;          // (n): norms of the last updates; from select_clients on, of the mean updates
  double* values;           // (n): lists of Q (decide_arrival), then numbers whose median is needed, then others
  double* center_product;   // (n): products of the mean updates with their center
  double* center_distance;  // (n): distances of the mean updates to their center
  double* centered_kin;     // (n): number of kin of each client after subtracting the center, itself included
  double* parts;            // (kTotals, kParts): partial sums over threads
  double* shared_results;   // (kResults): results of one thread, read by all. 0, 1: median_of in choose; 2 .. 7:
                            // select_clients (2 before it: whether only known clients count); 8: update_center
  uint8_t* flags;           // (n): bits of the enum below; 0: takes no part

  // kUnknown stands alone: present, but with too few similarities. `choose` turns it into kTakesPart or 0. kBoth: kept
  // by its group seen from the origin and by that seen from the center.
  enum : uint8_t { kTakesPart = 1, kKnown = 2, kKept = 4, kBoth = 8, kUnknown = 16 };

  SECUREAFL_FN Table(double* at, int64_t n)
      : norms(at),
        lengths(at + n),
        values(at + 2 * n),
        center_product(at + 3 * n),
        center_distance(at + 4 * n),
        centered_kin(at + 5 * n),
        parts(at + 6 * n),
        shared_results(parts + kTotals * kParts),
        flags(reinterpret_cast<uint8_t*>(shared_results + kResults)) {}
  SECUREAFL_BOTH static int64_t doubles(int64_t n) { return 6 * n + kTotals * kParts + kResults + (n + 7) / 8; }
};

// Team-wide sums of kCount integers per thread, below 2^53. Only the first thread gets the results.
template <typename Team, int kCount>
SECUREAFL_FN void totals(const Team& team, int64_t (&values)[kCount], const Table& table) {
  static_assert(Team::kDown <= Table::kParts && kCount <= Table::kTotals, "room for every partial sum");
  for (int which = 0; which < kCount; ++which) {
    const int64_t part = team.sum_across(values[which]);
    if (team.across() == 0) table.parts[which * Table::kParts + team.down()] = static_cast<double>(part);
  }
  team.sync();
  for (int which = 0; which < kCount && team.rank() == 0; ++which) {
    double sum = 0;
    SECUREAFL_NO_UNROLL
    for (int i = 0; i < Team::kDown; ++i) sum += table.parts[which * Table::kParts + i];
    values[which] = static_cast<int64_t>(sum);
  }
}

template <typename Team>
SECUREAFL_FN int64_t total(const Team& team, int64_t value, const Table& table) {
  int64_t values[] = {value};
  totals(team, values, table);
  return values[0];
}

// Median of the finite values (n); inf if none is finite. middle (2) is scratch. Computed by counting ranks: a sort
// would need more barriers.
template <typename Team>
SECUREAFL_FN double median_of(const Team& team, const double* values, int n, double* middle) {
  SECUREAFL_NO_UNROLL
  for (int i = team.down(); i < n; i += Team::kDown) {
    const double value = values[i];
    int below = 0, count = 0;
    for (int k = team.across(); k < n; k += Team::kAcross) {
      below += values[k] < value || (values[k] == value && k < i);
      count += values[k] < INFINITY;
    }
    below = team.sum_across(below);
    count = team.sum_across(count);
    if (team.across() != 0) continue;
    if (below == (count > 0 ? count - 1 : 0) / 2) middle[0] = value;
    if (below == count / 2) middle[1] = value;
  }
  team.sync();
  return (middle[0] + middle[1]) / 2;
}

}  // namespace secureafl::SECUREAFL_KIND
