#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <type_traits>
#include <vector>

// Runs a block of a kernel on one CPU thread. Every CUDA thread is a fiber that runs until it must wait for its warp or
// its block. If only some lanes of a warp reach a warp operation, or only some threads a barrier, the program aborts. A
// seed shuffles the order of the warps: if a barrier is missing, results depend on the seed.

#define __device__
#define __host__
#define __global__
#define __launch_bounds__(...)
#define __shared__ static

struct float2 {
  float x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
struct alignas(16) float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emulator {

struct Index {
  unsigned x;
};
enum class Waits { kNo, kForWarp, kForBlock, kDone };
struct Fiber {
  ucontext_t context;  // for the start; later switches use longjmp, which needs no system call
  jmp_buf here;
  bool began;
  std::vector<char> stack;
  Waits waits;
  Index thread;
  int meetings;                               // number of warp operations so far
  std::vector<std::function<void()>> copies;  // asynchronous copies not yet done
};
using Board =
    float[2][32][12];  // values that the lanes of a warp exchange; double-buffered, so that one wait is enough

inline std::vector<Fiber> fibers;
inline std::vector<std::vector<float>> boards;
inline std::vector<float> memory;  // shared
inline jmp_buf scheduler;
inline Fiber* current;
inline Index block, size;
inline bool late;  // copies complete at the wait, not at once
inline std::function<void()> kernel;

inline void wait(Waits what) {
  Fiber& fiber = *current;
  fiber.waits = what;
  if (_setjmp(fiber.here) == 0) _longjmp(scheduler, 1);
}
inline void go_on(Fiber& fiber) {
  current = &fiber;
  if (_setjmp(scheduler) != 0) return;
  if (fiber.began) _longjmp(fiber.here, 1);
  fiber.began = true;
  setcontext(&fiber.context);
}
inline void live() {
  kernel();
  wait(Waits::kDone);
}

// The exchange buffer of this warp, for one operation.
inline float (*board())[12] {
  auto& both = reinterpret_cast<Board&>(boards[current->thread.x / 32][0]);
  return both[current->meetings++ % 2];
}

inline int count(int first, int last, Waits what) {
  return static_cast<int>(std::count_if(fibers.begin() + first, fibers.begin() + last,
                                        [&](const Fiber& fiber) { return fiber.waits == what; }));
}
inline void release(int first, int last, Waits what) {
  for (int i = first; i < last; ++i) {
    if (fibers[i].waits == what) fibers[i].waits = Waits::kNo;
  }
}

// Runs a warp until each of its lanes waits for the block or is done.
inline void run_warp(int first, int last) {
  do {
    release(first, last, Waits::kForWarp);
    for (int i = first; i < last; ++i) {
      if (fibers[i].waits == Waits::kNo) go_on(fibers[i]);
    }
    const int together = count(first, last, Waits::kForWarp);
    if (together != 0 && together != last - first - count(first, last, Waits::kDone)) std::abort();
  } while (count(first, last, Waits::kForWarp) > 0);
}

inline void launch(int blocks, int threads, size_t shared_floats, unsigned seed, std::function<void()> what) {
  std::mt19937 random(seed);
  kernel = std::move(what), size = {static_cast<unsigned>(threads)}, late = seed % 2;
  if (fibers.size() < static_cast<size_t>(threads)) fibers.resize(threads);  // their stacks are reused
  boards.assign(threads / 32, std::vector<float>(sizeof(Board) / sizeof(float)));
  std::vector<int> warps(threads / 32);
  for (int i = 0; i < threads / 32; ++i) warps[i] = i;
  for (int b = 0; b < blocks; ++b) {
    block = {static_cast<unsigned>(b)}, memory.assign(shared_floats, std::nanf(""));
    for (int i = 0; i < threads; ++i) {
      Fiber& fiber = fibers[i];
      fiber.stack.resize(1 << 17), fiber.waits = Waits::kNo, fiber.thread = {static_cast<unsigned>(i)};
      fiber.meetings = 0, fiber.began = false, fiber.copies.clear();
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.data(), fiber.context.uc_stack.ss_size = fiber.stack.size();
      fiber.context.uc_link = nullptr;
      makecontext(&fiber.context, live, 0);
    }
    while (count(0, threads, Waits::kDone) < threads) {
      std::shuffle(warps.begin(), warps.end(), random);
      for (int warp : warps) run_warp(32 * warp, 32 * warp + 32);
      const int together = count(0, threads, Waits::kForBlock);
      if (together != 0 && together != threads) std::abort();
      release(0, threads, Waits::kForBlock);
    }
  }
}

}  // namespace emulator

#define threadIdx (emulator::current->thread)
#define blockIdx (emulator::block)
#define blockDim (emulator::size)

inline void __syncthreads() { emulator::wait(emulator::Waits::kForBlock); }

template <typename T>
T __shfl_xor_sync(unsigned, T value, int far) {
  const auto board = emulator::board();
  const int lane = threadIdx.x % 32;
  std::memcpy(board[lane], &value, sizeof(T));
  emulator::wait(emulator::Waits::kForWarp);
  std::memcpy(&value, board[lane ^ far], sizeof(T));
  return value;
}

inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  for (int far = 16; far > 0; far /= 2) value = std::max(value, __shfl_xor_sync(~0u, value, far));
  return value;
}

inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}
inline float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

template <typename T>
T __ldcg(const T* at) {
  return *at;
}

namespace cooperative_groups {

struct Warp {};
template <int>
Warp tiled_partition(int) {
  return {};
}
inline int this_thread_block() { return 0; }
template <typename T>
struct plus {};
template <typename T>
T reduce(Warp, T value, plus<T>) {
  for (int far = 16; far > 0; far /= 2) value += __shfl_xor_sync(~0u, value, far);
  return value;
}

}  // namespace cooperative_groups

namespace secureafl::cuda {

inline void pdl_trigger() {}
inline void pdl_wait() {}

// Not rounded: with rounding, a ReLU near zero may switch, and a wrong gradient could not be told from a correct one.
using Operand = float;
struct Pair {
  float of[2];
};
struct OperandB {
  Pair at[2];
};
inline Pair to_pair(float first, float second) {
  if (std::abs(first) > 65504 || std::abs(second) > 65504) std::abort();  // infinite as float16
  return {{first, second}};
}

inline void prefetch_l2(const void*) {}
// Copies at once (even seed), which breaks code that still reads the old data, or late (odd seed), which breaks code
// that does not wait.
template <typename T>
void copy_async(T* to, const T* from) {
  constexpr int kCount = std::is_same_v<T, Operand> ? 8 : 1;
  const auto copy = [=] { std::copy(from, from + kCount, to); };
  if (!emulator::late) return copy();
  emulator::current->copies.emplace_back(copy);
}
inline void wait_copies() {
  for (const auto& copy : emulator::current->copies) copy();
  emulator::current->copies.clear();
}

// The row addresses of all lanes.
inline const float* const* shown(const float* row) {
  static const float* rows[32];
  const auto board = emulator::board();
  if ((row - emulator::memory.data()) % 8 != 0) std::abort();
  std::memcpy(board[threadIdx.x % 32], &row, sizeof(row));
  emulator::wait(emulator::Waits::kForWarp);
  for (int i = 0; i < 32; ++i) std::memcpy(&rows[i], board[i], sizeof(row));
  return rows;
}
inline void load_rows(Pair (&to)[4], const float* row) {
  const auto rows = shown(row);
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  for (int i = 0; i < 4; ++i) to[i] = {{rows[8 * i + g][2 * t], rows[8 * i + g][2 * t + 1]}};
}
template <int kTiles>
inline void load_transposed(Pair (&to)[kTiles], const float* row) {
  const auto rows = shown(row);
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  for (int i = 0; i < kTiles; ++i) to[i] = {{rows[8 * i + 2 * t][g], rows[8 * i + 2 * t + 1][g]}};
}

inline void add_product(float (&sum)[4], const Pair (&a)[4], const OperandB& b) {
  const auto board = emulator::board();
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  for (int i = 0; i < 8; ++i) board[lane][i] = a[i / 2].of[i % 2];
  for (int i = 0; i < 4; ++i) board[lane][8 + i] = b.at[i / 2].of[i % 2];
  emulator::wait(emulator::Waits::kForWarp);
  for (int e = 0; e < 4; ++e) {
    const int row = g + e / 2 * 8, column = 2 * t + e % 2;
    float product = 0;
    for (int k = 0; k < 16; ++k) {
      const int lanes = k % 8 / 2, pair = k / 8;
      product += board[row % 8 * 4 + lanes][(row / 8 + pair * 2) * 2 + k % 2] *
                 board[column * 4 + lanes][8 + pair * 2 + k % 2];
    }
    sum[e] += product;
  }
}

template <typename T>
inline T& shared_memory() {
  return *reinterpret_cast<T*>(emulator::memory.data());
}

}  // namespace secureafl::cuda
