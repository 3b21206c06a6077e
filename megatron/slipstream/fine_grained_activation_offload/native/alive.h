// Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

// Counts the objects of a class, so that tests see those that are never freed.

#pragma once

#include <cstdint>

namespace slipstream {

template <typename T>
class Alive {
 public:
  Alive() { ++number_; }
  Alive(const Alive&) = delete;
  ~Alive() { --number_; }

  static int64_t number() { return number_; }

 private:
  static inline int64_t number_ = 0;
};

}  // namespace slipstream
