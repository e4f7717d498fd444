#include <torch/csrc/stable/library.h>

#include "row_wise/sketch/ops_impl.h"
#include "row_wise/sketch/sketch_step.cuh"

namespace secureafl {

// A round in six kernels (sketch_step.cuh). Nothing waits for the device.
class CudaSketch {
 public:
  static constexpr bool kHostReads = false;

  explicit CudaSketch(const Tensor& on) : launch_(on.get_device_index()) {}

  void sketch_step(const SketchRound& r, const Tensor& like) const {
    const auto plan = cuda::SketchPlan::of(r.rows, r.k);
    const Tensor memory = allocate(like, ScalarType::Double, {cuda::SketchScratch::doubles(r, plan)});
    cuda::launch_sketch_step(launch_, r, plan, mutable_data<double>(memory));
  }

 private:
  cuda::Launcher launch_;
};

}  // namespace secureafl

SECUREAFL_REGISTER_SKETCH(CudaSketch, CUDA)
