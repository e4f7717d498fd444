#pragma once

#include <cstdint>

// How many coordinates of the history lie together (math/round.h), by what works on them.

namespace secureafl {

// On the CPU as many as its sorting network takes at once (cpu/network.h).
constexpr int64_t kCpuColumns = 64;
constexpr int64_t kMaxClients = 1024;

// On a GPU a team of threads takes a tile of coordinates: threads / columns of them share one coordinate, and each
// holds the estimates of so many clients. The shapes marked common are built for every memory, all of them for the
// default one, which keeps the build short.
struct Shape {
  int threads, columns, items;
  bool common;

  constexpr int64_t clients() const { return static_cast<int64_t>(threads / columns) * items; }
};

constexpr Shape kShapes[] = {{32, 4, 8, true},   {32, 2, 8, false}, {32, 1, 7, false},
                             {32, 1, 10, false}, {32, 1, 14, true}, {256, 1, 4, true}};
constexpr int64_t kDefaultMemory = 3, kMaxGpuPairs = 5;

// The first shape that holds n clients.
constexpr Shape shape_of(int64_t n, int64_t m) {
  for (const Shape& shape : kShapes) {
    if (n <= shape.clients() && (shape.common || m == kDefaultMemory)) return shape;
  }
  return {0, 0, 0, false};
}

}  // namespace secureafl
