#pragma once

#include "row_wise/kinship/choose.h"
#include "row_wise/row_rules/weights.h"

namespace secureafl::SECUREAFL_KIND {

// Rows and weights in the order of the clients, and the weight of the update.      weights (n)
template <typename Team>
SECUREAFL_FN void list_rows(const Team& team, const RowRound& r, const double* weights, int present, Choice* out) {
  const int n = static_cast<int>(r.n), client = out->verdict.client;
  SECUREAFL_NO_UNROLL
  for (int i = team.down(); i < n; i += Team::kDown) {
    int place = 0, count = 0;
    for (int k = team.across(); k < n; k += Team::kAcross) {
      const bool other = k != client && weights[k] != 0;
      place += other && k < i;
      count += other;
    }
    place = team.sum_across(place);
    count = team.sum_across(count);
    if (team.across() != 0) continue;
    const float weight = static_cast<float>(weights[i]);
    if (i == client) {
      out->own_weight = r.alone ? weight * static_cast<float>(present) : weight;
      *r.weight = weights[i];
      out->count = r.alone ? 0 : count;
    } else if (weights[i] != 0) {
      out->rows[place] = i;
      out->weights[place] = weight;
    }
  }
}

// As `choose` of kinship, for a rule that weighs the rows by their inner products alone.
template <typename Team>
SECUREAFL_FN void choose(const Team& team, const RowRound& r, double* sums, const Table& table, Choice* out) {
  const int n = static_cast<int>(r.n);
  decide_arrival(team, r, sums + n, table, out);
  const Verdict v = out->verdict;
  const double square = v.stored ? v.g_square : 0;  // an update that is not stored takes no part and may be NaN
  double* from_center = sums + n + kSums;           // (n + 2)
  int64_t present[] = {0};
  SECUREAFL_NO_UNROLL
  for (int k = team.rank(); k < n; k += Team::kSize) {
    const bool is_client = k == v.client;
    table.flags[k] = is_client ? v.received : r.presence.counts(r.seen[k], k);
    present[0] += table.flags[k];
    table.norms[k] = sqrt(is_client ? square : r.products[k * r.n + k]);
    if (is_client && r.centered) from_center[k] = from_center[n] * v.clip;
    if (v.stored)
      r.products[v.client * r.n + k] = r.products[k * r.n + v.client] = is_client ? square : sums[k] * v.clip;
  }
  team.sum_all(present);  // and waits for all threads
  const int count = static_cast<int>(present[0]);
  if (team.rank() == 0 && v.stored) r.seen[v.client] = true;
  const RowWeights<Team> rows(team, r, table, count, from_center);
  double of_center = 0;
  if (count > 0) {
    of_center = rows.compute();
  } else {
    SECUREAFL_NO_UNROLL
    for (int k = team.rank(); k < n; k += Team::kSize) rows.weights[k] = 0;
    team.sync();
  }
  list_rows(team, r, rows.weights, count, out);
  if (team.rank() == 0) {
    out->center_weight = static_cast<float>(of_center);
    out->any = count > 0;
  }
}

}  // namespace secureafl::SECUREAFL_KIND
