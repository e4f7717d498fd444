#pragma once

// Tensors of an op's arguments, in their order.
struct Reader {
  void** at;
  template <typename T>
  void operator()(T*& field) {
    field = static_cast<T*>(*at++);
  }
};
