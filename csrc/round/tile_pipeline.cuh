#pragma once

#include <cstdint>
#include <initializer_list>

// Double-buffered copies of tiles into shared memory: the next tile is copied while the current one is processed. From
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

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

template <int kThreads>
class TilePipeline {
 public:
  // barriers (2): those of this team. The caller must call __syncthreads() afterwards.
  __device__ TilePipeline(uint64_t* barriers, int rank)
      : at_(static_cast<uint32_t>(__cvta_generic_to_shared(barriers))), rank_(rank) {
    if (rank != 0) return;
    for (int buffer = 0; buffer < 2; ++buffer) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at_ + 8 * buffer) : "memory");
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }

  // Starts two copies into a buffer that was released. Does nothing if any is false (no tile left).
  __device__ void copy(int buffer, const TileCopy& one, const TileCopy& two, bool any) const {
    if (rank_ != 0 || !any) return;
    const uint32_t barrier = at_ + 8 * buffer;
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(one.size + two.size)
                 : "memory");
    for (const TileCopy& part : {one, two}) {
      const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(part.to));
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                   "l"(part.from), "r"(part.size), "r"(barrier)
                   : "memory");
    }
  }

  // Waits for the copies into a buffer. turn: number of earlier copies into it.
  __device__ void wait(int buffer, int turn) const {
    asm volatile(
        "{\n"
        ".reg .pred there;\n"
        "AGAIN_%=:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 there, [%0], %1;\n"
        "@!there bra AGAIN_%=;\n"
        "}" ::"r"(at_ + 8 * buffer),
        "r"(turn & 1)
        : "memory");
  }

  // Orders the accesses of the threads to a buffer before the next bulk copy into it.
  __device__ void release() const { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

 private:
  uint32_t at_;
  int rank_;
};

#else

template <int kThreads>
class TilePipeline {
 public:
  __device__ TilePipeline(uint64_t*, int rank) : rank_(rank) {}

  __device__ void copy(int, const TileCopy& one, const TileCopy& two, bool any) const {
    for (const TileCopy& part : {one, two}) {
      const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(part.to));
      for (int at = 16 * rank_; any && at < part.size; at += 16 * kThreads) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + at), "l"(part.from + at) : "memory");
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  __device__ void wait(int, int) const {  // all groups except the last one, which is the next tile
    asm volatile("cp.async.wait_group 1;" ::: "memory");
    team_sync<kThreads>();
  }
  __device__ void release() const {}

 private:
  int rank_;
};

#endif

}  // namespace secureafl::cuda
