#include <Python.h>

#include "round/round.h"
#include "round/tiles.h"
#include "row_wise/kinship/kinship.h"

// The module _C. Importing it loads the library, which registers the ops; it binds none of them. It uses Python's
// limited API only (Py_LIMITED_API, set by CMakeLists.txt), so one binary serves Python 3.11 and all later versions.

namespace {

// The instruction set that the compiler was allowed to use.
const char* simd() {
#if defined(__AVX512F__)
  return "avx512";
#elif defined(__AVX2__)
  return "avx2";
#elif defined(__SSE2__)
  return "sse2";
#elif defined(__ARM_FEATURE_SVE)
  return "sve";
#elif defined(__ARM_NEON)
  return "neon";
#else
  return "none";
#endif
}

PyObject* build_info(PyObject*, PyObject*) {
  const char* cuda = nullptr;  // None in Python
  const char* commit = nullptr;
#if defined(SECUREAFL_CUDA_ARCHS)
  cuda = SECUREAFL_CUDA_ARCHS;
#endif
#if defined(SECUREAFL_COMMIT)
  commit = SECUREAFL_COMMIT;
#endif
  return Py_BuildValue("{s:s,s:s,s:z,s:z,s:s,s:s,s:s}", "version", SECUREAFL_VERSION, "torch", SECUREAFL_TORCH, "cuda",
                       cuda, "commit", commit, "sources", SECUREAFL_SOURCES, "compiler", SECUREAFL_COMPILER, "simd",
                       simd());
}

// (cuda, clients, memory) -> coordinates per tile of the history that `step_` expects
PyObject* tile_columns(PyObject*, PyObject* args) {
  int cuda = 0;
  long long clients = 0, memory = 0;
  if (!PyArg_ParseTuple(args, "pLL:tile_columns", &cuda, &clients, &memory)) return nullptr;
  return PyLong_FromLongLong(cuda ? secureafl::shape_of(clients, memory).columns : secureafl::kCpuColumns);
}

// (cuda, memory) -> the most clients that `step_` supports with so many pairs of each
PyObject* most_clients(PyObject*, PyObject* args) {
  int cuda = 0;
  long long memory = 0;
  if (!PyArg_ParseTuple(args, "pL:most_clients", &cuda, &memory)) return nullptr;
  return PyLong_FromLongLong(cuda ? secureafl::most_gpu_clients(memory) : secureafl::kMaxClients);
}

// (clients, memory) -> number of sums that one pass makes and that ranks add up
PyObject* pass_sums(PyObject*, PyObject* args) {
  long long clients = 0, memory = 0;
  if (!PyArg_ParseTuple(args, "LL:pass_sums", &clients, &memory)) return nullptr;
  return PyLong_FromLongLong(secureafl::pass_sums(clients, memory));
}

PyMethodDef kFunctions[] = {{"build_info", build_info, METH_NOARGS, "What was built, as a dict."},
                            {"tile_columns", tile_columns, METH_VARARGS, "(cuda, clients, memory) -> int"},
                            {"most_clients", most_clients, METH_VARARGS, "(cuda, memory) -> int"},
                            {"pass_sums", pass_sums, METH_VARARGS, "(clients, memory) -> int"},
                            {nullptr, nullptr, 0, nullptr}};

PyModuleDef kModule = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, kFunctions, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__C() {
  PyObject* module = PyModule_Create(&kModule);
  if (module == nullptr) return nullptr;
  const bool failed = PyModule_AddIntConstant(module, "MOST_ROW_CLIENTS", secureafl::kMaxRowClients) ||
                      PyModule_AddIntConstant(module, "VERDICT_BYTES", sizeof(secureafl::Verdict));
  if (!failed) return module;
  Py_DECREF(module);
  return nullptr;
}
