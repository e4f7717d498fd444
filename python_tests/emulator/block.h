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

// Runs the blocks of a kernel on one CPU thread. Every CUDA thread is a fiber that runs until it must wait for its
// warp, its block or another block. If only some lanes of a warp reach a warp operation, or only some threads a
// barrier, the program aborts. A seed shuffles the order of the blocks, warps and lanes: if a barrier is missing,
// results depend on the seed. Blocks run one after the other, in a cooperative launch by turns. All blocks share a
// __shared__ variable: it must not keep a value while its block waits for another one. Dynamic shared memory is the
// block's own.

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
enum class Waits : char { kNo, kForWarp, kForBlock, kForWord, kForGrid, kDone };
struct Fiber {
  ucontext_t context;  // for the start; later switches use longjmp, which needs no system call
  jmp_buf here;
  bool began;
  std::unique_ptr<char[]> stack;
  Index thread;
  int meetings;                               // number of warp operations so far
  std::function<bool()> there;                // kForWord: whether another block has written what it waits for
  std::vector<std::function<void()>> copies;  // asynchronous copies not yet done
  std::vector<size_t> groups;                 // number of copies up to the end of each group
};
// Values that the lanes of a warp exchange, and what the first lane behind the wait has made of them. Two, used by
// turns, so that one wait is enough.
struct Board {
  float shown[32][12], combined[12];
  int of;  // the warp operation whose values are combined, 0: none
};

struct BulkCopy {
  uint32_t barrier;
  std::function<void()> copy;
};

// The threads of a block; they and their stacks are reused.
struct Block {
  static constexpr int kMostThreads = 1024;
  std::vector<Fiber> fibers{kMostThreads};
  std::vector<Waits> waits{std::vector<Waits>(kMostThreads)};  // what each fiber waits for
  std::vector<Board> boards;                                   // two of each warp
  std::vector<float> memory;                                   // shared
  std::vector<BulkCopy> bulk_copies;
  Index index;
};

// A kernel that runs. With programmatic dependent launch (PDL) the next kernel starts before it is complete.
struct Grid {
  std::vector<std::unique_ptr<Block>>
      all;       // in a cooperative launch every block has its own, otherwise the first is reused
  Block* block;  // that runs
  jmp_buf scheduler;
  Fiber* current;
  Index threads, blocks;
  unsigned seed;
  bool moved;     // a thread has run in this turn
  unsigned turn;  // of a cooperative launch: every block runs as far as it can
  std::function<void()> kernel, previous;

  bool late() const { return seed % 2 == 1; }  // copies complete at the wait, not at once
};
inline std::vector<std::unique_ptr<Grid>> grids;  // grids[i + 1] completes while grids[i] waits for it
inline size_t depth;
inline Grid* grid;

inline void wait(Waits what) {
  Fiber& fiber = *grid->current;
  grid->block->waits[fiber.thread.x] = what;
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
inline Board& board() {
  const int meeting = grid->current->meetings++;
  return grid->block->boards[grid->current->thread.x / 32 * 2 + meeting % 2];
}

inline int count(int first, int last, Waits what) {
  const auto waits = grid->block->waits.begin();
  return static_cast<int>(std::count(waits + first, waits + last, what));
}
inline void release(int first, int last, Waits what) {
  const auto waits = grid->block->waits.begin();
  std::replace(waits + first, waits + last, what, Waits::kNo);
}

// Runs a warp until each of its lanes waits for the block or is done, or waits for a lane that waits for another block.
// mask: gives the order of the lanes
inline void run_warp(int first, int last, int mask) {
  for (;;) {
    for (int i = 0; i < last - first; ++i) {
      const int thread = first + (i ^ mask);
      if (grid->block->waits[thread] == Waits::kNo) go_on(grid->block->fibers[thread]);
    }
    const int together = count(first, last, Waits::kForWarp);
    if (together == 0 || count(first, last, Waits::kForWord) > 0) return;
    if (together != last - first - count(first, last, Waits::kDone)) std::abort();
    release(first, last, Waits::kForWarp);
  }
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

constexpr size_t kGuard = 64;  // floats behind the shared memory, which no thread may write to

inline void start_block(Block& block, int index, int threads, size_t shared_floats) {
  block.index = {static_cast<unsigned>(index)};
  block.memory.assign(shared_floats + kGuard, std::nanf(""));
  block.boards.assign(threads / 32 * 2, Board{});
  for (int i = 0; i < threads; ++i) prepare(block.fibers[i], i);
  std::fill_n(block.waits.begin(), threads, Waits::kNo);
}

// Lets the threads go on that wait for another block no more. Returns true if some still wait.
inline bool wait_for_words(int threads) {
  Block& block = *grid->block;
  for (int i = 0; i < threads; ++i) {
    if (block.waits[i] == Waits::kForWord && block.fibers[i].there()) block.waits[i] = Waits::kNo;
  }
  return count(0, threads, Waits::kForWord) > 0;
}

// Runs a block to its end, or until it waits for another one. Returns true at its end.
inline bool run_block(int threads, std::vector<int>& warps, std::mt19937& random) {
  while (count(0, threads, Waits::kDone) < threads) {
    if (wait_for_words(threads) && count(0, threads, Waits::kNo) == 0) return false;
    grid->moved = true;
    std::shuffle(warps.begin(), warps.end(), random);
    for (int warp : warps) run_warp(32 * warp, 32 * warp + 32, random() % 32);
    if (count(0, threads, Waits::kForGrid) > 0) {
      complete_previous();
      release(0, threads, Waits::kForGrid);
      continue;
    }
    if (count(0, threads, Waits::kForWord) > 0) continue;  // the others wait at a barrier for these threads
    const int together = count(0, threads, Waits::kForBlock);
    if (together != 0 && together != threads) std::abort();
    release(0, threads, Waits::kForBlock);
  }
  const auto& memory = grid->block->memory;
  if (!std::all_of(memory.end() - kGuard, memory.end(), [](float value) { return std::isnan(value); })) std::abort();
  if (!grid->block->bulk_copies.empty()) std::abort();  // they would write into the memory of the next block
  return true;
}

// previous: the kernel before, if this one may start while it runs. Here it then runs when the first block waits for it
// (pdl_wait), which breaks code that reads its results before.
inline void launch(int blocks, int threads, size_t shared_floats, unsigned seed, std::function<void()> kernel,
                   std::function<void()> previous = nullptr, bool cooperative = false) {
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
  while (grid->all.size() < static_cast<size_t>(cooperative ? blocks : 1))
    grid->all.push_back(std::make_unique<Block>());
  std::mt19937 random(seed);
  std::vector<int> warps = numbers(threads / 32), order = numbers(blocks);
  std::shuffle(order.begin(), order.end(), random);
  if (cooperative) {
    for (int i : order) start_block(*grid->all[i], i, threads, shared_floats);
    while (!order.empty()) {
      grid->moved = false, ++grid->turn;
      const auto ran = std::remove_if(order.begin(), order.end(), [&](int i) {
        grid->block = grid->all[i].get();
        return run_block(threads, warps, random);
      });
      order.erase(ran, order.end());
      if (!grid->moved) std::abort();  // they wait for each other
      std::shuffle(order.begin(), order.end(), random);
    }
  } else {
    for (int i : order) {
      grid->block = grid->all[0].get();
      start_block(*grid->block, i, threads, shared_floats);
      if (!run_block(threads, warps, random)) std::abort();  // only a cooperative launch runs another block meanwhile
    }
  }
  complete_previous();  // if it has no block, or did not wait
  grid = outer, --depth;
}

}  // namespace emulator

#define threadIdx (emulator::grid->current->thread)
#define blockIdx (emulator::grid->block->index)
#define blockDim (emulator::grid->threads)
#define gridDim (emulator::grid->blocks)

inline void __syncthreads() { emulator::wait(emulator::Waits::kForBlock); }
