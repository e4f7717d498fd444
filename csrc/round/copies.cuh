#pragma once

#ifdef SECUREAFL_EMULATED
#include "copies.h"  // python_tests/emulator
#else

#include <cstdint>

// Asynchronous copies from global to shared memory. Shared memory and barriers are given by their 32-bit addresses.

namespace secureafl::cuda {

// A barrier (mbarrier) with one arrival per phase, from compute capability 9.0 on. It completes a phase when one thread
// has called mbarrier_expect and that many bytes have been copied.
__device__ inline void mbarrier_init(uint32_t barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}
__device__ inline void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ inline void mbarrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Waits until the phase with this parity is complete. Phases count from 0.
__device__ inline void mbarrier_wait(uint32_t barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred there;\n"
      "AGAIN_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 there, [%0], %1;\n"
      "@!there bra AGAIN_%=;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// One bulk copy (TMA), which counts its bytes at the barrier. Size and addresses are multiples of 16 bytes.
__device__ inline void copy_bulk(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
// Orders the accesses of this thread to shared memory before later bulk copies.
__device__ inline void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Copies 16 bytes (cp.async), both addresses aligned to 16 bytes. Copies since the last commit form a group.
__device__ inline void copy_async(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for all copies of this thread except its last group.
__device__ inline void wait_copies_but_last_group() { asm volatile("cp.async.wait_group 1;" ::: "memory"); }

}  // namespace secureafl::cuda

#endif
