#include <torch/csrc/stable/library.h>

#include "row_wise/sketch/ops_impl.h"
#include "row_wise/sketch/sketch_step_cpu.h"

namespace secureafl {

struct CpuSketch {
  static constexpr bool kHostReads = true;

  explicit CpuSketch(const Tensor&) {}

  void sketch_step(const SketchRound& r, const Tensor&) const { cpu::sketch_step(r); }
};

}  // namespace secureafl

SECUREAFL_REGISTER_SKETCH(CpuSketch, CPU)
