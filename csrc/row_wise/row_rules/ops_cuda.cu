#include <torch/csrc/stable/library.h>

#include "row_wise/kinship/launch.cuh"
#include "row_wise/row_rules/choose.h"
#include "row_wise/row_rules/ops_impl.h"

namespace secureafl {

class CudaRowRules : public CudaKin {
 public:
  using CudaKin::CudaKin;

  void row_step(const RowRound& r, const Tensor& like) const { kin_step(r, like); }
};

}  // namespace secureafl

SECUREAFL_REGISTER_ROW_RULES(CudaRowRules, CUDA)
