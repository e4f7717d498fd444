#pragma once

#include <math.h>

#include <cstdint>

#include "host_device.h"
#include "lbfgs.h"
#include "norm.h"
#include "rank.h"
#include "verdict.h"

// A whole server round in one pass over the history (spec: section 4), in three steps that both devices share:
//   judge   sums over the update -> verdict
//   pass    per coordinate: estimates from the factors, rule, step; sums of all rows with it; the client's new row
//   renew   per client: products brought up to date by those sums -> factors for the next round
//
// The history lies in tiles of C coordinates, each tile one piece of memory:
//   slots (tiles, 2m, n, C)   y_0 .., s_0 ..   float32, or float16 to be multiplied by `scales`
//   last  (tiles, 2, n, C)    w, g             float32
// Pairs lie in ring slots: client k's j-th oldest is in slot (oldest[k] + j) % m. Coordinates past d are zeros.

namespace secureafl::SECUREAFL_KIND {

struct Verdict {
  int32_t client;  // whose update it is
  Reason reason;
  bool received;  // the update takes part in the rule
  bool steps;     // the model takes a step
  bool stored;    // it becomes the client's last
  bool pushed;    // its pair goes into `slot`
  int32_t slot;
  float clip;              // first contact: what g is multiplied by
  double g_square;         // |g|^2 after that
  float y_scale, s_scale;  // of the pair in its slot; powers of two
};

struct Round {
  // settings
  double lr, quantile, max_norm, trust;
  Rule rule;
  int64_t trim;
  bool filter, estimate, receive, store_all;
  bool hold;  // the model takes no step if the update is rejected
  // this round
  const float* update;      // (d)
  const float* trained_on;  // (d)
  const float* model;       // (d)
  const float* previous;    // (d): the model before that, or anything
  float* next_model;        // (d)
  const int64_t* client;    // (): on the device, so that one captured graph serves any client
  bool backwards;           // the order in which tiles are walked: what the last round read last is still in the cache
  // state
  int64_t n, m, d, tiles, columns;
  int64_t lists, room;   // of Q: one list of factors for all clients, or one for each
  bool half;             // slots are float16
  void* slots;           // (tiles, 2m, n, columns)
  float* last;           // (tiles, 2, n, columns)
  float* scales;         // (n, 2m): what a slot's values are multiplied by; 1 for float32
  double* gram;          // (n, m (2m + 1)): y and s slots, lower triangle
  double* along;         // (n, 2m + 2): y.x and s.x per slot, x.x, g.g, with x = model - w
  float* factors;        // (n, 2m + 2): of y, s as they are stored, of x, and a place left free
  Status* status;        // (n)
  int64_t* pairs;        // (n)
  int64_t* oldest;       // (n)
  bool* seen;            // (n)
  double* seen_factors;  // (lists, room): each list is a ring buffer
  int64_t* recorded;     // (lists): factors ever put into each
  int64_t* counts;       // (5): accepted, rejected, non_finite, capped, fallbacks
  unsigned* arrived;     // (): blocks of threads that have judged; zero between rounds
  // results
  bool* accepted;  // ()
  double* factor;  // ()
  Reason* reason;  // ()

  SECUREAFL_BOTH int64_t planes() const { return 2 * m; }
  // Whether row k takes part in the rule.
  SECUREAFL_FN bool wants(int64_t k, const Verdict& v) const {
    return k == v.client ? v.received : estimate && seen[k];
  }
};

// Where the sums of a pass lie: over all coordinates, of the step v with every slot as stored and with every x; then,
// if the client's row is new, of its own slots with its new x, s and y, as stored; and v.v.
struct PassSums {
  int64_t n, m;

  SECUREAFL_BOTH int64_t slot(int64_t j, int64_t k) const { return j * n + k; }
  SECUREAFL_BOTH int64_t x(int64_t k) const { return 2 * m * n + k; }
  SECUREAFL_BOTH int64_t own_x(int64_t j) const { return (2 * m + 1) * n + j; }  // j = 2m: x.x
  SECUREAFL_BOTH int64_t own_s(int64_t j) const { return own_x(2 * m + 1) + j; }
  SECUREAFL_BOTH int64_t own_y(int64_t j) const { return own_s(2 * m) + j; }
  SECUREAFL_BOTH int64_t step_square() const { return own_y(2 * m); }
  SECUREAFL_BOTH int64_t count() const { return step_square() + 1; }
};

// The power of two that brings a row of this squared norm into float16: no value can be larger than the norm, nor than
// any float, and the smallest normal number lies far below what d values of that norm have on average.
SECUREAFL_FN float half_scale(double square) {
  const int exponent = static_cast<int>(bits_of<uint64_t>(square) >> 52) - 1022;  // square < 2^exponent
  const int scale = (exponent + 1) / 2 - 15;                                      // norm < 2^(scale + 15)
  const int bounded = scale > 113 ? 113 : scale < -100 ? -100 : scale;            // 2^(113 + 15): no float reaches it
  return square > 0 ? bits_of<float>(static_cast<uint32_t>(127 + bounded) << 23) : 1.0f;
}

// What the server knows of the client before it decides.
struct Standing {
  int32_t client;
  bool known;
  int32_t list;      // of Q that the client's factors go to
  int64_t recorded;  // factors ever put into that list
  int64_t place;     // in Q where the next one goes
  int32_t pairs, oldest;
};

// The host cannot check numbers that only a device tensor holds. Out-of-range ones are clamped, so that no kernel reads
// or writes outside its arrays.
SECUREAFL_BOTH int64_t clamped(int64_t value, int64_t least, int64_t most) {
  return value < least ? least : value > most ? most : value;
}

SECUREAFL_FN int32_t client_of(const Round& r) { return static_cast<int32_t>(clamped(*r.client, 0, r.n - 1)); }

SECUREAFL_FN int32_t pairs_of(const Round& r, int64_t k) {
  return r.m > 0 ? static_cast<int32_t>(clamped(r.pairs[k], 0, r.m)) : 0;
}

SECUREAFL_FN int32_t oldest_of(const Round& r, int64_t k) {
  return r.m > 0 ? static_cast<int32_t>(clamped(r.oldest[k], 0, r.m - 1)) : 0;
}

SECUREAFL_FN int64_t recorded_of(const Round& r, int64_t list) { return r.recorded[list] > 0 ? r.recorded[list] : 0; }

SECUREAFL_FN Standing standing_of(const Round& r) {
  const int32_t client = client_of(r), list = r.lists > 1 ? client : 0;
  const int64_t recorded = recorded_of(r, list);
  return {client,
          r.seen[client],
          list,
          recorded,
          list * r.room + (recorded < r.room ? recorded : recorded % r.room),
          pairs_of(r, client),
          oldest_of(r, client)};
}

// The factor of this update, or NaN where there is none.
SECUREAFL_FN double factor_of(const Standing& before, const double* sums) {
  return has_factor(sums, before.known) ? lipschitz_factor(sums[kYY], sums[kSS]) : NAN;
}

// One list of Q: the factors that it holds, and what each of them weighs, with the one that this round adds. With a
// list for each client all clients weigh the same, however often they upload: else one that uploads often would choose
// the quantile. Whole numbers, so that the order of the sum does not matter.
struct FactorList {
  uint32_t weight, held;
};

SECUREAFL_FN FactorList factor_list(const Round& r, const Standing& before, int64_t list) {
  constexpr uint32_t kClient = 0xFFFFFFFF;
  const int64_t recorded = recorded_of(r, list), after = recorded + (list == before.list);
  const uint32_t held = static_cast<uint32_t>(recorded < r.room ? recorded : r.room);
  const uint32_t counted = static_cast<uint32_t>(clamped(after, 1, r.room));
  return {r.lists == 1 ? 1 : kClient / counted, held};
}

// Whether the new factor takes the place of one that this list holds.
SECUREAFL_FN bool replaces(const Round& r, const Standing& before, int64_t list) {
  return list == before.list && before.recorded >= r.room;
}

// On one thread, list by list: the inner loop vectorises.
SECUREAFL_FN Tally tally_of(const Round& r, const Standing& before, double factor) {
  Tally tally{};
  for (int64_t list = 0; list < r.lists; ++list) {
    const double* factors = r.seen_factors + list * r.room;
    const FactorList all = factor_list(r, before, list);
    int64_t below = 0;
    for (int64_t i = 0; i < all.held; ++i) below += factors[i] < factor;
    const bool replaced = replaces(r, before, list);
    tally.below += all.weight * (below - (replaced && r.seen_factors[before.place] < factor));
    tally.all += all.weight * (static_cast<int64_t>(all.held) - replaced);
  }
  return tally;
}

// On many threads, first the lists (r.lists), a thread each: a division is long code, and not to be had for each
// factor. All threads must meet before another reads them. What this thread's lists add to Tally::all.
template <typename Team>
SECUREAFL_FN int64_t weigh_lists(const Team& team, const Round& r, const Standing& before, FactorList* lists) {
  int64_t sum = 0;
  SECUREAFL_ROLLED
  for (int i = team.rank(); i < static_cast<int>(r.lists); i += Team::kSize) {
    const FactorList list = lists[i] = factor_list(r, before, i);
    sum += list.weight * (static_cast<int64_t>(list.held) - replaces(r, before, i));
  }
  return sum;
}

// Then the factors: each thread takes every Team::kSize-th place of Q, kBatch loads at a time. A place's list follows
// from that of the last place, again without a division.
template <typename Team, int kBatch>
class FactorWalk {
 public:
  SECUREAFL_FN FactorWalk(const Team& team, const Round& r, const Standing& before)
      : factors_(r.seen_factors),
        places_(static_cast<uint32_t>(r.lists == 1 && before.recorded < r.room ? before.recorded : r.lists * r.room)),
        room_(static_cast<uint32_t>(r.room)),
        lists_each_(Team::kSize / room_),
        rest_(Team::kSize % room_),
        replaced_(static_cast<uint32_t>(before.place)),
        place_(team.rank()),
        list_(place_ / room_),
        offset_(place_ % room_) {}

  SECUREAFL_FN bool more() const { return place_ < places_; }

  SECUREAFL_FN void fetch() {
    SECUREAFL_UNROLLED
    for (int j = 0; j < kBatch; ++j) {
      const uint32_t place = place_ + j * Team::kSize;
      fetched_[j] = place < places_ ? factors_[place] : INFINITY;  // not below anything
    }
  }

  // What those of the batch weigh that lie below `factor`.
  SECUREAFL_FN int64_t below(const FactorList* lists, double factor) {
    int64_t sum = 0;
    SECUREAFL_UNROLLED
    for (int j = 0; j < kBatch; ++j) {
      if (fetched_[j] < factor && place_ != replaced_) {
        const FactorList list = lists[list_];
        sum += offset_ < list.held ? list.weight : 0;
      }
      place_ += Team::kSize;
      list_ += lists_each_;
      offset_ += rest_;
      if (offset_ >= room_) {
        offset_ -= room_;
        ++list_;
      }
    }
    return sum;
  }

 private:
  const double* factors_;
  uint32_t places_, room_, lists_each_, rest_, replaced_, place_, list_, offset_;
  double fetched_[kBatch];
};

// Where this round's correction of client k is counted, capped or given up; or nullptr. To be asked before the next
// correction is solved for.
SECUREAFL_FN int64_t* counted_at(const Round& r, const Verdict& v, int64_t k) {
  if (k == v.client || !r.estimate || !r.seen[k]) return nullptr;
  return r.status[k] == Status::kCapped ? r.counts + 3 : r.status[k] == Status::kFallback ? r.counts + 4 : nullptr;
}

// From the sums over the update to what is done with it, and the factor into Q. By one thread.
SECUREAFL_FN Verdict decide(const Round& r, const Standing& before, const double* sums, const Tally& tally) {
  const bool known = before.known;
  const double factor = factor_of(before, sums);
  const bool defined = has_factor(sums, known);
  if (defined) r.seen_factors[before.place] = factor;
  if (defined) r.recorded[before.list] = before.recorded + 1;
  Verdict v{};
  v.client = before.client;
  const int64_t rounding = r.lists > 1 ? r.lists * r.room : 0;  // each weight is rounded down by less than 1
  v.reason = judge(sums, known, r.filter, lies_above(tally, r.quantile, rounding));
  const bool accepted = accepts(v.reason), finite = v.reason != Reason::kNotFinite;
  v.received = accepted && r.receive;
  v.steps = accepted || !r.hold;
  v.stored = r.store_all ? finite : accepted;
  v.pushed = r.m > 0 && v.stored && known && has_curvature(sums);
  v.clip = known ? 1.0f : static_cast<float>(fmin(1.0, r.max_norm / sqrt(sums[kGG])));
  v.g_square = sums[kGG] * v.clip * v.clip;
  v.y_scale = r.half ? half_scale(sums[kYY]) : 1.0f;
  v.s_scale = r.half ? half_scale(sums[kSS]) : 1.0f;
  const bool full = before.pairs == r.m;
  v.slot = full ? before.oldest : before.pairs;
  if (v.pushed) {
    r.pairs[v.client] = before.pairs + !full;
    r.oldest[v.client] = full ? (before.oldest + 1) % static_cast<int32_t>(r.m) : before.oldest;
    r.scales[v.client * r.planes() + v.slot] = v.y_scale;
    r.scales[v.client * r.planes() + r.m + v.slot] = v.s_scale;
  }
  *r.accepted = accepted;
  *r.factor = factor;
  *r.reason = v.reason;
  r.counts[0] += accepted;
  r.counts[1] += !accepted;
  r.counts[2] += !finite;
  return v;
}

// A coordinate's next value; one that would leave the floats stays.
SECUREAFL_FN float stepped(const Round& r, const Verdict& v, float model, float direction) {
  const float next = model - static_cast<float>(r.lr * direction);
  return v.steps && isfinite(next) ? next : model;
}

// Doubles of scratch that `solve_client` needs.
SECUREAFL_BOTH int solve_scratch(int m) { return products_of(m) + scratch_of(m) + rows_of(m); }

// From the products of client k to the factors of its next estimate.
template <typename Team>
SECUREAFL_FN void solve_client(const Team& team, const Round& r, int64_t k, double* shared) {
  const int m = static_cast<int>(r.m), rows = 2 * m;
  double* gram = shared;                               // (products_of(m)): in the order of age, as lbfgs.h wants it
  double* scratch = gram + products_of(m);             // (scratch_of(m))
  double* out = scratch + scratch_of(m);               // (2m + 1)
  const double* slots = r.gram + k * packed(rows, 0);  // in the order of slots
  const double* along = r.along + k * (rows + 2);
  const int pairs = pairs_of(r, k), oldest = oldest_of(r, k);
  const auto slot_of = [&](int row) {  // of the row-th in age: y's first, then s's
    const int age = oldest + (row < pairs ? row : row - pairs);
    return (row < pairs ? 0 : m) + (age < m ? age : age - m);
  };
  SECUREAFL_ROLLED
  for (int row = team.down(); row <= 2 * pairs; row += Team::kDown) {
    SECUREAFL_ROLLED
    for (int column = team.across(); column <= row && column < 2 * pairs; column += Team::kAcross) {
      const int slot = slot_of(column);
      gram[packed(row, column)] = row < 2 * pairs ? slots[packed(slot_of(row), slot)] : along[slot];
    }
  }
  if (team.rank() == 0) {
    gram[packed(2 * pairs, 2 * pairs)] = along[rows];
    gram[packed(2 * pairs + 1, 0)] = along[rows + 1];
  }
  team.sync();
  const Status status =
      r.seen[k] ? coefficients(team, gram, pairs, r.trust, kFloatRounding, scratch, out) : Status::kAbsent;
  team.sync();
  float* factors = r.factors + k * (rows + 2);
  SECUREAFL_ROLLED
  for (int j = team.rank(); j <= rows; j += Team::kSize) factors[j] = 0;
  team.sync();
  if (is_corrected(status)) {
    SECUREAFL_ROLLED
    for (int row = team.rank(); row < 2 * pairs; row += Team::kSize) {
      const int slot = slot_of(row);
      factors[slot] = static_cast<float>(out[row] * r.scales[k * rows + slot]);
    }
    if (team.rank() == 0) factors[rows] = static_cast<float>(out[2 * pairs]);
  }
  if (team.rank() == 0) r.status[k] = status;
}

// Brings the products of client k up to date by what the pass has summed: of its slots and its x with the step
// (2m + 1), and from PassSums::own_x(0) on.
template <typename Team>
SECUREAFL_FN void renew_products(const Team& team, const Round& r, const Verdict& v, int64_t k, const double* with_step,
                                 const double* own) {
  const int m = static_cast<int>(r.m), rows = 2 * m, slot = static_cast<int>(clamped(v.slot, 0, m - 1));
  const float* scales = r.scales + k * rows;
  double* gram = r.gram + k * packed(rows, 0);
  double* along = r.along + k * (rows + 2);
  const bool fresh = k == v.client && v.stored;
  const double *own_s = own + rows + 1, *own_y = own_s + rows, step_square = own_y[rows];
  SECUREAFL_ROLLED
  for (int j = team.rank(); j < rows; j += Team::kSize) {
    const double scale = scales[j];
    along[j] = fresh ? scale * own[j] : along[j] + scale * with_step[j];
    if (!fresh || !v.pushed) continue;
    gram[packed(m + slot, j)] = scale * v.s_scale * own_s[j];
    if (j != m + slot) gram[packed(slot, j)] = scale * v.y_scale * own_y[j];  // that one is y.s once more
  }
  if (team.rank() == 0) {
    along[rows] = fresh ? own[rows] : along[rows] + 2 * with_step[rows] + step_square;
    if (fresh) along[rows + 1] = v.g_square;
    if (fresh) r.seen[k] = true;
  }
  team.sync();
}

}  // namespace secureafl::SECUREAFL_KIND
