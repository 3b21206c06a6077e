// Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

#pragma once

#include <chrono>
#include <cstdint>

namespace slipstream {

// Host time by kind of call, for benchmarks, since these calls cannot be timed from Python.
struct HostTime {
  enum Kind { AUTOGRAD, DRIVER };

  static inline bool is_taken = false;
  // In callbacks from autograd, and in calls to the device's driver and allocator.
  static inline int64_t nanoseconds[2] = {0, 0};

  explicit HostTime(Kind kind) : kind(kind) {
    if (is_taken) begin = std::chrono::steady_clock::now();
  }

  ~HostTime() {
    if (!is_taken) return;
    const auto passed = std::chrono::steady_clock::now() - begin;
    nanoseconds[kind] += std::chrono::duration_cast<std::chrono::nanoseconds>(passed).count();
  }

  const Kind kind;
  std::chrono::steady_clock::time_point begin;
};

}  // namespace slipstream
