#pragma once

#include <math.h>

#include <cstdint>

#include "common/host_device.h"

// Eigenvectors of a small symmetric matrix by Jacobi rotations: n / 2 of them at a time, in disjoint pairs.

namespace secureafl::SECUREAFL_KIND {

// out (n, n) = a b. kTransposed: a is read by columns, a^T b.
template <bool kTransposed, typename Team>
SECUREAFL_FN void multiply(const Team& team, const double* a, const double* b, double* out, int n) {
  SECUREAFL_NO_UNROLL
  for (int64_t at = team.rank(); at < static_cast<int64_t>(n) * n; at += Team::kSize) {
    const int i = static_cast<int>(at / n), j = static_cast<int>(at % n);
    double sum = 0;
    for (int k = 0; k < n; ++k) sum += (kTransposed ? a[k * n + i] : a[i * n + k]) * b[k * n + j];
    out[at] = sum;
  }
  team.sync();
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

// The column that is paired with p in step `turn` of a sweep: p + q = turn (mod m) with m odd. After m steps every pair
// had its turn. Returns p itself if it has no partner.
SECUREAFL_FN int partner_of(int p, int turn, int n) {
  const int m = n | 1, q = (turn - p + m) % m;
  return q < n ? q : p;
}

// One step: all pairs of `turn` are rotated. matrix (n, n) = basis^T x basis stays symmetric; rotations (2, n) scratch
template <typename Team>
SECUREAFL_FN void rotate_pairs(const Team& team, double* matrix, double* basis, double* rotations, int turn, int n) {
  double *cosines = rotations, *sines = rotations + n;
  SECUREAFL_NO_UNROLL
  for (int p = team.rank(); p < n; p += Team::kSize) {
    const int q = partner_of(p, turn, n), low = p < q ? p : q, high = p < q ? q : p;
    const Rotation r = p == q ? Rotation{1, 0}
                              : rotation_of(matrix[low * n + low], matrix[high * n + high], matrix[low * n + high]);
    cosines[p] = r.cosine;
    sines[p] = p <= q ? r.sine : -r.sine;
  }
  team.sync();
  // Each thread owns the entries of two pairs: rows p and q, columns r and s. Pairs are named by their first.
  SECUREAFL_NO_UNROLL
  for (int64_t at = team.rank(); at < static_cast<int64_t>(n) * n; at += Team::kSize) {
    const int p = static_cast<int>(at / n), r = static_cast<int>(at % n);
    const int q = partner_of(p, turn, n), s = partner_of(r, turn, n);
    if (p > q || r > s) continue;
    const double cp = cosines[p], sp = sines[p], cr = cosines[r], sr = sines[r];
    double a = matrix[p * n + r], b = matrix[p * n + s], c = matrix[q * n + r], d = matrix[q * n + s];
    if (r != s) {  // columns
      const double a1 = cr * a - sr * b, c1 = cr * c - sr * d;
      b = sr * a + cr * b;
      d = sr * c + cr * d;
      a = a1;
      c = c1;
    }
    if (p != q) {  // rows
      const double a1 = cp * a - sp * c, b1 = cp * b - sp * d;
      c = sp * a + cp * c;
      d = sp * b + cp * d;
      a = a1;
      b = b1;
    }
    matrix[p * n + r] = a;
    matrix[p * n + s] = r == s ? a : b;
    matrix[q * n + r] = p == q ? a : c;
    matrix[q * n + s] = r == s ? (p == q ? a : c) : p == q ? b : d;
  }
  SECUREAFL_NO_UNROLL
  for (int64_t at = team.rank(); at < static_cast<int64_t>(n) * n; at += Team::kSize) {
    const int k = static_cast<int>(at / n), p = static_cast<int>(at % n), q = partner_of(p, turn, n);
    if (p >= q) continue;
    const double x = basis[k * n + p], y = basis[k * n + q];
    basis[k * n + p] = cosines[p] * x - sines[p] * y;
    basis[k * n + q] = sines[p] * x + cosines[p] * y;
  }
  team.sync();
}

// The sum of one number per thread, for all threads. parts (Team::kDown + 1) scratch
template <typename Team>
SECUREAFL_FN double sum_all(const Team& team, double value, double* parts) {
  value = team.sum_across(value);
  if (team.across() == 0) parts[team.down()] = value;
  team.sync();
  if (team.rank() == 0) {
    double sum = 0;
    for (int i = 0; i < Team::kDown; ++i) sum += parts[i];
    parts[Team::kDown] = sum;
  }
  team.sync();
  const double sum = parts[Team::kDown];
  team.sync();  // parts may be written again
  return sum;
}

// Turns the columns of basis (n, n) into eigenvectors of `symmetric` (n, n), starting from what they are. matrix: basis^T
// symmetric basis, its diagonal the eigenvalues. work (n, n), rotations (2, n), parts: scratch
template <typename Team>
SECUREAFL_FN void diagonalise(const Team& team, const double* symmetric, double* basis, double* matrix, double* work,
                              double* rotations, double* parts, int n) {
  constexpr int kMostSweeps = 16;  // from any start; from that of the last refresh two or three are enough
  constexpr double kSmall = 1e-22;  // of the squares of all entries
  // Rounding errors of many refreshes would make the basis less and less orthogonal: basis (3 - basis^T basis) / 2.
  multiply<true>(team, basis, basis, matrix, n);
  multiply<false>(team, basis, matrix, work, n);
  SECUREAFL_NO_UNROLL
  for (int64_t at = team.rank(); at < static_cast<int64_t>(n) * n; at += Team::kSize) {
    basis[at] = 1.5 * basis[at] - 0.5 * work[at];
  }
  team.sync();
  multiply<false>(team, symmetric, basis, work, n);
  multiply<true>(team, basis, work, matrix, n);
  SECUREAFL_NO_UNROLL
  for (int sweep = 0; sweep < kMostSweeps; ++sweep) {
    double all = 0, off = 0;
    SECUREAFL_NO_UNROLL
    for (int64_t at = team.rank(); at < static_cast<int64_t>(n) * n; at += Team::kSize) {
      const double square = matrix[at] * matrix[at];
      all += square;
      off += at / n == at % n ? 0 : square;
    }
    all = sum_all(team, all, parts);
    off = sum_all(team, off, parts);
    if (!(off > kSmall * all)) break;
    SECUREAFL_NO_UNROLL
    for (int turn = 0; turn < (n | 1); ++turn) rotate_pairs(team, matrix, basis, rotations, turn, n);
  }
}

}  // namespace secureafl::SECUREAFL_KIND
