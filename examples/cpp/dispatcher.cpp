// The ops of SecureAFL from C++, through torch's dispatcher. Returns 1 if a result is not what it must be.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdio>

using at::Tensor;

template <typename Signature>
auto find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

int main() {
  auto median = find<Tensor(const Tensor&, const std::optional<Tensor>&)>("secureafl::median");
  auto aggregate =
      find<Tensor(const Tensor&, const Tensor&, int64_t, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                  const Tensor&, const Tensor&, const Tensor&, double, c10::string_view, int64_t)>(
          "secureafl::aggregate");

  // Five clients whose updates are 2 (w - c_k): one pair each tells L-BFGS all, and every estimate is exact.
  const int64_t n = 5, d = 1000, client = 3;
  at::manual_seed(0);
  Tensor model = at::randn(d), centres = at::randn({n, d}), last_models = at::randn({n, d}), dw = at::randn({n, 1, d});
  Tensor now = 2 * (model - centres), last_updates = 2 * (last_models - centres);
  Tensor pairs = at::ones(n, at::kLong), yes = at::ones({}, at::kBool), seen = at::ones(n, at::kBool);
  Tensor direction = aggregate.call(model, now[client], client, yes, last_updates, last_models, dw, 2 * dw, pairs, seen,
                                    /*trust=*/100.0, "median", /*trim=*/0);

  Tensor expected = std::get<0>(now.sort(0))[n / 2];
  bool right = at::equal(median.call(now, std::nullopt), expected) && at::allclose(direction, expected, 1e-4, 1e-4);
  std::printf("secureafl::median and secureafl::aggregate from C++: %s\n", right ? "as expected" : "WRONG");
  return right ? 0 : 1;
}
