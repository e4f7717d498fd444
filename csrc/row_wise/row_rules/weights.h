#pragma once

#include <math.h>

#include <cstdint>

#include "common/host_device.h"
#include "row_wise/kinship/table.h"
#include "row_wise/row_rules/row_rules.h"

// The weights of the rows, from their inner products: the functions of secureafl_ext/rules/row_rules.py, in their
// order.

namespace secureafl::SECUREAFL_KIND {

constexpr int kPowerSteps = 32, kWeiszfeldSteps = 8;
constexpr double kSmoothing = 1e-6;

template <typename Team>
class RowWeights {
 public:
  // count: number of rows that take part (table.flags), at least 1    from_center (n + 2): products of the center with
  // the rows, with the update, with itself; centered_clip alone
  SECUREAFL_FN RowWeights(const Team& team, const RowRound& r, const Table& table, int count, const double* from_center)
      : weights(table.lengths),
        team_(team),
        r_(r),
        table_(table),
        n_(static_cast<int>(r.n)),
        count_(count),
        removed_(static_cast<int>(floor(r.remove * count))),
        from_center_(from_center) {}

  // Computes `weights`. Returns that of the center.
  SECUREAFL_FN double compute() const {
    if (r_.weighs == RowRule::kCenteredClip) return centered_clip();
    if (r_.weighs == RowRule::kKrum) krum();
    if (r_.weighs == RowRule::kSpectral) spectral();
    if (r_.weighs == RowRule::kGeometricMedian) geometric_median();
    return 0;
  }

  double* weights;  // (n): zero for rows that take no part

 private:
  // What each rule keeps in the scratch memory of table.h, (n) each. flags and norms have their usual meaning.
  //   table              geometric_median   centered_clip   spectral                    krum
  //   lengths            weights            weights         clip, then weights          weights
  //   values             of a median        of a median     of a median, then scaled    scores
  //   center_product     reach              reach           reach                       distances of a row (CPU)
  //   center_distance    pull               distance        along                       squares
  //   centered_kin                                          next, then the rank

  SECUREAFL_FN bool takes_part(int k) const { return table_.flags[k]; }
  SECUREAFL_FN double product(int i, int k) const { return r_.products[i * r_.n + k]; }
  SECUREAFL_FN static double clip_to(double norm, double bound) { return norm > bound ? bound / norm : 1; }

  // Calls each(k) for the rows of this thread, then waits for all threads.
  template <typename Each>
  SECUREAFL_FN void for_rows(const Each& each) const {
    SECUREAFL_NO_UNROLL
    for (int k = team_.rank(); k < n_; k += Team::kSize) each(k);
    team_.sync();
  }

  // Sum of value(k) over the rows that take part.
  template <typename Value>
  SECUREAFL_FN double sum(const Value& value) const {
    double sums[] = {0};
    SECUREAFL_NO_UNROLL
    for (int k = team_.rank(); k < n_; k += Team::kSize) sums[0] += takes_part(k) ? value(k) : 0;
    team_.sum_all(sums);
    return sums[0];
  }

  // Calls each(i, sum of value(i, k) over the rows k that take part) for every row i that does, once per row.
  template <typename Value, typename Each>
  SECUREAFL_FN void for_row_sums(const Value& value, const Each& each) const {
    SECUREAFL_NO_UNROLL
    for (int i = team_.down(); i < n_; i += Team::kDown) {
      double total = 0;
      for (int k = team_.across(); k < n_; k += Team::kAcross) {
        total += takes_part(i) && takes_part(k) ? value(i, k) : 0;
      }
      total = team_.sum_across(total);
      if (team_.across() == 0 && takes_part(i)) each(i, total);
    }
    team_.sync();
  }

  // reach (n): the product of every row with the sum of all rows times x (n)
  SECUREAFL_FN void multiply(const double* x, double* reach) const {
    for_row_sums([&](int i, int k) { return product(i, k) * x[k]; }, [&](int i, double total) { reach[i] = total; });
  }

  // Median of the values (n) of the rows that take part.
  SECUREAFL_FN double median(const double* values) const {
    for_rows([&](int k) { table_.values[k] = takes_part(k) ? values[k] : INFINITY; });
    const double middle = median_of(team_, table_.values, n_, table_.shared_results);
    team_.sync();  // the next call may overwrite the results
    return middle;
  }

  SECUREAFL_FN void geometric_median() const {
    double *reach = table_.center_product, *pull = table_.center_distance;
    const double middle = median(table_.norms), least = fmax(kSmoothing * middle, 1e-100);
    for_rows([&](int k) { weights[k] = takes_part(k) ? clip_to(table_.norms[k], middle) / count_ : 0; });
    for (int step = 0; step < kWeiszfeldSteps; ++step) {
      multiply(weights, reach);
      const double square = sum([&](int k) { return weights[k] * reach[k]; });
      for_rows([&](int k) {
        const double distance = sqrt(fmax(product(k, k) - 2 * reach[k] + square, 0.0));
        pull[k] = takes_part(k) ? 1 / fmax(distance, least) : 0;
      });
      const double all = sum([&](int k) { return pull[k]; });
      for_rows([&](int k) { weights[k] = pull[k] / all; });
    }
  }

  SECUREAFL_FN double centered_clip() const {
    double *reach = table_.center_product, *distance = table_.center_distance;
    double of_center = 1;
    for_rows([&](int k) { weights[k] = 0; });
    SECUREAFL_NO_UNROLL
    for (int64_t i = 0; i < r_.iterations; ++i) {
      multiply(weights, reach);
      for_rows([&](int k) { reach[k] += takes_part(k) ? from_center_[k] * of_center : 0; });
      const double center_reach =
          sum([&](int k) { return from_center_[k] * weights[k]; }) + from_center_[n_ + 1] * of_center;
      const double square = sum([&](int k) { return weights[k] * reach[k]; }) + of_center * center_reach;
      for_rows([&](int k) { distance[k] = sqrt(fmax(product(k, k) - 2 * reach[k] + square, 0.0)); });
      const double radius = r_.radius < 0 ? median(distance) : r_.radius;
      const auto pull = [&](int k) { return clip_to(distance[k], radius) / count_; };
      const double left = 1 - sum(pull);
      for_rows([&](int k) { weights[k] = takes_part(k) ? weights[k] * left + pull(k) : 0; });
      of_center *= left;
    }
    return of_center;
  }

  SECUREAFL_FN void spectral() const {
    double *clip = weights, *reach = table_.center_product, *along = table_.center_distance,
           *next = table_.centered_kin;
    const double middle = median(table_.norms), share = 1.0 / count_;
    double* scaled = table_.values;  // after the median
    for_rows([&](int k) { clip[k] = clip_to(table_.norms[k], middle); });
    multiply(clip, reach);
    for_rows([&](int k) { reach[k] *= clip[k] * share; });  // products with the mean of the clipped rows
    const double square = share * sum([&](int k) { return reach[k]; });
    const double trace = sum([&](int k) { return product(k, k) * clip[k] * clip[k] - 2 * reach[k] + square; });
    // Scaled so, the top eigenvalue lies between 1 / n and 1, and no step needs to normalize.
    const double scale = trace > 0 ? 1 / trace : 1;
    // The start is not constant (centering maps that to zero), and not a row (an attacker could choose it).
    for_rows([&](int k) { along[k] = cos(1.0 + k); });
    for (int step = 0; step < kPowerSteps; ++step) {  // along <- the centered inner products times it
      const double all = sum([&](int k) { return along[k]; }), off = sum([&](int k) { return reach[k] * along[k]; });
      for_rows([&](int k) { scaled[k] = clip[k] * along[k]; });
      multiply(scaled, next);
      for_rows([&](int k) { along[k] = (clip[k] * next[k] - reach[k] * all - off + square * all) * scale; });
    }
    const auto before = [&](int i, int k) {  // row k is dropped before row i
      const double a = fabs(along[k]), b = fabs(along[i]);
      return a > b || (a == b && k < i) ? 1.0 : 0.0;
    };
    for_row_sums(before, [&](int i, double rank) { next[i] = rank; });
    const double left = count_ - removed_;
    for_rows([&](int k) { weights[k] = takes_part(k) && next[k] >= removed_ ? clip[k] / left : 0; });
  }

  // Squared distance of row i to row k; inf if k is no other row that takes part. squares (n): of the rows, side by
  // side to be read fast.
  SECUREAFL_FN double squared_distance(const double* squares, int i, int k) const {
    if (!takes_part(k) || k == i) return INFINITY;
    return fmax(squares[i] + squares[k] - 2 * product(i, k), 0.0);
  }

  // Sum of the `nearest` smallest squared distances of row i to others. A search by the bits of a distance finds a
  // bound with `nearest` distances below it, or the distance of that rank. All lanes across take part.
  SECUREAFL_FN double nearest_sum(const double* squares, int i, int nearest) const {
    double* kept = table_.center_product;  // (n): one thread has room to keep the distances
    for (int k = 0; k < n_ && Team::kDown == 1; ++k) kept[k] = squared_distance(squares, i, k);
    const auto distance = [&](int k) { return Team::kDown == 1 ? kept[k] : squared_distance(squares, i, k); };
    uint64_t key = 0;
    int below = 0;
    SECUREAFL_NO_UNROLL
    for (uint64_t bit = uint64_t(1) << 62; bit != 0 && below != nearest; bit >>= 1) {
      const double bound = bits_of<double>(key | bit);
      int found = 0;
      for (int k = team_.across(); k < n_; k += Team::kAcross) found += distance(k) < bound;
      found = team_.sum_across(found);
      if (found > nearest) continue;
      key |= bit;
      below = found;
    }
    const double bound = bits_of<double>(key);
    double total = 0;
    for (int k = team_.across(); k < n_; k += Team::kAcross) total += distance(k) < bound ? distance(k) : 0;
    return team_.sum_across(total) + (nearest > below ? (nearest - below) * bound : 0);
  }

  SECUREAFL_FN void krum() const {
    double *scores = table_.values, *squares = table_.center_distance;
    for_rows([&](int k) { squares[k] = product(k, k); });
    const int others = count_ - 1, wanted = count_ - removed_ - 2 > 1 ? count_ - removed_ - 2 : 1;
    const int nearest = wanted < others ? wanted : others;
    SECUREAFL_NO_UNROLL
    for (int i = team_.down(); i < n_; i += Team::kDown) {
      const double score = nearest_sum(squares, i, nearest);
      if (team_.across() == 0) scores[i] = score;
    }
    team_.sync();
    for_rows([&](int k) { weights[k] = 0; });
    const auto better = [&](int i, int k) {
      return scores[k] < scores[i] || (scores[k] == scores[i] && k < i) ? 1.0 : 0.0;
    };
    for_row_sums(better, [&](int i, double rank) { weights[i] = rank == 0 ? 1 : 0; });
  }

  const Team& team_;
  const RowRound& r_;
  const Table& table_;
  int n_, count_, removed_;
  const double* from_center_;
};

}  // namespace secureafl::SECUREAFL_KIND
