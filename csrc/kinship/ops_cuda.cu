#include <torch/csrc/stable/library.h>

#include "kinship/launch.cuh"
#include "kinship/ops_impl.h"

SECUREAFL_REGISTER_KIN(CudaKin, CUDA)
