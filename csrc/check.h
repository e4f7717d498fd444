#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <cstdio>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "math/lbfgs.h"
#include "math/rank.h"
#include "tensors.h"

// Argument checks that both devices call: where the dispatcher lands, so that torch.ops cannot slip past.
// Every refusal reads "secureafl::op: argument must .., got ..".

namespace secureafl::SECUREAFL_KIND {

// Plain strings, no streams: a stream looks its formats up in a locale, which goes wrong where a compiler links
// libstdc++ into this module while torch brings its own (seen with one such gcc).
inline std::string text(const std::string& part) { return part; }
inline std::string text(int64_t number) { return std::to_string(number); }
inline std::string text(double number) {
  char digits[32];
  std::snprintf(digits, sizeof(digits), "%g", number);
  return digits;
}

template <typename... Parts>
[[noreturn]] inline void refuse(const char* op, const Parts&... parts) {
  throw std::runtime_error(("secureafl::" + std::string(op) + ": " + ... + text(parts)));
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

// Memory that a call reads or writes, from `begin` up to `end`.
struct Span {
  const char* name;
  uintptr_t begin, end;
  bool written;
};

inline Span span_of(const char* name, const Tensor& tensor, bool written) {
  const auto begin = reinterpret_cast<uintptr_t>(tensor.data_ptr());
  return {name, begin, begin + static_cast<uintptr_t>(tensor.numel() * tensor.element_size()), written};
}

// The arguments of one call, held against its first tensor's device and dtype.
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

  // `meaning` names the dimensions: "(n, m, d)". A negative size is free.
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

  // A tensor that is written to in place: no copy can stand in for it.
  void state(const char* name, const Tensor& tensor, ScalarType type, const char* meaning,
             const std::vector<int64_t>& sizes) const {
    typed(name, tensor, type, meaning, sizes);
    if (!tensor.is_contiguous()) refuse(op_, name, " must be contiguous, got strides ", shape_text(strides_of(tensor)));
  }

  // Memory that is read in pieces of so many bytes.
  void aligned(const char* name, const Tensor& tensor, int64_t bytes) const {
    const auto past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(tensor.data_ptr()) % bytes);
    if (past != 0)
      refuse(op_, name, " must begin at a multiple of ", bytes, " bytes, got one that begins ", past, " past");
  }

  // What is written must not be read, or written, under another name.
  void apart(const std::vector<Span>& spans) const {
    for (size_t i = 0; i < spans.size(); ++i) {
      for (size_t j = 0; j < i; ++j) {
        const Span &a = spans[i], &b = spans[j];
        if ((a.written || b.written) && a.begin < b.end && b.begin < a.end) {
          refuse(op_, a.name, " must have memory of its own, got some of ", b.name);
        }
      }
    }
  }

  // `what` ends where the bounds follow: "classes must lie in".
  void within(const char* what, int64_t value, int64_t least, int64_t most) const {
    if (value < least || value > most) refuse(op_, what, " ", least, " to ", most, ", got ", value);
  }

  // `what` says what the number must be: "lr must be finite".
  void number(const char* what, double value, bool fits) const {
    if (!fits) refuse(op_, what, ", got ", value);
  }

  void trim(int64_t trim, int64_t rows) const {
    if (trim < 0) refuse(op_, "trim must be 0 or more, got ", trim);
    if (trim >= (rows + 1) / 2) {  // 2 * trim >= rows, but for the overflow
      refuse(op_, "trim must leave a row, 2 * trim < ", rows, ", got trim = ", trim);
    }
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

// vector (d): a net's parameters
inline Check check_net(const char* op, const Tensor& vector) {
  if (vector.scalar_type() != ScalarType::Float) {
    refuse(op, "vector must have dtype float32, got ", name_of(vector.scalar_type()));
  }
  return Check(op, "vector", vector, /*two_byte_types=*/false);
}

// updates (n, d), mask (n)
inline Check check_rows(const char* op, const Tensor& updates, const std::optional<Tensor>& mask) {
  const Check check(op, "updates", updates, /*two_byte_types=*/true);
  check.shape("updates", updates, "(n, d)", {-1, -1});
  if (mask) check.typed("mask", *mask, ScalarType::Bool, "(n,)", {updates.size(0)});
  return check;
}

// update, last_update, model, last_model (d)
inline void check_factor(const char* op, const Tensor& update, const Tensor& last_update, const Tensor& model,
                         const Tensor& last_model) {
  const Check check(op, "update", update, /*two_byte_types=*/false);
  check.shape("update", update, "(d,)", {-1});
  check.floats("last_update", last_update, "(d,)", {update.size(0)});
  check.floats("model", model, "(d,)", {update.size(0)});
  check.floats("last_model", last_model, "(d,)", {update.size(0)});
}

// model (d), last_updates and last_models (n, d), dw and dg (n, m, d), pairs (n)
inline Check check_history(const char* op, const Tensor& model, const Tensor& last_updates, const Tensor& last_models,
                           const Tensor& dw, const Tensor& dg, const Tensor& pairs, double trust) {
  const Check check(op, "model", model, /*two_byte_types=*/false);
  check.shape("model", model, "(d,)", {-1});
  check.floats("last_updates", last_updates, "(n, d)", {-1, model.size(0)});
  const int64_t n = last_updates.size(0), d = model.size(0);
  check.floats("last_models", last_models, "(n, d)", {n, d});
  check.floats("dw", dw, "(n, m, d)", {n, -1, d});
  const int64_t m = dw.size(1);
  if (m > kMaxPairs) refuse(op, "dw must hold at most ", kMaxPairs, " pairs per client, got ", m);
  check.floats("dg", dg, "(n, m, d)", {n, m, d});
  check.typed("pairs", pairs, ScalarType::Long, "(n,)", {n});
  check.trust(trust);
  return check;
}

// pairs[k] of every wanted client, where the host can read them.
inline void check_pairs(const char* op, const DenseHistory& tensors, const Wanted& wanted) {
  const int64_t* pairs = data<int64_t>(tensors.pairs);
  const int64_t n = tensors.dw.size(0), m = tensors.dw.size(1);
  for (int64_t k = 0; k < n; ++k) {
    if (wanted(k) && (pairs[k] < 0 || pairs[k] > m)) {
      refuse(op, "pairs must lie in 0..", m, ", got ", pairs[k], " for client ", k);
    }
  }
}

inline Rule rule_named(const char* op, const std::string& name) {
  if (name == "median") return Rule::kMedian;
  if (name == "mean") return Rule::kMean;
  if (name == "trimmed_mean") return Rule::kTrimmedMean;
  refuse(op, "rule must be median, trimmed_mean or mean, got '", name, "'");
}

// The arguments of `aggregate` beyond the history.
inline Rule check_round(const Check& check, const Tensor& update, int64_t client, const Tensor& accepted,
                        const Tensor& seen, int64_t n, int64_t d, const std::string& rule, int64_t trim) {
  constexpr const char* op = "aggregate";
  check.floats("update", update, "(d,)", {d});
  if (client < 0 || client >= n) refuse(op, "client must lie in 0..", n - 1, ", got ", client);
  check.typed("accepted", accepted, ScalarType::Bool, "()", {});
  check.typed("seen", seen, ScalarType::Bool, "(n,)", {n});
  const Rule named = rule_named(op, rule);
  // Fewer rows may take part than there are clients: only the device knows, and it answers with zeros.
  if (named == Rule::kTrimmedMean) check.trim(trim, n);
  return named;
}

}  // namespace secureafl::SECUREAFL_KIND
