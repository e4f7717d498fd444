#pragma once

#include <cstdint>

#include "common/host_device.h"

// A refresh of rule "support" (reasons: secureafl_ext/rules/support.py): from the averaged inner products of the
// clients to the shift of each client's weight. Both devices share this code.
//   M   the inner products (n, n) of the clients that count
//   b   coefficients (n) of a vector in the space of updates: the sum of b_k (mean update of client k)

namespace secureafl::SECUREAFL_KIND {

constexpr int kStages = 3;  // searches for directions: the crowd's, the odd ones, the crowd's again

// The constants of secureafl_ext/rules/support.py, in the same order.
struct SupportBounds {
  double cut, crowd, crowd_least, odd, odd_least, kin, short_square, few_kin, short_level, fade, again, most;
  double group, group_spreads, group_least, group_end, group_left, opposed, opposed_end, fill, apart, apart_end;
};

struct Refresh {
  int64_t n;
  SupportBounds bounds;
  const double* means;  // (n, n): averaged inner products of the clients' updates
  const bool* counts;   // (n): clients that count
  double* basis;        // (kStages, n, n): eigenvectors of the last refresh, in columns
  double* shift;        // (n): the result
};

// Memory for the tables of a refresh: `quick` (room) as far as it goes, a GPU's shared memory, then `slow`.
struct RefreshMemory {
  double* slow;
  double* quick;
  int64_t room;

  SECUREAFL_FN double* take(int64_t count) {
    double*& from = count <= room ? quick : slow;
    if (count <= room) room -= count;
    from += count;
    return from - count;
  }
};

// Scratch memory of a refresh. The tables that are read most often come first.
struct RefreshTables {
  double* parts;      // (parts_of(rows))
  double* rotations;  // (2, n)
  double* values;     // (n)
  double* offsets;    // (n): how far each direction is shifted
  double* kept;       // (n): the share of its weight that a client keeps
  double* matrix;     // (n, n)
  double* vectors;    // (n, n): eigenvectors, one in each column
  double* work;       // (n, n)
  double* along;      // (n, n): coefficients of the directions, one in each column; zero if it is not cut
  double* loadings;   // (n, n): of the clients along the directions
  double* rest;       // (n, n): M without the directions that were cut
  double* remaining;  // (n, n): maps coefficients to those of the part that is orthogonal to all cut directions
  double* kin;        // (n, n): I - W, a client minus the mean of its kin

  // rows: Team::kDown
  SECUREAFL_FN RefreshTables(RefreshMemory memory, int64_t n, int64_t rows)
      : parts(memory.take(parts_of(rows))),
        rotations(memory.take(2 * n)),
        values(memory.take(n)),
        offsets(memory.take(n)),
        kept(memory.take(n)),
        matrix(memory.take(n * n)),
        vectors(memory.take(n * n)),
        work(memory.take(n * n)),
        along(memory.take(n * n)),
        loadings(memory.take(n * n)),
        rest(memory.take(n * n)),
        remaining(memory.take(n * n)),
        kin(memory.take(n * n)) {}
  SECUREAFL_BOTH static int64_t parts_of(int64_t rows) { return rows > 8 ? rows : 8; }
  SECUREAFL_BOTH static int64_t doubles(int64_t n, int64_t rows) { return 8 * n * n + 5 * n + parts_of(rows); }
};

}  // namespace secureafl::SECUREAFL_KIND
