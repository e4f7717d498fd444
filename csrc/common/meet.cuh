#pragma once

#ifdef SECUREAFL_EMULATED
#include "meet.h"  // python_tests/emulator
#else

// How the blocks of a cooperative launch wait for each other: by words in device memory. Called by one thread of a
// block, between two __syncthreads().

namespace secureafl::cuda {

__device__ inline unsigned load_acquire(const unsigned* word) {
  unsigned value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

// Adds 1 to the word. A block that waits for it sees what this block has written.
__device__ inline void arrive(unsigned* word) {
  __threadfence();
  atomicAdd(word, 1u);
}

// Sets the word. A block that waits for it sees what this block has written, and what this block has seen.
__device__ inline void publish(unsigned* word, unsigned value) {
  __threadfence();
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

// Waits until the word has this value. Gives up after some seconds: with a word that was overwritten from elsewhere the
// results are wrong, but the GPU does not hang.
__device__ inline void wait_until(const unsigned* word, unsigned value) {
  constexpr int kMostPolls = 1 << 22;
  for (int i = 0; i < kMostPolls && load_acquire(word) != value; ++i) {
  }
}

// Waits until `count` blocks or more have arrived at the word. Gives up as wait_until does.
__device__ inline void wait_for_count(const unsigned* word, unsigned count) {
  constexpr int kMostPolls = 1 << 22;
  for (int i = 0; i < kMostPolls && load_acquire(word) < count; ++i) {
  }
}

}  // namespace secureafl::cuda

#endif
