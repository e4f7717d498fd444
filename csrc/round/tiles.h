#pragma once

#include <cstdint>

// Number of coordinates per tile of the history (round.h).

namespace secureafl {

// CPU: the width of the sorting network (coordinate_wise/network_cpu.h).
constexpr int64_t kCpuColumns = 64;
constexpr int64_t kMaxClients = 4096;

// GPU: a team of threads processes a tile. threads / columns threads share one coordinate, and each holds the estimates
// of `items` clients. Shapes marked common are built for 1 to 5 pairs, the others only for the default number and for
// none. One is built for any number of pairs above. This keeps the build short.
struct Shape {
  int threads, columns, items;
  bool common, many_pairs = false;

  constexpr int64_t clients() const { return static_cast<int64_t>(threads / columns) * items; }
};

constexpr Shape kShapes[] = {{32, 8, 4, false},  {32, 4, 4, false},  {32, 4, 8, true},        {32, 2, 8, false},
                             {32, 1, 7, false},  {32, 1, 10, false}, {32, 1, 14, true},       {256, 1, 4, true},
                             {512, 1, 4, false}, {512, 1, 8, false}, {512, 1, 1, false, true}};
constexpr int64_t kDefaultMemory = 3, kFewPairs = 5, kMaxGpuPairs = 16;

constexpr bool has_all_shapes(int64_t m) { return m == kDefaultMemory || m == 0; }
constexpr bool is_built(const Shape& shape, int64_t m) {
  return m > kFewPairs ? shape.many_pairs : !shape.many_pairs && (shape.common || has_all_shapes(m));
}

// The first shape with room for n clients.
constexpr Shape shape_of(int64_t n, int64_t m) {
  for (const Shape& shape : kShapes) {
    if (n <= shape.clients() && is_built(shape, m)) return shape;
  }
  return {0, 0, 0, false};
}

// The most clients that a shape has room for, with m pairs of each.
constexpr int64_t most_gpu_clients(int64_t m) {
  int64_t most = 0;
  for (const Shape& shape : kShapes) {
    if (shape.clients() > most && is_built(shape, m)) most = shape.clients();
  }
  return most;
}
static_assert(most_gpu_clients(kDefaultMemory) == kMaxClients, "as many as on a CPU");

}  // namespace secureafl
