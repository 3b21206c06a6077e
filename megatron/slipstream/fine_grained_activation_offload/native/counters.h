// Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

// Per-module counters of groups. Python adds them to its `ModuleCounters` on request.

#pragma once

#include <vector>

#include "python.h"

namespace slipstream {

struct Counters {
  py::object name;
  int64_t num_groups = 0, num_groups_moved = 0, d2h_copies = 0, d2h_bytes = 0, h2d_copies = 0,
          h2d_bytes = 0, freed_bytes = 0, num_kept_for_host_memory = 0;

  py::dict amounts() const {
    using namespace py::literals;
    return py::dict("num_groups"_a = num_groups, "num_groups_moved"_a = num_groups_moved,
                    "d2h_copies"_a = d2h_copies, "d2h_bytes"_a = d2h_bytes,
                    "h2d_copies"_a = h2d_copies, "h2d_bytes"_a = h2d_bytes,
                    "freed_bytes"_a = freed_bytes,
                    "num_kept_for_host_memory"_a = num_kept_for_host_memory);
  }
};

class CountersByName {
 public:
  Counters& operator[](const py::object& name) {
    for (auto& counters : all_) {
      if (is_same(counters.name, name)) return counters;
    }
    all_.push_back({name});
    return all_.back();
  }

  // Pairs of module name and amounts by counter name.
  py::list items() const {
    py::list items;
    for (const auto& counters : all_) {
      items.append(py::make_tuple(counters.name, counters.amounts()));
    }
    return items;
  }

 private:
  std::vector<Counters> all_;
};

}  // namespace slipstream
