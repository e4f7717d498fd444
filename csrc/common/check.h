#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/tensors.h"

// Argument checks of all ops. They run in the kernels that the dispatcher calls, so a call through torch.ops is checked
// too. Every error text reads "secureafl::op: argument must .., got ..".

// The library of the simulator sets another namespace (CMakeLists.txt).
#ifndef SECUREAFL_OP_NAMESPACE
#define SECUREAFL_OP_NAMESPACE "secureafl"
#endif

namespace secureafl::SECUREAFL_KIND {

// No streams: a stream looks up its formats in a locale. This fails if the compiler links libstdc++ into this module
// while torch brings its own (seen with one gcc).
inline std::string text(const std::string& part) { return part; }
inline std::string text(int64_t number) { return std::to_string(number); }
inline std::string text(double number) {
  char digits[32];
  std::snprintf(digits, sizeof(digits), "%g", number);
  return digits;
}

template <typename... Parts>
[[noreturn]] inline void refuse(const char* op, const Parts&... parts) {
  throw std::runtime_error((SECUREAFL_OP_NAMESPACE "::" + std::string(op) + ": " + ... + text(parts)));
}

// (3, 4) or (4,), as Python writes it.
inline std::string shape_text(const std::vector<int64_t>& sizes) {
  std::string shape = "(";
  for (size_t i = 0; i < sizes.size(); ++i) shape += (i ? ", " : "") + std::to_string(sizes[i]);
  return shape + (sizes.size() == 1 ? ",)" : ")");
}

inline std::vector<int64_t> sizes_of(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  return {sizes.begin(), sizes.end()};
}

inline std::vector<int64_t> strides_of(const Tensor& tensor) {
  const auto strides = tensor.strides();
  return {strides.begin(), strides.end()};
}

inline std::string name_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float: return "float32";
    case ScalarType::Double: return "float64";
    case ScalarType::Half: return "float16";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Long: return "int64";
    case ScalarType::Int: return "int32";
    case ScalarType::Bool: return "bool";
    case ScalarType::Byte: return "uint8";
    case ScalarType::ComplexFloat: return "complex64";
    case ScalarType::ComplexDouble: return "complex128";
    default: return torch::headeronly::toString(dtype);
  }
}

inline std::string device_of(const Tensor& tensor) {
  if (tensor.is_cpu()) return "cpu";
  if (tensor.is_cuda()) return "cuda:" + std::to_string(tensor.get_device_index());
  return "another kind of device";
}

// Memory that a call reads or writes: [begin, end).
struct Span {
  const char* name;
  uintptr_t begin, end;
  bool written;
};

inline Span span_of(const char* name, const Tensor& tensor, bool written) {
  const auto begin = reinterpret_cast<uintptr_t>(tensor.data_ptr());
  return {name, begin, begin + static_cast<uintptr_t>(tensor.numel() * tensor.element_size()), written};
}

// Checks the arguments of one call. The first tensor sets the device and the dtype that the others must have.
class Check {
 public:
  Check(const char* op, const char* name, const Tensor& lead, bool two_byte_types)
      : op_(op), lead_name_(name), device_(device_of(lead)), dtype_(lead.scalar_type()) {
    const bool wide = dtype_ == ScalarType::Float || dtype_ == ScalarType::Double;
    const bool narrow = dtype_ == ScalarType::Half || dtype_ == ScalarType::BFloat16;
    if (!wide && !(narrow && two_byte_types)) {
      refuse(op, name, " must have dtype float32", two_byte_types ? ", float64, float16 or bfloat16" : " or float64",
             ", got ", name_of(dtype_));
    }
  }

  // meaning: the names of the dimensions, such as "(n, m, d)". A negative size matches any size.
  void shape(const char* name, const Tensor& tensor, const char* meaning, const std::vector<int64_t>& sizes) const {
    bool fits = tensor.dim() == static_cast<int64_t>(sizes.size());
    bool known = !sizes.empty();
    for (size_t i = 0; i < sizes.size(); ++i) {
      fits = fits && (sizes[i] < 0 || tensor.size(static_cast<int64_t>(i)) == sizes[i]);
      known = known && sizes[i] >= 0;
    }
    if (fits) return;
    refuse(op_, name, " must have shape ", meaning, known ? " = " + shape_text(sizes) : "", ", got ",
           shape_text(sizes_of(tensor)));
  }

  void floats(const char* name, const Tensor& tensor, const char* meaning, const std::vector<int64_t>& sizes) const {
    dtype(name, tensor, dtype_, " like ");
    place(name, tensor);
    shape(name, tensor, meaning, sizes);
  }

  void typed(const char* name, const Tensor& tensor, ScalarType type, const char* meaning,
             const std::vector<int64_t>& sizes) const {
    dtype(name, tensor, type, nullptr);
    place(name, tensor);
    shape(name, tensor, meaning, sizes);
  }

  // A tensor that is written in place must be contiguous: a contiguous copy would lose the result.
  void state(const char* name, const Tensor& tensor, ScalarType type, const char* meaning,
             const std::vector<int64_t>& sizes) const {
    typed(name, tensor, type, meaning, sizes);
    if (!tensor.is_contiguous()) refuse(op_, name, " must be contiguous, got strides ", shape_text(strides_of(tensor)));
  }

  // For memory that is loaded in pieces of `bytes` bytes.
  void aligned(const char* name, const Tensor& tensor, int64_t bytes) const {
    const auto past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(tensor.data_ptr()) % bytes);
    if (past != 0)
      refuse(op_, name, " must be aligned to ", bytes, " bytes, got an address ", past, " past a multiple");
  }

  // No two arguments may overlap if one of them is written.
  void no_overlap(const std::vector<Span>& spans) const {
    for (size_t i = 0; i < spans.size(); ++i) {
      for (size_t j = 0; j < i; ++j) {
        const Span &a = spans[i], &b = spans[j];
        if ((a.written || b.written) && a.begin < b.end && b.begin < a.end) {
          refuse(op_, a.name, " must not overlap another argument, got memory of ", b.name);
        }
      }
    }
  }

  // what: the text before the bounds, such as "classes must lie in".
  void within(const char* what, int64_t value, int64_t least, int64_t most) const {
    if (value < least || value > most) refuse(op_, what, " ", least, " to ", most, ", got ", value);
  }

  // what: the condition, such as "lr must be finite".
  void number(const char* what, double value, bool fits) const {
    if (!fits) refuse(op_, what, ", got ", value);
  }

  void between(const char* what, double value, double least, double most) const {
    number(what, value, value >= least && value <= most);
  }

  void trim(int64_t trim, int64_t rows) const {
    if (trim < 0) refuse(op_, "trim must be 0 or more, got ", trim);
    if (trim >= (rows + 1) / 2) {  // 2 * trim >= rows, without overflow
      refuse(op_, "trim must leave a row, 2 * trim < ", rows, ", got trim = ", trim);
    }
  }

  // The share of an update that does not move the model, in averages of steps.
  void least_share(double share) const {
    number("least_share must be above 0 and at most 1", share, share > 0 && share <= 1);
  }

  void trust(double trust) const { number("trust must be 0 or more (inf: no cap)", trust, trust >= 0); }

 private:
  void dtype(const char* name, const Tensor& tensor, ScalarType expected, const char* like) const {
    if (tensor.scalar_type() == expected) return;
    refuse(op_, name, " must have dtype ", name_of(expected), like ? like : "", like ? lead_name_ : "", ", got ",
           name_of(tensor.scalar_type()));
  }

  void place(const char* name, const Tensor& tensor) const {
    const std::string device = device_of(tensor);
    if (device != device_) {
      refuse(op_, name, " must be on ", device_, " like ", lead_name_, ", got ", device);
    }
  }

  const char* op_;
  const char* lead_name_;
  std::string device_;
  ScalarType dtype_;
};

}  // namespace secureafl::SECUREAFL_KIND
