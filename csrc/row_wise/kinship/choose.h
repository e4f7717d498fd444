#pragma once

#include <math.h>

#include <cstdint>

#include "common/host_device.h"
#include "round/judge.h"
#include "round/quantile.h"
#include "row_wise/kinship/kinship.h"
#include "row_wise/kinship/select_clients.h"
#include "row_wise/kinship/similarity.h"
#include "row_wise/kinship/table.h"

namespace secureafl::SECUREAFL_KIND {

// Weights of the kept rows, each clipped to the norm median_norm: rows and weights in the order of the clients, and the
// weight of the update.
template <typename Team>
SECUREAFL_FN void weigh_rows(const Team& team, const KinRound& r, const Table& table, double median_norm, Choice* out) {
  const int n = static_cast<int>(r.n), client = out->verdict.client;
  SECUREAFL_NO_UNROLL
  for (int i = team.down(); i < n; i += Team::kDown) {
    int place = 0, count = 0;
    for (int k = team.across(); k < n; k += Team::kAcross) {
      const bool kept = table.flags[k] & Table::kKept;
      place += kept && k < i && k != client;
      count += kept;
    }
    place = team.sum_across(place);
    count = team.sum_across(count);
    if (team.across() != 0) continue;
    const bool kept = table.flags[i] & Table::kKept;
    const double norm = table.norms[i];
    // Below 0 if more clients count than when the shifts were computed.
    const double share = r.shift ? fmax(1.0 / count + r.shift[i], 0.0) : 1.0 / count;
    const float weight = kept ? static_cast<float>(share * (norm > median_norm ? median_norm / norm : 1)) : 0.0f;
    if (i == client) {
      out->own_weight = r.alone ? weight * static_cast<float>(count) : weight;
      *r.weight = kept ? share : 0;
      out->count = r.alone ? 0 : count - kept;
    } else if (kept) {
      out->rows[place] = i;
      out->weights[place] = weight;
    }
  }
}

// Contribution of this thread to the tally of Q. table.values is scratch.
template <typename Team>
SECUREAFL_FN Tally part_of_tally(const Team& team, const KinRound& r, const ClientState& before, double factor,
                                 const Table& table) {
  if constexpr (Team::kSize == 1) {
    return tally_of(r, before, factor);
  } else {
    FactorList* lists = reinterpret_cast<FactorList*>(table.values);  // (r.lists); r.lists <= n
    FactorWalk<Team, 4> walk(team, r, before);
    walk.fetch();
    Tally tally{0, weigh_lists(team, r, before, lists)};
    team.sync();
    add_counts(team, r, before, factor, tally);
    tally.below += walk.below(lists, factor);
    return tally;
  }
}

// From the sums of the judge (kSums) to the verdict. Returns the state of the client before.
template <typename Team>
SECUREAFL_FN ClientState decide_arrival(const Team& team, const KinRound& r, const double* judged, const Table& table,
                                        Choice* out) {
  const int n = static_cast<int>(r.n);
  const ClientState before = client_state(r);
  const Tally part = part_of_tally(team, r, before, factor_of(before, judged), table);
  int64_t rows = 0;  // of clients but this one
  SECUREAFL_NO_UNROLL
  for (int k = team.rank(); k < n; k += Team::kSize) rows += r.seen[k] && k != before.client;
  Census others = census_of_others(team, r.presence, r.seen, n, before.client);
  int64_t sums_of[] = {part.below, part.all, rows};
  totals(team, sums_of, table);
  team.sync();  // the first thread has read the partial sums
  totals(team, others.of, table);
  if (team.rank() == 0) {
    Verdict verdict = decide(r, before, judged, {sums_of[0], sums_of[1]}, others);
    verdict.steps &= sums_of[2] + (before.known || verdict.stored) >= r.quorum;
    out->verdict = verdict;
    ++*r.rounds;
  }
  team.sync();
  return before;
}

// From the sums over d (r.sums()) to the verdict, the choice, and the new state except tensors of length d. Products
// with unseen clients may hold anything: they are recomputed before they are read.
template <typename Team>
SECUREAFL_FN void choose(const Team& team, const KinRound& r, double* sums, const Table& table, Choice* out) {
  const int n = static_cast<int>(r.n);
  const ClientState before = decide_arrival(team, r, sums + n, table, out);
  const Verdict v = out->verdict;
  const double square = v.stored ? v.g_square : 0;  // an update that is not stored takes no part and may be NaN
  int64_t known_less_new = 0;  // over the clients that count: 1 for each known one, -1 for each other
  SECUREAFL_NO_UNROLL
  for (int k = team.rank(); k < n; k += Team::kSize) {
    const bool is_client = k == v.client, present = is_client ? v.received : r.presence.counts(r.seen[k], k);
    if (present) known_less_new += is_known(r, k) ? 1 : -1;
    const double last = r.products[k * r.n + k];
    sums[k] = v.stored ? sums[k] * v.clip : 0;
    table.lengths[k] = sqrt(last);
    table.norms[k] = is_client ? sqrt(square) : table.lengths[k];
    table.flags[k] = !present ? 0 : is_known(r, k) ? Table::kTakesPart : Table::kUnknown;
    // The median norm includes clients that are not known yet: fast attackers become known first.
    table.values[k] = present ? table.norms[k] : INFINITY;
  }
  team.sync();
  const double median_norm = median_of(team, table.values, n, table.shared_results);
  const bool compared = before.known && v.stored;
  const int met = compared ? update_similarity(team, r, v.client, sums, sqrt(square), median_norm, table) : 0;
  SECUREAFL_NO_UNROLL
  for (int k = team.rank(); k < n && v.stored; k += Team::kSize) {
    r.products[v.client * r.n + k] = r.products[k * r.n + v.client] = k == v.client ? square : sums[k];
  }
  int64_t balance[] = {met, known_less_new};
  totals(team, balance, table);
  if (team.rank() == 0) {
    r.met[v.client] += balance[0] > 0;
    if (v.stored) r.seen[v.client] = true;
    table.shared_results[2] = static_cast<double>(balance[1]);
  }
  team.sync();
  // If at least half of the clients are known, the others are left out.
  const bool only_known = table.shared_results[2] >= 0;
  SECUREAFL_NO_UNROLL
  for (int k = team.rank(); k < n; k += Team::kSize) {
    if (table.flags[k] == Table::kUnknown) table.flags[k] = only_known ? 0 : Table::kTakesPart;
    if (r.shift && table.flags[k]) table.flags[k] |= Table::kKept;
  }
  if (r.shift) {
    team.sync();
  } else {
    select_clients(team, r, table, table.shared_results + 2);
  }
  // median_norm is that of all clients: attackers may be the majority of the kept ones.
  weigh_rows(team, r, table, median_norm, out);
  if (v.steps && !r.shift) update_center(team, r, table, table.shared_results + 8);
}

}  // namespace secureafl::SECUREAFL_KIND
