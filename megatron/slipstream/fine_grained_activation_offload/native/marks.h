// Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

// The marks of groups in an iteration that follows its plan, where nothing is measured: the methods
// of those names in engine.py and manager.py are the reference. `engine` is a
// `PipelineOffloadManager`. Where anything is out of the ordinary, they leave it to Python.

#pragma once

#include <chrono>

#include "mark.h"
#include "steps.h"

namespace slipstream {

// Host time in calls that backward makes, which no Python function surrounds.
struct HostTime {
  static inline bool is_taken = false;
  static inline int64_t nanoseconds = 0;

  ~HostTime() {
    if (!is_taken) return;
    const auto passed = std::chrono::steady_clock::now() - begin;
    nanoseconds += std::chrono::duration_cast<std::chrono::nanoseconds>(passed).count();
  }

  const std::chrono::steady_clock::time_point begin = std::chrono::steady_clock::now();
};

class Marks {
 public:
  // A group starts whose input is `tensor`. False, with nothing done, if Python has to do it.
  static bool start(const py::object& engine, const py::object& tensor, const py::object& name) {
    const py::object now = GET(engine, "_now");
    Pass* chunk_pass = current_pass(engine, now);
    if (chunk_pass == nullptr || !is_torch_tensor(tensor)) return false;
    const auto group = chunk_pass->open_group(name);
    SET(now, "started", py::cast(group));
    const py::object counters = store_of(engine).modules[name];
    add_to(counters, SLIPSTREAM_NAME("num_groups"), 1);
    advance(engine, now, python->forward_start, group);
    call_before(tensor, Callback([engine, group] { leave(engine, group); }));
    return true;
  }

  // The group of that name ends; `tensor` is one of its outputs. Returns that with the mark of the
  // end; None, with nothing done, if Python has to do it.
  static py::object end(const py::object& engine, const py::object& tensor,
                        const py::object& name) {
    const py::object now = GET(engine, "_now");
    Pass* chunk_pass = current_pass(engine, now);
    if (chunk_pass == nullptr || !is_torch_tensor(tensor) || py::len(chunk_pass->given_up_by) > 0) {
      return py::none();
    }
    const auto group = chunk_pass->commit_group(name);
    if (!group) return tensor;
    if (!is_unwatched(now, *group)) store_of(engine).commit(*group);
    advance(engine, now, python->forward_commit, group);
    return mark(tensor, Callback([engine, group] { use(engine, group); }));
  }

 private:
  static Store& store_of(const py::object& engine) {
    return GET(GET(engine, "store"), "native").cast<Store&>();
  }

  // The pass that forward is in; null where marks are not the plan's.
  static Pass* current_pass(const py::object& engine, const py::object& now) {
    if (GET(now, "steps").is_none() || !at::GradMode::is_enabled() ||
        torch::autograd::get_current_graph_task_id() != -1 ||
        !GET(engine, "do_offload").cast<bool>()) {
      return nullptr;
    }
    const py::object graphs = GET(engine, "graphs"), chunk_pass = GET(now, "chunk");
    if (GET(graphs, "is_open").cast<bool>() || !GET(graphs, "layer").is_none() ||
        chunk_pass.is_none()) {
      return nullptr;
    }
    return chunk_pass.cast<Pass*>();
  }

  static bool is_unwatched(const py::object& now, Group& group) {
    const py::object unwatched = GET(now, "unwatched");
    return PyDict_GET_SIZE(unwatched.ptr()) > 0 && unwatched.contains(group.key());
  }

  // Backward may outlive its iteration's end.
  static bool is_current(const py::object& now, const Group& group) {
    const py::object passes = GET(now, "passes");
    if (group.chunk_pass >= PyList_GET_SIZE(passes.ptr())) return false;
    return py::handle(PyList_GET_ITEM(passes.ptr(), group.chunk_pass))
        .cast<const Pass&>()
        .has(group);
  }

  // Backward needs the group from here on.
  static void use(const py::object& engine, const std::shared_ptr<Group>& group) {
    const HostTime time;
    const py::object now = GET(engine, "_now");
    if (group->state != GroupState::COMMITTED || !is_current(now, *group)) return;
    group->move_to(GroupState::IN_USE);
    advance(engine, now, python->backward_use, group);
  }

  // Backward has left the group.
  static void leave(const py::object& engine, const std::shared_ptr<Group>& group) {
    const HostTime time;
    const py::object now = GET(engine, "_now");
    if (group->state != GroupState::IN_USE || !is_current(now, *group)) return;
    group->move_to(GroupState::DONE);
    advance(engine, now, python->backward_end, group);
  }

  static void advance(const py::object& engine, const py::object& now, const py::object& kind,
                      const std::shared_ptr<Group>& group) {
    const py::object steps = GET(now, "steps"), at = py::cast(group);
    if (!steps.is_none()) {
      const auto index = GET(now, "num_steps").cast<int64_t>();
      SET(now, "num_steps", py::int_(index + 1));
      const py::object executor = GET(engine, "_executor");
      if (steps.cast<const Steps&>().come_to(store_of(engine), executor, now, index, kind, at)) {
        return;
      }
      SET(now, "num_steps", py::int_(index));
    }
    engine.attr("_advance")(kind, at);
  }
};

}  // namespace slipstream
