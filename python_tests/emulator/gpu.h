#pragma once

#include <stdexcept>
#include <string>

#include "warp.h"

// In place of csrc/common/launch.cuh.

#define SECUREAFL_SHARED(type, name) type* name = &secureafl::cuda::shared_memory<type>()

namespace secureafl::cuda {

// The next kernel may start as soon as this one has: as if every kernel triggered at once.
inline void pdl_trigger() {}
// Only the first block waits. It is no barrier for the others.
inline void pdl_wait() {
  if (emulator::grid->previous) emulator::wait(emulator::Waits::kForGrid);
}

template <typename T>
inline T& shared_memory() {
  return *reinterpret_cast<T*>(emulator::grid->block->memory.data());
}

// Launches kernels on a small GPU. A kernel runs when the next one is launched or waits for it, the last one at the
// end.
class Launcher {
 public:
  explicit Launcher(unsigned seed, int64_t shared_bytes = 227 << 10) : seed_(seed), shared_bytes_(shared_bytes) {}
  Launcher(const Launcher&) = delete;
  ~Launcher() { finish(); }

  int64_t max_shared_bytes() const { return shared_bytes_; }
  int64_t blocks_per_multiprocessor(int64_t, int64_t most) const { return most; }
  int64_t multiprocessors() const { return 2; }
  bool shares_gpu() const { return false; }

  template <typename... Params, typename... Args>
  void operator()(void (*kernel)(Params...), int64_t blocks, int threads, int64_t shared_bytes,
                  const Args&... args) const {
    finish();
    last_ = [=, seed = seed_] {
      emulator::launch(blocks, threads, shared_bytes / sizeof(float), seed, [=] { kernel(args...); });
    };
  }
  template <typename... Params, typename... Args>
  void launch_pdl(void (*kernel)(Params...), int64_t blocks, int threads, int64_t shared_bytes,
                  const Args&... args) const {
    last_ = [=, seed = seed_, previous = std::move(last_)] {
      emulator::launch(blocks, threads, shared_bytes / sizeof(float), seed, [=] { kernel(args...); }, previous);
    };
  }

  template <typename... Params, typename... Args>
  void launch_cooperative(void (*kernel)(Params...), int64_t blocks, int threads, int64_t shared_bytes,
                          const Args&... args) const {
    finish();
    last_ = [=, seed = seed_] {
      emulator::launch(blocks, threads, shared_bytes / sizeof(float), seed, [=] { kernel(args...); }, nullptr, true);
    };
  }

 private:
  void finish() const {
    if (last_) last_();
    last_ = nullptr;
  }

  unsigned seed_;
  int64_t shared_bytes_;
  mutable std::function<void()> last_;  // not yet run
};

}  // namespace secureafl::cuda
