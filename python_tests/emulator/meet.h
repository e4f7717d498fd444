#pragma once

#include "warp.h"

// How blocks wait for each other, in place of csrc/common/meet.cuh.

namespace secureafl::cuda {

inline unsigned load_acquire(const unsigned* word) { return *word; }
// With an odd seed the other blocks have a turn before this thread goes on, which breaks code that does not wait for
// what this block does next.
inline void let_others_run() {
  if (!emulator::grid->late()) return;
  emulator::grid->current->there = [turn = emulator::grid->turn] { return emulator::grid->turn != turn; };
  emulator::wait(emulator::Waits::kForWord);
}
inline void arrive(unsigned* word) {
  ++*word;
  let_others_run();
}
inline void publish(unsigned* word, unsigned value) {
  *word = value;
  let_others_run();
}
inline void wait_until(const unsigned* word, unsigned value) {
  if (*word == value) return;
  emulator::grid->current->there = [=] { return *word == value; };
  emulator::wait(emulator::Waits::kForWord);
}

inline void wait_for_count(const unsigned* word, unsigned count) {
  if (*word >= count) return;
  emulator::grid->current->there = [=] { return *word >= count; };
  emulator::wait(emulator::Waits::kForWord);
}

}  // namespace secureafl::cuda
