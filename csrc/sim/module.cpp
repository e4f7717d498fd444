#include <pybind11/pybind11.h>

// Importing this module registers the ops of the namespace secureafl_sim. It has no functions of its own.
PYBIND11_MODULE(_sim, m) { m.doc() = "The simulator's ops: torch.ops.secureafl_sim"; }
