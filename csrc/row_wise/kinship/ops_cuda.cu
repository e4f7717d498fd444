#include <torch/csrc/stable/library.h>

#include "row_wise/kinship/launch.cuh"
#include "row_wise/kinship/ops_impl.h"

SECUREAFL_REGISTER_KIN(CudaKin, CUDA)
