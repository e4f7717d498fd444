#pragma once

#include <math.h>

#include <cstdint>

#include "common/host_device.h"
#include "common/team.h"
#include "round/client.h"
#include "round/factor_counts.h"

namespace secureafl::SECUREAFL_KIND {

// Q: the Lipschitz factors of past updates; an update is rejected if its factor is above the quantile. A FactorList is
// one list of Q: the number of factors it holds, and the weight of each, counting the factor that this round adds. With
// one list per client all clients have the same weight. Otherwise a client that uploads often could choose the
// quantile. Weights are integers, so the order of the sum does not matter.
struct FactorList {
  uint32_t weight, held;
};

SECUREAFL_FN FactorList factor_list(const Round& r, const ClientState& before, int64_t list) {
  constexpr uint32_t kClient = 0xFFFFFFFF;
  const int64_t recorded = recorded_of(r, list), after = recorded + (list == before.list);
  const uint32_t held = static_cast<uint32_t>(recorded < r.room ? recorded : r.room);
  const uint32_t counted = static_cast<uint32_t>(clamped(after, 1, r.room));
  return {r.lists == 1 ? 1 : kClient / counted, held};
}

// True if the list is full and the new factor is counted by its key.
SECUREAFL_FN bool counts_factor(const Round& r, const ClientState& before) {
  return r.factor_counts != nullptr && before.recorded >= r.room;
}

// True if the new factor overwrites one that this list holds.
SECUREAFL_FN bool replaces(const Round& r, const ClientState& before, int64_t list) {
  return list == before.list && before.recorded >= r.room && r.factor_counts == nullptr;
}

// Run by one thread.
SECUREAFL_FN void record_factor(const Round& r, const ClientState& before, double factor) {
  if (counts_factor(r, before)) {
    count_factor(r.factor_counts, factor);
  } else {
    r.seen_factors[before.place] = factor;
  }
  r.recorded[before.list] = before.recorded + 1;
}

// tally += contribution of this thread, of the factors that are counted by their keys.
template <typename Team>
SECUREAFL_FN void add_counts(const Team& team, const Round& r, const ClientState& before, double factor, Tally& tally) {
  if (!counts_factor(r, before)) return;
  tally.below += counted_below(team, r.factor_counts, factor);
  if (team.rank() == 0) tally.all += before.recorded - r.room;
}

// One thread, list by list: the inner loop vectorises.
SECUREAFL_FN Tally tally_of(const Round& r, const ClientState& before, double factor) {
  Tally tally{};
  add_counts(Solo(), r, before, factor, tally);
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

// Many threads, step 1: the weights of all lists (r.lists), one thread per list. A division is slow, so it is done once
// per list, not once per factor. A barrier must follow before other threads read the lists. Returns the contribution of
// this thread to Tally::all.
template <typename Team>
SECUREAFL_FN int64_t weigh_lists(const Team& team, const Round& r, const ClientState& before, FactorList* lists) {
  int64_t sum = 0;
  SECUREAFL_NO_UNROLL
  for (int i = team.rank(); i < static_cast<int>(r.lists); i += team.size()) {
    const FactorList list = lists[i] = factor_list(r, before, i);
    sum += list.weight * (static_cast<int64_t>(list.held) - replaces(r, before, i));
  }
  return sum;
}

// Step 2: the factors. Each thread processes every team.size()-th place of Q, with kBatch loads at a time. The list of
// a place is computed from that of the previous place, without a division.
template <typename Team, int kBatch>
class FactorWalk {
 public:
  SECUREAFL_FN FactorWalk(const Team& team, const Round& r, const ClientState& before)
      : team_(team),
        factors_(r.seen_factors),
        places_(static_cast<uint32_t>(r.lists == 1 && before.recorded < r.room ? before.recorded : r.lists * r.room)),
        room_(static_cast<uint32_t>(r.room)),
        lists_each_(team.size() / room_),
        rest_(team.size() % room_),
        replaced_(replaces(r, before, before.list) ? static_cast<uint32_t>(before.place) : UINT32_MAX),
        place_(team.rank()),
        list_(place_ / room_),
        offset_(place_ % room_) {}

  // Loads the first batch. Call it early: the factors are waited for only in `below`.
  SECUREAFL_FN void fetch() {
    SECUREAFL_UNROLL
    for (int j = 0; j < kBatch; ++j) {
      const uint32_t place = place_ + j * team_.size();
      fetched_[j] = place < places_ ? factors_[place] : INFINITY;  // never counted
    }
  }

  // Total weight of the factors of this thread that are below `factor`. fetch() comes before.
  SECUREAFL_FN int64_t below(const FactorList* lists, double factor) {
    int64_t sum = below_in_batch(lists, factor);
    SECUREAFL_NO_UNROLL
    while (place_ < places_) {
      fetch();
      sum += below_in_batch(lists, factor);
    }
    return sum;
  }

 private:
  SECUREAFL_FN int64_t below_in_batch(const FactorList* lists, double factor) {
    int64_t sum = 0;
    SECUREAFL_UNROLL
    for (int j = 0; j < kBatch; ++j) {
      if (fetched_[j] < factor && place_ != replaced_) {
        const FactorList list = lists[list_];
        sum += offset_ < list.held ? list.weight : 0;
      }
      place_ += team_.size();
      list_ += lists_each_;
      offset_ += rest_;
      if (offset_ >= room_) {
        offset_ -= room_;
        ++list_;
      }
    }
    return sum;
  }

  Team team_;
  const double* factors_;
  uint32_t places_, room_, lists_each_, rest_, replaced_, place_, list_, offset_;
  double fetched_[kBatch];
};

}  // namespace secureafl::SECUREAFL_KIND
