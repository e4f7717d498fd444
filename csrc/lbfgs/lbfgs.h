#pragma once

#include <math.h>

#include <cstdint>

#include "common/host_device.h"
#include "common/team.h"
#include "lbfgs/history.h"

// Compact L-BFGS (docs/algorithm.md, "One round", step 2), one client at a time.
//
// Letters of the paper:  S -> dw,  Y -> dg,  mu -> scale,  x = model - last_model,  g = last_update.
//   B x = mu x - [Y  mu S] M^-1 [Y'x ; mu S'x],    M = [[-D, L'], [L, mu S'S]]
// with A = S'Y, D = diag(A) and L the strictly lower part of A. (If L had the diagonal, B s = y would not hold.)
//
// The formula needs only inner products. So a client with p pairs is described by its Gram matrix over the rows
//   0 .. p-1: y    p .. 2p-1: s    2p: x
// as a packed lower triangle, followed by the number g.g. All in float64.

namespace secureafl::SECUREAFL_KIND {

// Relative rounding error of an estimate: error = rounding * (sum of the norms of its terms). kWideRounding: summed in
// float64. kFloatRounding: factors and sums in float32.
constexpr double kWideRounding = 1e-13, kFloatRounding = 2e-6;
constexpr double kLongest = 1e38;  // bound on the terms of an estimate; the largest float is 3.4e38

SECUREAFL_BOTH int rows_of(int pairs) { return 2 * pairs + 1; }
SECUREAFL_BOTH int packed(int row, int column) {
  const int high = row > column ? row : column, low = row + column - high;
  return high * (high + 1) / 2 + low;
}
SECUREAFL_BOTH int products_of(int pairs) { return packed(rows_of(pairs), 0) + 1; }

// One coordinate of one row of the Gram matrix; row 2p + 1 is g.
template <typename T>
SECUREAFL_FN double row_value(const History<T>& h, int64_t k, int64_t pairs, int64_t row, int64_t c) {
  if (row < pairs) return h.y(k, row)[c];
  if (row < 2 * pairs) return h.s(k, row - pairs)[c];
  if (row == 2 * pairs) return static_cast<double>(h.model[c]) - h.w(k)[c];
  return h.g(k)[c];
}

// Solves `size` linear equations in place: a (size, size + 1), right-hand side last. Gauss-Jordan with partial
// pivoting. Returns false, in every thread of the team, if the matrix is singular or not finite.
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
    // Columns up to `step` are not read again: they keep the row factors until the end.
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

// One element of the symmetric matrix M.
SECUREAFL_FN double middle_matrix(const double* gram, int pairs, double scale, int row, int column) {
  const int high = row > column ? row : column, low = row + column - high;
  if (low >= pairs) return scale * gram[packed(high, low)];                     // mu S'S
  if (high < pairs) return high == low ? -gram[packed(high + pairs, low)] : 0;  // -D
  return high - pairs > low ? gram[packed(high, low)] : 0;                      // L, strictly lower
}

// Number of doubles of scratch that `coefficients` needs.
SECUREAFL_BOTH int scratch_of(int pairs) { return 2 * pairs * (2 * pairs + 1); }

// Status of the correction of a client. Same order as ops.STATUS in Python.
enum class Status : int32_t {
  kAbsent,     // the client takes no part
  kNoPairs,    // the estimate is g
  kCorrected,  // g + B x
  kCapped,     // g + B x, with B x scaled down to the norm trust * |g|
  kFallback,   // singular or not finite: the estimate is g
};

SECUREAFL_BOTH bool is_corrected(Status status) { return status == Status::kCorrected || status == Status::kCapped; }

// From the Gram matrix to out (2 pairs + 1): the factors of y, s and x in the correction B x, whose norm is capped at
// trust * |g|. a (2 pairs, 2 pairs + 1): scratch for M and its right-hand side. rounding: kWideRounding or
// kFloatRounding.
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

  // |B x|^2 is a quadratic form in the same products, so no second pass over d is needed. Now a (2, 2 pairs + 1): the
  // contribution of each row to |B x|^2, and to the sum of the norms of all terms (reach).
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
  // Nearly dependent pairs give large terms that cancel, and rounding errors remain. If the error is not small against
  // the result, the cap includes it.
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
