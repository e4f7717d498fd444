#pragma once

#include <math.h>

#include <cstdint>

#include "common/host_device.h"

namespace secureafl::SECUREAFL_KIND {

// Memory that `choose` works in, near its threads.
struct Table {
  static constexpr int kParts = 32, kTotals = 3, kFound = 9;
  double* norms;            // (n): of the rows as this round has them
  double* lengths;          // (n): of the last updates, then of the mean ones
  double* values;           // (n): what a median is taken of, or the pull of each client
  double* centre_product;   // (n): of the mean updates along the centre
  double* centre_distance;  // (n): their distances to it
  double* centred_kin;      // (n): kin of each client once the centre is taken off
  double* parts;            // (kTotals, kParts): of sums over all threads
  double* shared_results;   // (kFound): what one thread tells the others
  uint8_t* flags;           // (n): of the following

  enum : uint8_t { kTakesPart = 1, kKnown = 2, kKept = 4, kBoth = 8 };

  SECUREAFL_FN Table(double* at, int64_t n)
      : norms(at),
        lengths(at + n),
        values(at + 2 * n),
        centre_product(at + 3 * n),
        centre_distance(at + 4 * n),
        centred_kin(at + 5 * n),
        parts(at + 6 * n),
        shared_results(parts + kTotals * kParts),
        flags(reinterpret_cast<uint8_t*>(shared_results + kFound)) {}
  SECUREAFL_BOTH static int64_t doubles(int64_t n) { return 6 * n + kTotals * kParts + kFound + (n + 7) / 8; }
};

// Sums over the team of a few numbers of each, below 2^53, in its first thread.
template <typename Team, int kCount>
SECUREAFL_FN void totals(const Team& team, int64_t (&values)[kCount], const Table& table) {
  static_assert(Team::kDown <= Table::kParts && kCount <= Table::kTotals, "a place for each part");
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

// Median of those of values (n) that are finite; inf if none is. middle (2) is scratch. By rank: a sort would have the
// threads meet more often.
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
