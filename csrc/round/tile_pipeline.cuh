#pragma once

#include <cstdint>
#include <initializer_list>

#include "round/copies.cuh"

// Copies of tiles into shared memory. With two buffers the next tile is copied while the current one is processed. From
// compute capability 9.0 on, one thread issues bulk copies (TMA), and a barrier (mbarrier) in shared memory signals
// their completion. On older GPUs each thread copies pieces of 16 bytes (cp.async) and waits for its own.

namespace secureafl::cuda {

template <int kThreads>
__device__ inline void team_sync() {
  if constexpr (kThreads == 32) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

// One contiguous copy. Size and addresses are multiples of 16 bytes.
struct TileCopy {
  void* to;
  const char* from;
  int size;
};

// With bulk copies.
template <int kThreads, int kBuffers>
class BulkPipeline {
 public:
  // barriers (kBuffers): those of this team. The caller must call __syncthreads() afterwards.
  __device__ BulkPipeline(uint64_t* barriers, int rank)
      : at_(static_cast<uint32_t>(__cvta_generic_to_shared(barriers))), rank_(rank) {
    if (rank != 0) return;
    for (int buffer = 0; buffer < kBuffers; ++buffer) mbarrier_init(at_ + 8 * buffer);
    fence_mbarrier_init();
  }

  // Starts two copies into a buffer that was released. Does nothing if any is false (no tile left).
  __device__ void copy(int buffer, const TileCopy& one, const TileCopy& two, bool any) const {
    if (rank_ != 0 || !any) return;
    const uint32_t barrier = at_ + 8 * buffer;
    mbarrier_expect(barrier, one.size + two.size);
    for (const TileCopy& part : {one, two}) {
      const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(part.to));
      copy_bulk(to, part.from, part.size, barrier);
    }
  }

  // Waits for the copies into a buffer. turn: number of earlier copies into it.
  __device__ void wait(int buffer, int turn) const { mbarrier_wait(at_ + 8 * buffer, turn & 1); }

  // Waits for the first copies into the buffers, those that were started: a block must not end before its copies.
  __device__ void drain(bool first, bool second) const {
    if (first) wait(0, 0);
    if (kBuffers == 2 && second) wait(1, 0);
  }

  // Orders the accesses of the threads to a buffer before the next bulk copy into it.
  __device__ void release() const { fence_proxy_async(); }

 private:
  uint32_t at_;
  int rank_;
};

// The same with cp.async.
template <int kThreads, int kBuffers>
class AsyncPipeline {
 public:
  __device__ AsyncPipeline(uint64_t*, int rank) : rank_(rank) {}

  __device__ void copy(int, const TileCopy& one, const TileCopy& two, bool any) const {
    for (const TileCopy& part : {one, two}) {
      const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(part.to));
      for (int at = 16 * rank_; any && at < part.size; at += 16 * kThreads) copy_async(to + at, part.from + at);
    }
    commit_copies();
  }
  __device__ void wait(int, int) const {
    if constexpr (kBuffers == 1) commit_copies();  // an empty group
    wait_copies_but_last_group();                  // the last group is the next tile
    team_sync<kThreads>();
  }
  __device__ void drain(bool, bool) const {
    commit_copies();  // an empty group: the last one that is waited for is the one before
    wait(0, 0);
  }
  __device__ void release() const {}

 private:
  int rank_;
};

#ifdef SECUREAFL_EMULATED  // the seed decides: tests run both
template <int kThreads, int kBuffers>
using TilePipeline = emulator::Either<BulkPipeline<kThreads, kBuffers>, AsyncPipeline<kThreads, kBuffers>, TileCopy>;
#elif !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
template <int kThreads, int kBuffers>
using TilePipeline = BulkPipeline<kThreads, kBuffers>;
#else
template <int kThreads, int kBuffers>
using TilePipeline = AsyncPipeline<kThreads, kBuffers>;
#endif

}  // namespace secureafl::cuda
