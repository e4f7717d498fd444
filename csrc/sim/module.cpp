#include <Python.h>

// The module _sim. Importing it registers the simulator's ops, torch.ops.secureafl_sim. It binds nothing else.

namespace {

PyModuleDef kModule = {PyModuleDef_HEAD_INIT,
                       "_sim",
                       "The simulator's ops: torch.ops.secureafl_sim",
                       -1,
                       nullptr,
                       nullptr,
                       nullptr,
                       nullptr,
                       nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__sim() { return PyModule_Create(&kModule); }
