// Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

#pragma once

#include <chrono>
#include <cstdint>

namespace slipstream {

// Host time in calls that autograd makes, which no Python function surrounds: for benchmarks.
struct HostTime {
  static inline bool is_taken = false;
  static inline int64_t nanoseconds = 0;

  HostTime() {
    if (is_taken) begin = std::chrono::steady_clock::now();
  }

  ~HostTime() {
    if (!is_taken) return;
    const auto passed = std::chrono::steady_clock::now() - begin;
    nanoseconds += std::chrono::duration_cast<std::chrono::nanoseconds>(passed).count();
  }

  std::chrono::steady_clock::time_point begin;
};

}  // namespace slipstream
