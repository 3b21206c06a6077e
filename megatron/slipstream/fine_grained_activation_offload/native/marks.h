// Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

// The marks of groups in an iteration that follows its plan, where nothing is measured: the methods
// of those names in engine.py and manager.py are the reference. `engine` is a
// `PipelineOffloadManager`. Where anything is out of the ordinary, they leave it to Python.

#pragma once

#include "hooks.h"
#include "mark.h"
#include "steps.h"

namespace slipstream {

class Marks {
 public:
  // A group starts whose input is `tensor`. False, with nothing done, if Python has to do it.
  static bool start(const py::object& engine, const py::object& tensor, const py::object& name) {
    Iteration now(GET(engine, "_now"));
    Pass* chunk_pass = current_pass(now);
    if (chunk_pass == nullptr || !is_torch_tensor(tensor)) return false;
    const Steps& steps = inside<Steps>(now.steps());
    Store& store = *steps.store;
    const auto group = chunk_pass->open_group(name);
    group->is_planned = true;
    now.set_nothing_started();
    store.started = group;
    store.kept_in = steps.tracks(*group) ? py::none() : steps.trace;
    ++store.modules[name].num_groups;
    advance(engine, now, python->forward_start, group);
    call_before(tensor, Callback([engine, group] { leave(engine, group); }));
    return true;
  }

  // Enter the region of the group that has started. False, with nothing done, if Python has to.
  static bool enter(const py::object& engine) {
    const Iteration now(GET(engine, "_now"));
    if (current_pass(now) == nullptr || now.has_started()) return false;
    Store& store = *inside<Steps>(now.steps()).store;
    return store.started && Regions::enter(engine, store);
  }

  // The group of that name ends; `tensor` is one of its outputs. Returns that with the mark of the
  // end; None, with nothing done, if Python has to do it.
  static py::object end(const py::object& engine, const py::object& tensor,
                        const py::object& name) {
    Iteration now(GET(engine, "_now"));
    Pass* chunk_pass = current_pass(now);
    if (chunk_pass == nullptr || !is_torch_tensor(tensor) ||
        PyObject_IsTrue(chunk_pass->given_up_by.ptr()) != 0) {
      return py::none();
    }
    const auto group = chunk_pass->commit_group(name);
    if (!group) return tensor;
    if (group->untracked_in.is_none()) Store::commit(*group);
    advance(engine, now, python->forward_commit, group);
    return mark(tensor, Callback([engine, group] { use(engine, group); }));
  }

 private:
  // The pass that forward is in; null where marks are not the plan's. While offloading is
  // suspended, or layers are captured, no steps are followed.
  static Pass* current_pass(const Iteration& now) {
    if (!now.follows_steps() || now.chunk().is_none() || !at::GradMode::is_enabled() ||
        torch::autograd::get_current_graph_task_id() != -1) {
      return nullptr;
    }
    return &inside<Pass>(now.chunk());
  }

  // Backward may outlive its iteration's end.
  static bool is_current(const Iteration& now, const Group& group) {
    return now.find(group.chunk_pass, group.index) == &group;
  }

  // Backward reaches a mark of the group, which is in state `from` unless it has been here before.
  static void reach(const py::object& engine, const std::shared_ptr<Group>& group, GroupState from,
                    GroupState to, const py::object& kind) {
    const HostTime time(HostTime::AUTOGRAD);
    Iteration now(GET(engine, "_now"));
    if (group->state != from || !is_current(now, *group)) return;
    group->move_to(to);
    advance(engine, now, kind, group);
  }

  // Backward needs the group from here on.
  static void use(const py::object& engine, const std::shared_ptr<Group>& group) {
    reach(engine, group, GroupState::COMMITTED, GroupState::IN_USE, python->backward_use);
  }

  // Backward has left the group.
  static void leave(const py::object& engine, const std::shared_ptr<Group>& group) {
    reach(engine, group, GroupState::IN_USE, GroupState::DONE, python->backward_end);
  }

  static void advance(const py::object& engine, Iteration& now, const py::object& kind,
                      const std::shared_ptr<Group>& group) {
    if (now.follows_steps()) {
      const size_t index = now.num_steps();
      now.set_num_steps(index + 1);
      const auto executor = [&engine] { return GET(engine, "_executor"); };
      if (inside<Steps>(now.steps()).come_to(executor, now, index, kind, *group)) return;
      now.set_num_steps(index);
    }
    engine.attr("_advance")(kind, group);
  }
};

}  // namespace slipstream
