#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "round/round.h"

namespace secureafl::SECUREAFL_KIND {

// State of the arriving client before this round.
struct ClientState {
  int32_t client;
  bool known;
  int32_t list;      // of Q: the list for the factors of this client
  int64_t recorded;  // number of factors ever stored in that list
  int64_t place;     // in Q: index of the next factor
  int32_t pairs, oldest;
};

// Values of a device tensor cannot be checked by the host. Out-of-range values are clamped, so that no kernel reads or
// writes outside its arrays.
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

SECUREAFL_FN ClientState client_state(const Round& r) {
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

}  // namespace secureafl::SECUREAFL_KIND
