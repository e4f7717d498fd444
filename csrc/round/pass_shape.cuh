#pragma once

#include <cstdint>

#include "round/begin.cuh"
#include "round/tiles.h"

namespace secureafl::cuda {

// Compile-time shape of one pass. Each thread of a team sums over its own rows during the whole kernel, so sums are
// combined between threads only at the end. kAnyPairs: kPairs is only the most; the number itself is known at run time.
template <int kPairs, typename S, int kThreads_, int kColumns_, int kItems_>
struct Pass {
  static constexpr int kThreads = kThreads_, kColumns = kColumns_, kItems = kItems_;
  static constexpr int kPlanes = 2 * kPairs, kFactors = kPlanes + 2, kLanes = kThreads / kColumns;
  static constexpr int kClients = kLanes * kItems;
  static constexpr bool kAnyPairs = kPairs > kFewPairs;
  static constexpr int kSlotSums = (kPlanes * kClients + kThreads - 1) / kThreads;
  static constexpr int kXSums = (kClients + kThreads - 1) / kThreads;
  // Maximum number of threads per block (all teams). Fewer if a thread needs many registers for its sums.
  static constexpr int kMaxThreads = kThreads > 32 ? kThreads : kSlotSums <= 24 ? 512 : kSlotSums <= 60 ? 384 : 256;
  static constexpr int kBlocksPerSm = kThreads == 256 ? 2 : 1;  // blocks per multiprocessor
  static constexpr bool kPaddedReads = kThreads == 32;          // see Stage
  static constexpr int kExchangeBytes = 2 * 4 * (kThreads > 256 ? kThreads / 32 : 8);
  static constexpr int kBarrierBytes = 2 * 8 * (kMaxThreads / kThreads);
  using Stored = S;

  // With 3 pairs in float32 a client has 32 bytes in a tile of one column, and 32 bytes of factors. A block may have
  // 227 KiB of shared memory.
  //   2,048 clients: two tiles of 64 KiB and factors of 64 KiB, 192 KiB. The next tile is copied meanwhile.
  //   4,096 clients: one tile of 128 KiB; the factors, 128 KiB too, do not fit. Those of the slots alone do: 96 KiB, in
  //                  all 224 KiB. The factors of x are in registers. Nothing is copied meanwhile, except by the other
  //                  blocks: they are at different places of their tiles.
  // With 16 pairs, 136 bytes each: 512 clients, two tiles of 68 KiB. The factors, 68 KiB, are stored by plane
  // (kAnyPairs), so that threads read different banks; a round begins with 80 KiB in their place. In all 216 KiB.
  static constexpr int kBuffers = kClients > 2048 ? 1 : 2;
  static constexpr int kSharedFactors = kBuffers == 2 ? kFactors : kPlanes;  // of each client
  static constexpr bool kStoresX = kBuffers == 2;  // in place of w; else registers are scarce, and x is computed twice

  // Clients that a block renews at once: up to 1,024 all of its own on a GPU with 128 multiprocessors or more.
  static constexpr int kRenewedAtOnce = kClients < 512 ? (kClients + 127) / 128 : kClients <= 1024 ? 4 : 16;
  // The factors of the pass, a multiple of 16 bytes; before them, in the same place, the memory of begin_round.
  static constexpr int kFactorBytes = 4 * kClients * kSharedFactors;
  static constexpr int kBeginBytes = (begin_bytes(kClients, kPairs, kRenewedAtOnce) + 15) / 16 * 16;
  static constexpr int kFirstBytes = kFactorBytes > kBeginBytes ? kFactorBytes : kBeginBytes;
  static constexpr int kMemberBytes = (kClients + 127) / 128 * 128 / 8;  // a bit per client; a multiple of 16
  // What the teams share. Tiles start at multiples of 128 bytes: bulk copies to other places are slower.
  static constexpr int kHeaderBytes = (kFirstBytes + kMemberBytes + kExchangeBytes + kBarrierBytes + 127) / 128 * 128;
};

// A tile of the history in shared memory. Tiles are padded: the threads of a warp load and store past client n - 1, up
// to the number of clients of their shape (kPaddedReads). These values are not used.
template <typename P>
struct Stage {
  using S = typename P::Stored;
  S* slots;     // (planes, n, kColumns), planes = 2m
  float* last;  // (2, n, kColumns): w, g; then padding

  __device__ Stage(char* at, int n, int planes) {
    slots = reinterpret_cast<S*>(at);
    last = reinterpret_cast<float*>(at + slot_bytes(n, planes));
  }
  __host__ __device__ static int slot_bytes(int n, int planes) {
    return planes * n * P::kColumns * static_cast<int>(sizeof(S));
  }
  __host__ __device__ static int last_bytes(int n) { return 8 * n * P::kColumns; }
  __host__ __device__ static int bytes(int n, int planes) {
    const int slot_sums = P::kAnyPairs ? planes * n + P::kThreads : P::kSlotSums * P::kThreads;  // rows read for them
    const int ends[] = {
        slot_bytes(n, planes) + last_bytes(n) + 4 * (P::kClients - n) * P::kColumns,           // of the estimates
        slot_bytes(slot_sums / planes + 1, planes),                                            // of the sums over slots
        slot_bytes(n, planes) + 4 * P::kXSums * P::kThreads * P::kColumns,                     // of the sums over x
        P::kBuffers == 2 && !P::kAnyPairs ? 0 : 4 * (planes + 1) * n + 8 * (3 * planes + 2)};  // PassSums: at the end
    int most = 0;
    for (const int end : ends) most = end > most ? end : most;
    return (most + 127) / 128 * 128;
  }
};

// Calls f with the Pass for this many clients and pairs; dispatch_pass for 1 pair or more.
template <int kPairs, typename S, typename F>
void dispatch_shape(const Shape& shape, const F& f) {
  if constexpr (has_all_shapes(kPairs)) {
    if (shape.columns == 8) return f(Pass<kPairs, S, 32, 8, 4>());
    if (shape.columns == 4 && shape.items == 4) return f(Pass<kPairs, S, 32, 4, 4>());
    if (shape.columns == 2) return f(Pass<kPairs, S, 32, 2, 8>());
    if (shape.items == 7) return f(Pass<kPairs, S, 32, 1, 7>());
    if (shape.items == 10) return f(Pass<kPairs, S, 32, 1, 10>());
    if (shape.threads == 512 && shape.items == 4) return f(Pass<kPairs, S, 512, 1, 4>());
    if (shape.threads == 512) return f(Pass<kPairs, S, 512, 1, 8>());
  }
  if (shape.columns == 4) return f(Pass<kPairs, S, 32, 4, 8>());
  if (shape.threads == 32) return f(Pass<kPairs, S, 32, 1, 14>());
  f(Pass<kPairs, S, 256, 1, 4>());
}
template <typename S, typename F>
void dispatch_pass(int64_t n, int64_t m, const F& f) {
  const Shape shape = shape_of(n, m);
  switch (m) {
    case 1: return dispatch_shape<1, S>(shape, f);
    case 2: return dispatch_shape<2, S>(shape, f);
    case 3: return dispatch_shape<3, S>(shape, f);
    case 4: return dispatch_shape<4, S>(shape, f);
    case 5: return dispatch_shape<5, S>(shape, f);
    default: f(Pass<kMaxGpuPairs, S, 512, 1, 1>());
  }
}

}  // namespace secureafl::cuda
