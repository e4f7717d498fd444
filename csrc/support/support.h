#pragma once

#include <cstdint>

#include "common/host_device.h"

// A refresh of rule "support" (reasons: secureafl_ext/rules/support.py): from the averaged inner products of the
// clients to the shift of each client's weight. Both devices share this code. M: the inner products of the clients that
// count; a vector x in the space of updates is written by its coefficients b (n), x = sum of b_k (mean update of client
// k).

namespace secureafl::SECUREAFL_KIND {

constexpr int kStages = 3;  // the crowd, the odd ones, what is left of the crowd

// The constants of secureafl_ext/rules/support.py, in the same order.
struct SupportBounds {
  double cut, crowd, crowd_least, odd, odd_least, kin, short_square, few_kin, short_level, fade, again, most;
  double group, group_spreads, group_end, group_left;
};

struct Refresh {
  int64_t n;
  SupportBounds bounds;
  const double* means;  // (n, n): averaged inner products of the clients' updates
  const bool* counts;   // (n): clients that count
  double* basis;        // (kStages, n, n): eigenvectors of the last refresh, in columns
  double* shift;        // (n): the result
};

// Scratch memory of a refresh.
struct RefreshTables {
  double* rest;       // (n, n): M without the directions that were cut
  double* remaining;  // (n, n): maps coefficients to those of the part that is orthogonal to all cut directions
  double* kin;        // (n, n): I - W, a client minus the mean of its kin
  double* matrix;     // (n, n)
  double* work;       // (n, n)
  double* along;      // (n, n): coefficients of the directions, one in each column; zero if it is not cut
  double* loadings;   // (n, n): of the clients along the directions
  double* rotations;  // (2, n)
  double* values;     // (n)
  double* offsets;    // (n): how far each direction is shifted
  double* kept;       // (n): the share of its weight that a client keeps, by the size of its group
  double* parts;      // (kParts)

  static constexpr int kParts = 64;
  SECUREAFL_FN RefreshTables(double* at, int64_t n)
      : rest(at),
        remaining(at + n * n),
        kin(at + 2 * n * n),
        matrix(at + 3 * n * n),
        work(at + 4 * n * n),
        along(at + 5 * n * n),
        loadings(at + 6 * n * n),
        rotations(at + 7 * n * n),
        values(rotations + 2 * n),
        offsets(values + n),
        kept(offsets + n),
        parts(kept + n) {}
  SECUREAFL_BOTH static int64_t doubles(int64_t n) { return 7 * n * n + 5 * n + kParts; }
};

}  // namespace secureafl::SECUREAFL_KIND
