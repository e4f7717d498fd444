#pragma once

#include <math.h>

#include <cstdint>

#include "common/host_device.h"

// Eigenvectors of a small symmetric matrix by Jacobi rotations: n / 2 of them at a time, in disjoint pairs.

namespace secureafl::SECUREAFL_KIND {

// out (n, n) = a b. kTransposed: a is read by columns, a^T b.
template <bool kTransposed, typename Team>
SECUREAFL_FN void multiply(const Team& team, const double* a, const double* b, double* out, int n) {
  if constexpr (Team::kSize == 1) {  // row by row, which vectorises
    for (int i = 0; i < n; ++i) {
      double* row = out + i * n;
      for (int j = 0; j < n; ++j) row[j] = 0;
      for (int k = 0; k < n; ++k) {
        const double factor = kTransposed ? a[k * n + i] : a[i * n + k];
        for (int j = 0; j < n; ++j) row[j] += factor * b[k * n + j];
      }
    }
  } else {
    SECUREAFL_NO_UNROLL
    for (int at = team.rank(); at < n * n; at += Team::kSize) {
      const int i = at / n, j = at % n;
      double sum = 0;
      for (int k = 0; k < n; ++k) sum += (kTransposed ? a[k * n + i] : a[i * n + k]) * b[k * n + j];
      out[at] = sum;
    }
    team.sync();
  }
}

struct Rotation {
  double cosine, sine;  // of the first of a pair; the second has -sine
};

// The rotation that makes the product of two columns zero. own, other: their squares; both: their product.
SECUREAFL_FN Rotation rotation_of(double own, double other, double both) {
  if (both == 0) return {1, 0};
  const double slope = (other - own) / (2 * both);
  const double tangent = (slope < 0 ? -1 : 1) / (fabs(slope) + sqrt(1 + slope * slope));
  const double cosine = 1 / sqrt(1 + tangent * tangent);
  return {cosine, tangent * cosine};
}

// Two columns that are rotated against each other; one column alone if second is not below n.
struct Pair {
  int first, second;
};

// Pair `index` of step `turn`, 0 <= index <= n / 2: columns p and q with p + q = 2 turn (mod m), m odd. In m steps
// every pair has its turn, and in a step every column is in one pair. A number that is not below n stands for no
// column.
SECUREAFL_FN Pair pair_of(int index, int turn, int n) {
  const int m = n | 1, up = (turn + index) % m, down = (turn - index + m) % m;
  const int low = up < down ? up : down, high = up < down ? down : up;
  return {low, low == high ? n : high};
}

// One step: all pairs of `turn` are rotated. matrix (n, n) = basis^T x basis stays symmetric; rotations (2, n) scratch
template <typename Team>
SECUREAFL_FN void rotate_pairs(const Team& team, double* matrix, double* basis, double* rotations, int turn, int n) {
  const int pairs = n / 2 + 1;
  double *cosines = rotations, *sines = rotations + n;  // by index of the pair
  SECUREAFL_NO_UNROLL
  for (int i = team.rank(); i < pairs; i += Team::kSize) {
    const Pair at = pair_of(i, turn, n);
    Rotation r{1, 0};
    if (at.second < n) {
      const double* row = matrix + at.first * n;
      r = rotation_of(row[at.first], matrix[at.second * n + at.second], row[at.second]);
    }
    cosines[i] = r.cosine;
    sines[i] = r.sine;
  }
  team.sync();
  // Each task owns the entries of two pairs: rows p and q, columns r and s.
  SECUREAFL_NO_UNROLL
  for (int task = team.rank(); task < pairs * pairs; task += Team::kSize) {
    const int i = task / pairs, j = task % pairs;
    const Pair rows = pair_of(i, turn, n), columns = pair_of(j, turn, n);
    const bool down = rows.second < n, right = columns.second < n;
    if (rows.first >= n || columns.first >= n) continue;
    double *top = matrix + rows.first * n, *bottom = matrix + rows.second * n;
    const double cp = cosines[i], sp = sines[i], cr = cosines[j], sr = sines[j];
    const double a = top[columns.first], b = right ? top[columns.second] : 0;
    const double c = down ? bottom[columns.first] : 0, d = down && right ? bottom[columns.second] : 0;
    const double a1 = cr * a - sr * b, b1 = sr * a + cr * b, c1 = cr * c - sr * d, d1 = sr * c + cr * d;
    top[columns.first] = cp * a1 - sp * c1;
    if (right) top[columns.second] = cp * b1 - sp * d1;
    if (down) bottom[columns.first] = sp * a1 + cp * c1;
    if (down && right) bottom[columns.second] = sp * b1 + cp * d1;
  }
  SECUREAFL_NO_UNROLL
  for (int task = team.rank(); task < pairs * n; task += Team::kSize) {
    const int k = task / pairs, i = task % pairs;
    const Pair at = pair_of(i, turn, n);
    if (at.second >= n) continue;
    const double x = basis[k * n + at.first], y = basis[k * n + at.second];
    basis[k * n + at.first] = cosines[i] * x - sines[i] * y;
    basis[k * n + at.second] = sines[i] * x + cosines[i] * y;
  }
  team.sync();
}

// The sum of one number per thread, for all threads. parts (Team::kDown) scratch
template <typename Team>
SECUREAFL_FN double sum_all(const Team& team, double value, double* parts) {
  value = team.sum_across(value);
  if (team.across() == 0) parts[team.down()] = value;
  team.sync();
  double sum = 0;
  for (int i = team.across(); i < Team::kDown; i += Team::kAcross) sum += parts[i];
  sum = team.sum_across(sum);
  team.sync();  // parts may be written again
  return sum;
}

// Whether matrix (n, n) = basis^T x basis has all eigenvectors of x with an eigenvalue above `least` in its columns:
// entries in their rows and columns are small, and the rest has no eigenvalue above `least`. A symmetric matrix has
// none above its largest diagonal entry plus the norm of the others. Eigenvectors of smaller ones are not needed,
// and would take most of the sweeps, because their eigenvalues are nearly equal. parts: scratch
template <typename Team>
SECUREAFL_FN bool is_diagonal(const Team& team, const double* matrix, double least, double* parts, int n) {
  constexpr double kSmall = 1e-18;  // of the squares of all entries
  double all = 0, off = 0, below = 0, largest = -INFINITY;
  SECUREAFL_NO_UNROLL
  for (int at = team.rank(); at < n * n; at += Team::kSize) {
    const int i = at / n, j = at % n;
    const double square = matrix[at] * matrix[at];
    const bool used = matrix[i * n + i] > least || matrix[j * n + j] > least;
    all += square;
    if (i != j) (used ? off : below) += square;
    if (i == j && !used) largest = fmax(largest, matrix[at]);
  }
  all = sum_all(team, all, parts);
  off = sum_all(team, off, parts);
  below = sum_all(team, below, parts);
  // Counts threads whose own largest entry fails the bound: a maximum over all threads would need another reduction.
  const double beyond = sum_all(team, largest + sqrt(below) > least ? 1.0 : 0.0, parts);
  return !(off > kSmall * all) && (beyond == 0 || !(below > kSmall * all));
}

// Turns the columns of basis (n, n) into eigenvectors of `symmetric` (n, n), starting from what they are: those of
// eigenvalues above `least`. matrix: basis^T symmetric basis, its diagonal the eigenvalues. work (n, n), rotations
// (2, n), parts: scratch
template <typename Team>
SECUREAFL_FN void diagonalise(const Team& team, const double* symmetric, double least, double* basis, double* matrix,
                              double* work, double* rotations, double* parts, int n) {
  constexpr int kMostSweeps = 16;  // from any start
  // Rounding errors of many refreshes would make the basis less and less orthogonal: basis (3 - basis^T basis) / 2.
  multiply<true>(team, basis, basis, matrix, n);
  multiply<false>(team, basis, matrix, work, n);
  SECUREAFL_NO_UNROLL
  for (int at = team.rank(); at < n * n; at += Team::kSize) {
    basis[at] = 1.5 * basis[at] - 0.5 * work[at];
  }
  team.sync();
  multiply<false>(team, symmetric, basis, work, n);
  multiply<true>(team, basis, work, matrix, n);
  SECUREAFL_NO_UNROLL
  for (int sweep = 0; sweep < kMostSweeps && !is_diagonal(team, matrix, least, parts, n); ++sweep) {
    SECUREAFL_NO_UNROLL
    for (int turn = 0; turn < (n | 1); ++turn) rotate_pairs(team, matrix, basis, rotations, turn, n);
  }
}

}  // namespace secureafl::SECUREAFL_KIND
