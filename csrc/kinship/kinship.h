#pragma once

#include <math.h>

#include <cstdint>

#include "common/host_device.h"
#include "common/team.h"
#include "round/judge.h"
#include "round/quantile.h"

// A whole round of the rule "kinship" without corrections, where the clients' last updates are the rows
// (secureafl_ext/kinship.py and rowwise.py say why), in three steps that both devices share:
//   sums     over d: the update with every last update, and what the judge needs
//   choose   on n and n x n numbers: the verdict, the averages brought up to date, who is kept with which weight
//   step     over d: the weighted sum of the kept rows, the next model, the client's new row

namespace secureafl::SECUREAFL_KIND {

// The constants of secureafl_ext/kinship.py, in their order.
struct Bounds {
  double span, known, kin, crowd, turned, least, least_sum, least_apart, near;
};

struct Kin : Round {
  Bounds bounds;
  float* last_updates;  // (n, d)
  float* last_models;   // (n, d)
  double* products;     // (n, n): inner products of the last updates
  double* means;        // (n, n): the averages
  int64_t* met;         // (n)
  double* centre;       // (n): weights
  int64_t* rounds;      // ()

  // Sums over d: the update with each client's last, then the judge's.
  SECUREAFL_BOTH int64_t sums() const { return n + kSums; }
};

// What `choose` leaves for the step: rows and weights (n), the first `count` of them filled.
struct Choice {
  Verdict verdict;
  int32_t count;
  float own;  // weight of the update
  int32_t* rows;
  float* weights;
};

// Whether a client has met the others often enough to be judged.
SECUREAFL_FN bool is_known(const Kin& r, int64_t k) { return static_cast<double>(r.met[k]) >= r.bounds.known; }

// Memory that `choose` works in, near its threads.
struct Table {
  static constexpr int kParts = 32, kTotals = 3, kFound = 9;
  double* norms;    // (n): of the rows as this round has them
  double* lengths;  // (n): of the last updates, then of the mean ones
  double* values;   // (n): what a median is taken of, or the pull of each client
  double* reach;    // (n): of the mean updates along the centre
  double* far;      // (n): their distances to it
  double* apart;    // (n): kin of each client once the centre is taken off
  double* parts;    // (kTotals, kParts): of sums over all threads
  double* found;    // (kFound): what one thread tells the others
  uint8_t* is;      // (n): of the following

  enum : uint8_t { kTakesPart = 1, kKnown = 2, kKept = 4, kBoth = 8 };

  SECUREAFL_FN Table(double* at, int64_t n)
      : norms(at),
        lengths(at + n),
        values(at + 2 * n),
        reach(at + 3 * n),
        far(at + 4 * n),
        apart(at + 5 * n),
        parts(at + 6 * n),
        found(parts + kTotals * kParts),
        is(reinterpret_cast<uint8_t*>(found + kFound)) {}
  SECUREAFL_BOTH static int64_t doubles(int64_t n) { return 6 * n + kTotals * kParts + kFound + (n + 7) / 8; }
};

// The sums that the judge needs, of one coordinate: of update g, the model w that it was computed on and the client's
// last ones. In float64 throughout: the difference of two floats may be too large for one.
SECUREAFL_FN void add_to_judge(double g, double w, double last_g, double last_w, double (&sums)[kSums]) {
  const double s = w - last_w, y = g - last_g;
  sums[kBad] += !isfinite(g);
  sums[kGG] += g * g;
  sums[kYY] += y * y;
  sums[kSS] += s * s;
  sums[kSY] += s * y;
}

// Sums over the team of a few numbers of each, below 2^53, in its first thread.
template <typename Team, int kCount>
SECUREAFL_FN void totals(const Team& team, int64_t (&values)[kCount], const Table& table) {
  static_assert(Team::kDown <= Table::kParts && kCount <= Table::kTotals, "a place for each part");
  for (int which = 0; which < kCount; ++which) {
    const int64_t part = team.sum_across(values[which]);
    if (team.across() == 0) table.parts[which * Table::kParts + team.down()] = static_cast<double>(part);
  }
  team.sync();
  for (int which = 0; which < kCount && team.rank() == 0; ++which) {
    double sum = 0;
    SECUREAFL_ROLLED
    for (int i = 0; i < Team::kDown; ++i) sum += table.parts[which * Table::kParts + i];
    values[which] = static_cast<int64_t>(sum);
  }
}

template <typename Team>
SECUREAFL_FN int64_t total(const Team& team, int64_t value, const Table& table) {
  int64_t values[] = {value};
  totals(team, values, table);
  return values[0];
}

// Median of those of values (n) that are finite; inf if none is. middle (2) is scratch. By rank: a sort would have the
// threads meet more often.
template <typename Team>
SECUREAFL_FN double median_of(const Team& team, const double* values, int n, double* middle) {
  SECUREAFL_ROLLED
  for (int i = team.down(); i < n; i += Team::kDown) {
    const double value = values[i];
    int below = 0, count = 0;
    for (int k = team.across(); k < n; k += Team::kAcross) {
      below += values[k] < value || (values[k] == value && k < i);
      count += values[k] < INFINITY;
    }
    below = team.sum_across(below);
    count = team.sum_across(count);
    if (team.across() != 0) continue;
    if (below == (count > 0 ? count - 1 : 0) / 2) middle[0] = value;
    if (below == count / 2) middle[1] = value;
  }
  team.sync();
  return (middle[0] + middle[1]) / 2;
}

// This upload meets the last of everybody: along (n) with them, table.lengths theirs. How many this thread saw it meet.
template <typename Team>
SECUREAFL_FN int meet(const Team& team, const Kin& r, int client, const double* along, double length, double usual,
                      const Table& table) {
  const int n = static_cast<int>(r.n);
  int count = 0;
  const double share = 1 / fmin(fmax(static_cast<double>(r.met[client] + 1), 1.0), r.bounds.span);
  SECUREAFL_ROLLED
  for (int k = team.rank(); k < n; k += Team::kSize) {
    const double cut = usual / fmax(table.lengths[k], usual) * usual / fmax(length, usual);
    const double now = along[k] * cut / (usual * usual);
    if (!(table.lengths[k] > 0) || !isfinite(now)) continue;
    const double before = r.means[client * r.n + k];
    const double after = share < 0.5 ? before + share * (now - before) : now - (now - before) * (1 - share);
    r.means[client * r.n + k] = r.means[k * r.n + client] = after;
    ++count;
  }
  return count;
}

// The mean updates seen from their centre: table.reach, table.far. found (1) is scratch; what it returns is the square
// of the centre.
template <typename Team>
SECUREAFL_FN double look_from_centre(const Team& team, const Kin& r, const Table& table, double* found) {
  const int n = static_cast<int>(r.n);
  SECUREAFL_ROLLED
  for (int i = team.down(); i < n; i += Team::kDown) {
    double reach = 0;
    for (int k = team.across(); k < n; k += Team::kAcross) reach += r.means[i * r.n + k] * r.centre[k];
    reach = team.sum_across(reach);
    if (team.across() == 0) table.reach[i] = reach;
  }
  team.sync();
  if (team.down() == 0) {
    double square = 0;
    for (int k = team.across(); k < n; k += Team::kAcross) square += r.centre[k] * table.reach[k];
    square = team.sum_across(square);
    if (team.across() == 0) *found = square;
  }
  team.sync();
  const double square = *found;
  SECUREAFL_ROLLED
  for (int k = team.rank(); k < n; k += Team::kSize) {
    table.far[k] = sqrt(fmax(r.means[k * r.n + k] - 2 * table.reach[k] + square, 0.0));
  }
  team.sync();
  return square;
}

// The centre a step on towards the geometric median, from table.far.
template <typename Team>
SECUREAFL_FN void settle(const Team& team, const Kin& r, const Table& table, double* found) {
  const int n = static_cast<int>(r.n);
  const auto weight = [&](int k) { return is_known(r, k) ? 1 / fmax(table.far[k], r.bounds.near) : 0.0; };
  if (team.down() == 0) {
    double sum = 0;
    for (int k = team.across(); k < n; k += Team::kAcross) sum += weight(k);
    sum = team.sum_across(sum);
    if (team.across() == 0) *found = fmax(sum, 1e-300);
  }
  team.sync();
  SECUREAFL_ROLLED
  for (int k = team.rank(); k < n; k += Team::kSize) r.centre[k] = weight(k) / *found;
}

// table.is: who of those that take part is known, and who is kept, since it neither crowds nor turns against the rest.
template <typename Team>
SECUREAFL_FN void keep(const Team& team, const Kin& r, const Table& table, double* found) {
  const int n = static_cast<int>(r.n);
  const Bounds& b = r.bounds;
  SECUREAFL_ROLLED
  for (int k = team.rank(); k < n; k += Team::kSize) {
    table.lengths[k] = sqrt(fmax(r.means[k * r.n + k], 0.0));
    if (table.is[k] && is_known(r, k)) table.is[k] |= Table::kKnown;
  }
  const double square = look_from_centre(team, r, table, found);
  SECUREAFL_ROLLED
  for (int i = team.down(); i < n; i += Team::kDown) {
    const double* means = r.means + i * r.n;
    const double length = table.lengths[i], off = square - table.reach[i], far = table.far[i];
    int kin = 0, apart = 0;
    for (int k = team.across(); k < n && (table.is[i] & Table::kKnown); k += Team::kAcross) {
      const bool other = k != i && (table.is[k] & Table::kKnown);
      kin += other && means[k] > b.kin * fmax(length * table.lengths[k], b.least);
      apart += other && means[k] - table.reach[k] + off > b.kin * fmax(far * table.far[k], b.least_apart);
    }
    kin = team.sum_across(kin);
    apart = team.sum_across(apart);
    if (team.across() != 0) continue;
    table.values[i] = table.is[i] ? 1 + kin : INFINITY;
    table.apart[i] = table.is[i] ? 1 + apart : INFINITY;
  }
  team.sync();
  const double most = b.crowd * median_of(team, table.values, n, found);
  const double most_apart = b.crowd * median_of(team, table.apart, n, found + 2);
  int balance = 0;  // 2 for whom both keep, -1 for each one that takes part
  SECUREAFL_ROLLED
  for (int k = team.rank(); k < n; k += Team::kSize) {
    if (!table.is[k]) continue;
    const bool kept = !(table.values[k] > most), both = kept && !(table.apart[k] > most_apart);
    table.is[k] |= (kept ? Table::kKept : 0) | (both ? Table::kBoth : 0);
    balance += 2 * both - 1;
  }
  const int64_t all = total(team, balance, table);
  if (team.rank() == 0) found[4] = static_cast<double>(all);
  team.sync();
  SECUREAFL_ROLLED
  for (int k = team.rank(); k < n; k += Team::kSize) {  // attackers are fewer than half
    if (found[4] >= 0 && !(table.is[k] & Table::kBoth)) table.is[k] &= ~Table::kKept;
  }
  team.sync();
  SECUREAFL_ROLLED
  for (int i = team.down(); i < n; i += Team::kDown) {  // along the sum of the kept
    const double* means = r.means + i * r.n;
    double pull = 0;
    for (int k = team.across(); k < n && (table.is[i] & Table::kKept); k += Team::kAcross) {
      pull += table.is[k] & Table::kKept ? means[k] : 0;
    }
    pull = team.sum_across(pull);
    if (team.across() == 0) table.values[i] = pull;  // 0 where it is not asked for
  }
  team.sync();
  if (team.down() == 0) {
    double sum = 0;
    for (int k = team.across(); k < n; k += Team::kAcross) sum += table.values[k];
    sum = team.sum_across(sum);
    if (team.across() == 0) found[5] = sqrt(fmax(sum, 0.0));
  }
  team.sync();
  SECUREAFL_ROLLED
  for (int k = team.rank(); k < n; k += Team::kSize) {
    const double least = b.turned * fmax(table.lengths[k] * found[5], b.least_sum);
    if ((table.is[k] & Table::kKnown) && table.values[k] < least) table.is[k] &= ~Table::kKept;
  }
  team.sync();
}

// Mean of the kept rows, none longer than `usual`: the rows with their weights, in their order, and the update's.
template <typename Team>
SECUREAFL_FN void weigh(const Team& team, const Kin& r, const Table& table, double usual, Choice* out) {
  const int n = static_cast<int>(r.n), client = out->verdict.client;
  SECUREAFL_ROLLED
  for (int i = team.down(); i < n; i += Team::kDown) {
    int place = 0, count = 0;
    for (int k = team.across(); k < n; k += Team::kAcross) {
      const bool kept = table.is[k] & Table::kKept;
      place += kept && k < i && k != client;
      count += kept;
    }
    place = team.sum_across(place);
    count = team.sum_across(count);
    if (team.across() != 0) continue;
    const bool kept = table.is[i] & Table::kKept;
    const double norm = table.norms[i];
    const float weight = kept ? static_cast<float>(1.0 / count * (norm > usual ? usual / norm : 1)) : 0.0f;
    if (i == client) {
      out->own = weight;
      out->count = count - kept;
    } else if (kept) {
      out->rows[place] = i;
      out->weights[place] = weight;
    }
  }
}

// This thread's part of the tally.
template <typename Team>
SECUREAFL_FN Tally part_of_tally(const Team& team, const Kin& r, const Standing& before, double factor,
                                 const Table& table) {
  if constexpr (Team::kSize == 1) {
    return tally_of(r, before, factor);
  } else {
    FactorList* lists = reinterpret_cast<FactorList*>(table.values);  // (r.lists), at most n
    FactorWalk<Team, 4> walk(team, r, before);
    walk.fetch();
    Tally tally{0, weigh_lists(team, r, before, lists)};
    team.sync();
    tally.below = walk.below(lists, factor);
    SECUREAFL_ROLLED
    while (walk.more()) {
      walk.fetch();
      tally.below += walk.below(lists, factor);
    }
    return tally;
  }
}

// From the sums over d (r.sums()) to what is done with the update, and the state but for what is as long as d. The
// products with clients that are not seen may be anything: they are taken anew before they are looked at.
template <typename Team>
SECUREAFL_FN void choose(const Team& team, const Kin& r, double* sums, const Table& table, Choice* out) {
  const int n = static_cast<int>(r.n);
  const double* judged = sums + n;
  const Standing before = standing_of(r);
  const Tally part = part_of_tally(team, r, before, factor_of(before, judged), table);
  int64_t known_less_new = 0;  // of the others: 1 for each known client, -1 for each one on probation
  SECUREAFL_ROLLED
  for (int k = team.rank(); k < n; k += Team::kSize) {
    if (k != before.client && r.seen[k]) known_less_new += is_known(r, k) ? 1 : -1;
  }
  int64_t counted[] = {part.below, part.all, known_less_new};
  totals(team, counted, table);
  if (team.rank() == 0) {
    out->verdict = decide(r, before, judged, {counted[0], counted[1]});
    const int own = out->verdict.received ? (is_known(r, before.client) ? 1 : -1) : 0;
    table.found[2] = static_cast<double>(counted[2] + own);
    ++*r.rounds;
  }
  team.sync();

  const Verdict v = out->verdict;
  const double square = v.stored ? v.g_square : 0;  // what is not stored takes no part either, and may be NaN
  const bool probation = table.found[2] >= 0;       // once half are known, the others wait
  SECUREAFL_ROLLED
  for (int k = team.rank(); k < n; k += Team::kSize) {
    const bool is_client = k == v.client, present = is_client ? v.received : r.seen[k];
    const bool takes_part = present && (is_known(r, k) || !probation);
    const double last = r.products[k * r.n + k];
    sums[k] = v.stored ? sums[k] * v.clip : 0;
    table.lengths[k] = sqrt(last);
    table.norms[k] = is_client ? sqrt(square) : table.lengths[k];
    table.is[k] = takes_part ? Table::kTakesPart : 0;
    table.values[k] = present ? table.norms[k] : INFINITY;  // with those on probation: quick attackers are known first
  }
  team.sync();
  const double usual = median_of(team, table.values, n, table.found);
  const bool meets = before.known && v.stored;
  const int met = meets ? meet(team, r, v.client, sums, sqrt(square), usual, table) : 0;
  SECUREAFL_ROLLED
  for (int k = team.rank(); k < n && v.stored; k += Team::kSize) {
    r.products[v.client * r.n + k] = r.products[k * r.n + v.client] = k == v.client ? square : sums[k];
  }
  const bool met_any = total(team, met, table) > 0;
  if (team.rank() == 0) {
    r.met[v.client] += met_any;
    if (v.stored) r.seen[v.client] = true;
  }
  team.sync();
  keep(team, r, table, table.found + 2);  // and (6) of it
  weigh(team, r, table, usual, out);      // of all, not of the kept: attackers may be most of these
  if (v.steps) settle(team, r, table, table.found + 8);
}

// A coordinate of the update as it takes part and is stored.
SECUREAFL_FN float clipped(const Verdict& v, float g) { return g * v.clip; }

}  // namespace secureafl::SECUREAFL_KIND
