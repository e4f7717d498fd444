#pragma once

#include <math.h>

#include <cstdint>

#include "common/host_device.h"
#include "common/team.h"
#include "lbfgs/history.h"

// Estimates from compact L-BFGS (spec: Algorithm 2), one client at a time.
//
// Paper's letters used here:  S -> dw,  Y -> dg,  mu -> scale,  x = model - last_model,  g = last_update.
//   B x = mu x - [Y  mu S] M^-1 [Y'x ; mu S'x],    M = [[-D, L'], [L, mu S'S]]
// with A = S'Y, D = diag(A) and L the strictly lower part of A: with the diagonal kept, B s = y breaks.
//
// Only inner products enter, so a client of p pairs is known by its Gram matrix over the rows
//   0 .. p-1: y    p .. 2p-1: s    2p: x
// packed by lower triangle, and the number g.g behind it. All in float64.

namespace secureafl::SECUREAFL_KIND {

// Rounding error of an estimate, in sums of the lengths of its terms: added up in float64, or in float32 by factors
// that are float32 too.
constexpr double kWideRounding = 1e-13, kFloatRounding = 2e-6;
constexpr double kLongest = 1e38;  // terms of an estimate stay below the largest float, 3.4e38

SECUREAFL_BOTH int rows_of(int pairs) { return 2 * pairs + 1; }
SECUREAFL_BOTH int packed(int row, int column) {
  const int high = row > column ? row : column, low = row + column - high;
  return high * (high + 1) / 2 + low;
}
SECUREAFL_BOTH int products_of(int pairs) { return packed(rows_of(pairs), 0) + 1; }

// One coordinate of one row of that Gram matrix, and of g at row 2p + 1.
template <typename T>
SECUREAFL_FN double row_value(const History<T>& h, int64_t k, int64_t pairs, int64_t row, int64_t c) {
  if (row < pairs) return h.y(k, row)[c];
  if (row < 2 * pairs) return h.s(k, row - pairs)[c];
  if (row == 2 * pairs) return static_cast<double>(h.model[c]) - h.w(k)[c];
  return h.g(k)[c];
}

// Solves in place the `size` equations of a (size, size + 1), right-hand side last: Gauss-Jordan with partial
// pivoting. False if singular or not finite; every member of the team returns the same.
template <typename Team>
SECUREAFL_FN bool solve(const Team& team, double* a, int size) {
  const int width = size + 1;
  SECUREAFL_NO_UNROLL
  for (int step = 0; step < size; ++step) {
    int pivot = step;
    double largest = fabs(a[step * width + step]);
    for (int row = step + 1; row < size; ++row) {
      const double here = fabs(a[row * width + step]);
      if (here > largest) pivot = row;
      if (here > largest) largest = here;
    }
    const double value = a[pivot * width + step];
    if (value == 0 || !isfinite(value)) return false;
    team.sync();
    SECUREAFL_NO_UNROLL
    for (int column = step + team.rank(); column < width; column += Team::kSize) {
      const double swapped = a[pivot * width + column];
      a[pivot * width + column] = a[step * width + column];
      a[step * width + column] = swapped / value;
    }
    team.sync();
    // Columns up to `step` are done with: they hold the factors of their rows until the end.
    SECUREAFL_NO_UNROLL
    for (int row = team.down(); row < size; row += Team::kDown) {
      if (row == step) continue;
      const double factor = a[row * width + step];
      SECUREAFL_NO_UNROLL
      for (int column = step + 1 + team.across(); column < width; column += Team::kAcross) {
        a[row * width + column] -= factor * a[step * width + column];
      }
    }
    team.sync();
  }
  return true;
}

// One element of the symmetric M.
SECUREAFL_FN double middle_matrix(const double* gram, int pairs, double scale, int row, int column) {
  const int high = row > column ? row : column, low = row + column - high;
  if (low >= pairs) return scale * gram[packed(high, low)];                     // mu S'S
  if (high < pairs) return high == low ? -gram[packed(high + pairs, low)] : 0;  // -D
  return high - pairs > low ? gram[packed(high, low)] : 0;                      // L, strictly lower
}

// Doubles of scratch that `coefficients` needs.
SECUREAFL_BOTH int scratch_of(int pairs) { return 2 * pairs * (2 * pairs + 1); }

// What became of a client's correction. Python knows these as ops.STATUS.
enum class Status : int32_t {
  kAbsent,     // takes no part
  kNoPairs,    // the estimate is g as it stands
  kCorrected,  // g + B x
  kCapped,     // g + B x shortened to trust * |g|
  kFallback,   // singular or not finite: g as it stands
};

SECUREAFL_BOTH bool is_corrected(Status status) { return status == Status::kCorrected || status == Status::kCapped; }

// Gram matrix -> out (2 pairs + 1): factors of y, s and x in the correction B x, its norm capped at trust * |g|.
// a (2 pairs, 2 pairs + 1) is scratch: M and its right-hand side. rounding: one of the two above.
template <typename Team>
SECUREAFL_FN Status coefficients(const Team& team, const double* gram, int pairs, double trust, double rounding,
                                 double* a, double* out) {
  if (pairs == 0) return Status::kNoPairs;
  const int size = 2 * pairs, width = size + 1, x = size;
  const double scale = gram[packed(size - 1, pairs - 1)] / gram[packed(size - 1, size - 1)];

  SECUREAFL_NO_UNROLL
  for (int row = team.down(); row < size; row += Team::kDown) {
    SECUREAFL_NO_UNROLL
    for (int column = team.across(); column < width; column += Team::kAcross) {
      a[row * width + column] = column < size ? middle_matrix(gram, pairs, scale, row, column)
                                              : (row < pairs ? 1 : scale) * gram[packed(x, row)];
    }
  }
  team.sync();
  if (!solve(team, a, size)) return Status::kFallback;

  SECUREAFL_NO_UNROLL
  for (int row = team.rank(); row < size; row += Team::kSize) {
    out[row] = -(row < pairs ? 1 : scale) * a[row * width + size];
  }
  if (team.rank() == 0) out[x] = scale;
  team.sync();

  // |B x|^2 is a quadratic form in the same products: no second pass over d. a (2, 2 pairs + 1): the part of each row
  // in it, and in the summed lengths of what B x is a sum of.
  SECUREAFL_NO_UNROLL
  for (int row = team.rank(); row <= size; row += Team::kSize) {
    double part = 0;
    SECUREAFL_NO_UNROLL
    for (int column = 0; column <= size; ++column) part += gram[packed(row, column)] * out[column];
    a[row] = out[row] * part;
    a[width + row] = fabs(out[row]) * sqrt(fmax(gram[packed(row, row)], 0.0));
  }
  team.sync();
  double square = 0, reach = 0;
  SECUREAFL_NO_UNROLL
  for (int row = 0; row <= size; ++row) {
    square += a[row];
    reach += a[width + row];
  }
  const double g_square = gram[packed(x + 1, 0)];
  if (!isfinite(square) || !isfinite(reach) || !isfinite(g_square)) return Status::kFallback;
  // Pairs that nearly depend on each other give long terms that cancel up to rounding errors. Where these are not small
  // against what is left, the cap counts them too.
  constexpr double kSmall = 0.01;
  const double exact = sqrt(fmax(square, 0.0)), error = rounding * reach, most = trust * sqrt(g_square);
  const double norm = error > kSmall * exact ? exact + error : exact;
  const double shortened = norm > most ? most / norm : 1.0;
  if (!(reach * shortened < kLongest)) return Status::kFallback;
  team.sync();
  if (!(norm > most)) return Status::kCorrected;
  SECUREAFL_NO_UNROLL
  for (int row = team.rank(); row <= size; row += Team::kSize) out[row] *= shortened;
  return Status::kCapped;
}

}  // namespace secureafl::SECUREAFL_KIND
