#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <vector>

// Runs a block of a kernel on one CPU thread. Every CUDA thread is a fiber that runs until it must wait for its warp or
// its block. If only some lanes of a warp reach a warp operation, or only some threads a barrier, the program aborts. A
// seed shuffles the order of the blocks, warps and lanes: if a barrier is missing, results depend on the seed.

// nvcc does not warn, and a cast of gridDim.x would change the code that it generates.
#pragma GCC diagnostic ignored "-Wsign-compare"

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static

namespace emulator {

struct Index {
  unsigned x;
};
enum class Waits : char { kNo, kForWarp, kForBlock, kForGrid, kDone };
struct Fiber {
  ucontext_t context;  // for the start; later switches use longjmp, which needs no system call
  jmp_buf here;
  bool began;
  std::unique_ptr<char[]> stack;
  Index thread;
  int meetings;                               // number of warp operations so far
  std::vector<std::function<void()>> copies;  // asynchronous copies not yet done
  std::vector<size_t> groups;                 // number of copies up to the end of each group
};
using Board =
    float[2][32][12];  // values that the lanes of a warp exchange; double-buffered, so that one wait is enough

struct BulkCopy {
  uint32_t barrier;
  std::function<void()> copy;
};

// A kernel that runs. With programmatic dependent launch (PDL) the next kernel starts before it is complete.
struct Grid {
  static constexpr int kMostThreads = 1024;
  std::vector<Fiber> fibers{kMostThreads};                     // those of one block; they and their stacks are reused
  std::vector<Waits> waits{std::vector<Waits>(kMostThreads)};  // what each fiber waits for
  std::vector<std::vector<float>> boards;
  std::vector<float> memory;  // shared
  std::vector<BulkCopy> bulk_copies;
  jmp_buf scheduler;
  Fiber* current;
  Index block, threads, blocks;
  unsigned seed;
  std::function<void()> kernel, previous;

  bool late() const { return seed % 2 == 1; }  // copies complete at the wait, not at once
};
inline std::vector<std::unique_ptr<Grid>> grids;  // grids[i + 1] completes while grids[i] waits for it
inline size_t depth;
inline Grid* grid;

inline void wait(Waits what) {
  Fiber& fiber = *grid->current;
  grid->waits[fiber.thread.x] = what;
  if (_setjmp(fiber.here) == 0) _longjmp(grid->scheduler, 1);
}
inline void go_on(Fiber& fiber) {
  grid->current = &fiber;
  if (_setjmp(grid->scheduler) != 0) return;
  if (fiber.began) _longjmp(fiber.here, 1);
  fiber.began = true;
  setcontext(&fiber.context);
}
inline void live() {
  for (;;) {
    grid->kernel();
    wait(Waits::kDone);
  }
}

// The exchange buffer of this warp, for one operation.
inline float (*board())[12] {
  auto& both = reinterpret_cast<Board&>(grid->boards[grid->current->thread.x / 32][0]);
  return both[grid->current->meetings++ % 2];
}

inline int count(int first, int last, Waits what) {
  return static_cast<int>(std::count(grid->waits.begin() + first, grid->waits.begin() + last, what));
}
inline void release(int first, int last, Waits what) {
  std::replace(grid->waits.begin() + first, grid->waits.begin() + last, what, Waits::kNo);
}

// Runs a warp until each of its lanes waits for the block or is done. mask: gives the order of the lanes
inline void run_warp(int first, int last, int mask) {
  do {
    release(first, last, Waits::kForWarp);
    for (int i = 0; i < last - first; ++i) {
      const int thread = first + (i ^ mask);
      if (grid->waits[thread] == Waits::kNo) go_on(grid->fibers[thread]);
    }
    const int together = count(first, last, Waits::kForWarp);
    if (together != 0 && together != last - first - count(first, last, Waits::kDone)) std::abort();
  } while (count(first, last, Waits::kForWarp) > 0);
}

// Runs what the kernel may have overtaken until here.
inline void complete_previous() {
  const auto previous = std::move(grid->previous);
  grid->previous = nullptr;
  if (previous) previous();
}

inline void prepare(Fiber& fiber, int thread) {
  fiber.thread = {static_cast<unsigned>(thread)}, fiber.meetings = 0;
  fiber.copies.clear(), fiber.groups.clear();
  if (fiber.began) return;
  constexpr size_t kStack = 1 << 17;
  fiber.stack.reset(new char[kStack]);
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.get(), fiber.context.uc_stack.ss_size = kStack;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, live, 0);
}

inline void run_block(int threads, size_t shared_floats, std::vector<int>& warps, std::mt19937& random) {
  constexpr size_t kGuard = 64;  // floats behind the shared memory, which no thread may write to
  grid->memory.assign(shared_floats + kGuard, std::nanf(""));
  for (int i = 0; i < threads; ++i) prepare(grid->fibers[i], i);
  std::fill_n(grid->waits.begin(), threads, Waits::kNo);
  while (count(0, threads, Waits::kDone) < threads) {
    std::shuffle(warps.begin(), warps.end(), random);
    for (int warp : warps) run_warp(32 * warp, 32 * warp + 32, random() % 32);
    if (count(0, threads, Waits::kForGrid) > 0) {
      complete_previous();
      release(0, threads, Waits::kForGrid);
      continue;
    }
    const int together = count(0, threads, Waits::kForBlock);
    if (together != 0 && together != threads) std::abort();
    release(0, threads, Waits::kForBlock);
  }
  const auto end = grid->memory.begin() + shared_floats;
  if (!std::all_of(end, grid->memory.end(), [](float value) { return std::isnan(value); })) std::abort();
  if (!grid->bulk_copies.empty()) std::abort();  // they would write into the memory of the next block
}

// previous: the kernel before, if this one may start while it runs. Here it then runs when the first block waits for it
// (pdl_wait), which breaks code that reads its results before.
inline void launch(int blocks, int threads, size_t shared_floats, unsigned seed, std::function<void()> kernel,
                   std::function<void()> previous = nullptr) {
  const auto numbers = [](int count) {
    std::vector<int> result(count);
    for (int i = 0; i < count; ++i) result[i] = i;
    return result;
  };
  Grid* const outer = grid;
  if (depth == grids.size()) grids.push_back(std::make_unique<Grid>());
  grid = grids[depth++].get();
  grid->kernel = std::move(kernel), grid->previous = std::move(previous), grid->seed = seed;
  grid->threads = {static_cast<unsigned>(threads)}, grid->blocks = {static_cast<unsigned>(blocks)};
  grid->boards.assign(threads / 32, std::vector<float>(sizeof(Board) / sizeof(float)));
  std::mt19937 random(seed);
  std::vector<int> warps = numbers(threads / 32), order = numbers(blocks);
  std::shuffle(order.begin(), order.end(), random);
  for (int block : order) {
    grid->block = {static_cast<unsigned>(block)};
    run_block(threads, shared_floats, warps, random);
  }
  complete_previous();  // if it has no block, or did not wait
  grid = outer, --depth;
}

}  // namespace emulator

#define threadIdx (emulator::grid->current->thread)
#define blockIdx (emulator::grid->block)
#define blockDim (emulator::grid->threads)
#define gridDim (emulator::grid->blocks)

inline void __syncthreads() { emulator::wait(emulator::Waits::kForBlock); }
