#pragma once

#include <utility>

#include "warp.h"

// Asynchronous copies, in place of csrc/round/copies.cuh. They copy at once (even seed), which breaks code that still
// reads the old data, or late (odd seed), which breaks code that does not wait. A shared memory address is an offset
// into the memory of the block.

inline size_t __cvta_generic_to_shared(const void* at) {
  const auto offset =
      static_cast<const char*>(at) - reinterpret_cast<const char*>(emulator::grid->block->memory.data());
  if (offset < 0 || offset > static_cast<int64_t>(sizeof(float) * emulator::grid->block->memory.size())) std::abort();
  return offset;
}

namespace emulator {

inline char* shared_at(uint32_t address) { return reinterpret_cast<char*>(grid->block->memory.data()) + address; }

template <typename Copy>
void copy_async(const Copy& copy) {
  if (!grid->late()) return copy();
  grid->current->copies.emplace_back(copy);
}
// Completes the first copies of this thread.
inline void complete(size_t count) {
  auto& copies = grid->current->copies;
  for (size_t i = 0; i < count; ++i) copies[i]();
  copies.erase(copies.begin(), copies.begin() + count);
}

inline void check_aligned(uint32_t to, const void* from, int bytes) {
  if (to % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0 || bytes % 16 != 0) std::abort();
}

// One of two pipelines (csrc/round/tile_pipeline.cuh): the second one if the seed has bit 1.
template <typename First, typename Second, typename Copy>
class Either {
 public:
  Either(uint64_t* barriers, int rank) : first_(barriers, rank), second_(barriers, rank) {}

  void copy(int buffer, const Copy& one, const Copy& two, bool any) const {
    second() ? second_.copy(buffer, one, two, any) : first_.copy(buffer, one, two, any);
  }
  void wait(int buffer, int turn) const { second() ? second_.wait(buffer, turn) : first_.wait(buffer, turn); }
  void drain(bool first, bool second_too) const {
    second() ? second_.drain(first, second_too) : first_.drain(first, second_too);
  }
  void release() const { second() ? second_.release() : first_.release(); }

 private:
  static bool second() { return grid->seed / 2 % 2 == 1; }

  First first_;
  Second second_;
};

}  // namespace emulator

namespace secureafl::cuda {

// A barrier in shared memory. The current phase is complete when a thread has arrived and no byte is missing.
struct Mbarrier {
  int32_t missing_bytes;
  uint16_t arrived, phase;

  static Mbarrier& at(uint32_t address) { return *reinterpret_cast<Mbarrier*>(emulator::shared_at(address)); }
  void add(int bytes) {
    missing_bytes += bytes;
    if (arrived == 0 || missing_bytes != 0) return;
    arrived = 0, ++phase;
  }
};
static_assert(sizeof(Mbarrier) == 8, "as a GPU's");

inline void mbarrier_init(uint32_t barrier) { Mbarrier::at(barrier) = {0, 0, 0}; }
inline void fence_mbarrier_init() {}
inline void mbarrier_expect(uint32_t barrier, int bytes) {
  if (Mbarrier::at(barrier).arrived != 0) std::abort();  // the phase before is not complete
  Mbarrier::at(barrier).arrived = 1;
  Mbarrier::at(barrier).add(bytes);
}
// Waits until a thread has started the copies that the barrier counts, and completes them.
inline void mbarrier_wait(uint32_t barrier, int parity) {
  const auto there = [=] { return Mbarrier::at(barrier).arrived != 0 || Mbarrier::at(barrier).phase % 2 != parity; };
  if (!there()) {
    emulator::grid->current->there = there;
    emulator::wait(emulator::Waits::kForWord);
  }
  auto& copies = emulator::grid->block->bulk_copies;
  for (size_t i = 0; i < copies.size() && Mbarrier::at(barrier).phase % 2 == parity;) {
    if (copies[i].barrier != barrier) {
      ++i;
      continue;
    }
    copies[i].copy();
    copies.erase(copies.begin() + i);
  }
  if (Mbarrier::at(barrier).phase % 2 == parity) std::abort();
}
inline void copy_bulk(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  emulator::check_aligned(to, from, bytes);
  const auto copy = [=] {
    std::memcpy(emulator::shared_at(to), from, bytes);
    Mbarrier::at(barrier).add(-bytes);
  };
  if (!emulator::grid->late()) return copy();
  emulator::grid->block->bulk_copies.push_back({barrier, copy});
}
inline void fence_proxy_async() {}

inline void copy_async(uint32_t to, const void* from) {
  emulator::check_aligned(to, from, 16);
  emulator::copy_async([=] { std::memcpy(emulator::shared_at(to), from, 16); });
}
inline void commit_copies() { emulator::grid->current->groups.push_back(emulator::grid->current->copies.size()); }
inline void wait_copies_but_last_group() {
  auto& groups = emulator::grid->current->groups;
  if (groups.size() < 2) return;
  const size_t done = groups[groups.size() - 2];
  emulator::complete(done);
  groups = {groups.back() - done};
}

}  // namespace secureafl::cuda
