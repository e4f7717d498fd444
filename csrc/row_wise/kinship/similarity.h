#pragma once

#include <math.h>

#include <cstdint>

#include "common/host_device.h"
#include "row_wise/kinship/kinship.h"
#include "row_wise/kinship/table.h"

namespace secureafl::SECUREAFL_KIND {

// Updates the mean similarity of this upload with the last update of every client. products (n): inner products with
// the last updates; table.lengths: their norms. Returns the number of similarities that this thread updated.
template <typename Team>
SECUREAFL_FN int update_similarity(const Team& team, const KinRound& r, int client, const double* products,
                                   double length, double median_norm, const Table& table) {
  const int n = static_cast<int>(r.n);
  int count = 0;
  const double share = 1 / fmin(fmax(static_cast<double>(r.met[client] + 1), 1.0), r.bounds.span);
  SECUREAFL_NO_UNROLL
  for (int k = team.rank(); k < n; k += Team::kSize) {
    const double cut = median_norm / fmax(table.lengths[k], median_norm) * median_norm / fmax(length, median_norm);
    const double now = products[k] * cut / (median_norm * median_norm);
    if (!(table.lengths[k] > 0) || !isfinite(now)) continue;
    const double before = r.means[client * r.n + k];
    const double after = share < 0.5 ? before + share * (now - before) : now - (now - before) * (1 - share);
    r.means[client * r.n + k] = r.means[k * r.n + client] = after;
    ++count;
  }
  return count;
}

// Products of the mean updates with their center and distances to it: table.center_product, table.center_distance.
// shared_results (1) is scratch. Returns the squared norm of the center.
template <typename Team>
SECUREAFL_FN double distances_to_center(const Team& team, const KinRound& r, const Table& table,
                                        double* shared_results) {
  const int n = static_cast<int>(r.n);
  SECUREAFL_NO_UNROLL
  for (int i = team.down(); i < n; i += Team::kDown) {
    double center_product = 0;
    for (int k = team.across(); k < n; k += Team::kAcross) center_product += r.means[i * r.n + k] * r.mean_center[k];
    center_product = team.sum_across(center_product);
    if (team.across() == 0) table.center_product[i] = center_product;
  }
  team.sync();
  if (team.down() == 0) {
    double square = 0;
    for (int k = team.across(); k < n; k += Team::kAcross) square += r.mean_center[k] * table.center_product[k];
    square = team.sum_across(square);
    if (team.across() == 0) *shared_results = square;
  }
  team.sync();
  const double square = *shared_results;
  SECUREAFL_NO_UNROLL
  for (int k = team.rank(); k < n; k += Team::kSize) {
    table.center_distance[k] = sqrt(fmax(r.means[k * r.n + k] - 2 * table.center_product[k] + square, 0.0));
  }
  team.sync();
  return square;
}

// One step of the center towards the geometric median (Weiszfeld), from table.center_distance.
template <typename Team>
SECUREAFL_FN void update_center(const Team& team, const KinRound& r, const Table& table, double* shared_results) {
  const int n = static_cast<int>(r.n);
  const auto weight = [&](int k) { return is_known(r, k) ? 1 / fmax(table.center_distance[k], r.bounds.near) : 0.0; };
  if (team.down() == 0) {
    double sum = 0;
    for (int k = team.across(); k < n; k += Team::kAcross) sum += weight(k);
    sum = team.sum_across(sum);
    if (team.across() == 0) *shared_results = fmax(sum, 1e-300);
  }
  team.sync();
  SECUREAFL_NO_UNROLL
  for (int k = team.rank(); k < n; k += Team::kSize) r.mean_center[k] = weight(k) / *shared_results;
}

}  // namespace secureafl::SECUREAFL_KIND
