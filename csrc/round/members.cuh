#pragma once

#include <cstdint>

#include "round/round.h"

namespace secureafl::cuda {

// Sets bit k of members (places / 32 words, rounded up) if row k takes part in the rule. Run by a whole block, one
// thread per row: a thread that looked at all its own rows would wait for memory once per row. A barrier must follow.
__device__ inline void find_members(const Round& r, const Verdict& v, int places, uint32_t* members) {
  const int n = static_cast<int>(r.n), words = (places + 31) / 32;
  for (int k = threadIdx.x; k < 32 * words; k += blockDim.x) {
    const uint32_t word = __ballot_sync(~0u, k < n && r.takes_part(k, v));
    if (k % 32 == 0) members[k / 32] = word;
  }
}

__device__ inline bool is_member(const uint32_t* members, int k) { return members[k / 32] >> k % 32 & 1; }

}  // namespace secureafl::cuda
