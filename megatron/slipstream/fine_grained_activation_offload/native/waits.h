// Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

// Signals, and the waits for them: `Waits` in copy_streams.py is the reference.

#pragma once

#include <optional>

#include "driver.h"

namespace slipstream {

// A point in a stream that other streams can wait for.
struct Signal {
  Event event;
  // Never freed, so that copying a signal need not count references.
  PyObject* stream_id;
  int stream;
  int64_t position;
  int64_t graph;
};

class Waits {
 public:
  explicit Waits(const py::object& backend) : driver(make_driver(backend, left_out)) {}

  // The edge whose waits are left out from now on; set by mutation tests.
  static inline Edge left_out = Edge::NONE;

  template <typename Visit>
  void references(const Visit& visit) {
    driver->references(visit);
  }

  std::unique_ptr<Driver> driver;
  // The graph being captured; 0 if none.
  int64_t graph = 0;
  bool is_timed = false;

  // Whether nothing needs the Python path: no timing and no graph capture.
  bool is_plain() const { return graph == 0 && !is_timed; }

  Signal record(int stream) { return signal(driver->record(stream), stream); }

  Signal signal(Event event, int stream) {
    return {std::move(event), driver->stream(stream).id.ptr(), stream, next_position_++, graph};
  }

  // Returns whether `stream` must wait for `signal`; if so, records the wait.
  bool is_due(int stream, const Signal& signal) {
    if (signal.graph != graph) return false;
    const size_t pair = static_cast<size_t>(stream) * kMaxStreams + signal.stream;
    if (stream >= kMaxStreams || signal.stream >= kMaxStreams) return true;
    if (waited_.size() <= pair) waited_.resize(pair + 1, 0);
    if (waited_[pair] >= signal.position) return false;
    waited_[pair] = signal.position;
    return true;
  }

  void wait(Edge edge, int stream, Signal& signal) {
    if (!is_due(stream, signal)) return;
    try {
      driver->wait(edge, stream, signal.event);
    } catch (...) {
      forget();  // It may not have been issued.
      throw;
    }
  }

  // Adds `signal`, keeping only the latest signal of each stream and graph.
  static void add_latest(std::vector<Signal>& latest, const Signal& signal) {
    for (auto& known : latest) {
      if (known.stream == signal.stream && known.graph == signal.graph) {
        if (known.position < signal.position) known = signal;
        return;
      }
    }
    latest.push_back(signal);
  }

  void forget() { waited_.assign(waited_.size(), 0); }

 private:
  static constexpr int kMaxStreams = 64;

  int64_t next_position_ = 1;
  // The latest position waited for, by waiting and signaling stream: [Note: A wait covers what came
  // before].
  std::vector<int64_t> waited_;
};

}  // namespace slipstream
