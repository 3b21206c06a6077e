// Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

// The marks of an iteration that follows its plan and is not measured: the methods of the same
// names in engine.py are the reference. `engine` is an `OffloadEngine`. Rare
// cases are left to Python: the functions then return false (or None), with no effect.

#pragma once

#include "hooks.h"
#include "mark.h"
#include "steps.h"

namespace slipstream {

class Marks {
 public:
  // Starts a group whose input is `tensor`.
  static bool start(const py::object& engine, const py::object& tensor, const py::object& name) {
    Iteration now(GET(engine, "now"));
    Pass* chunk_pass = current_pass(now);
    if (chunk_pass == nullptr || !is_torch_tensor(tensor)) return false;
    Store& store = *inside<Steps>(now.steps()).store;
    const auto group = chunk_pass->open_group(name);
    now.set_started(py::none());
    ++store.modules[name].num_groups;
    advance(engine, now, python->forward_start, *group);
    if (now.follows_steps()) {
      const Steps& steps = inside<Steps>(now.steps());
      group->is_planned = true;
      group->is_silent = steps.leaves_out(*group);
      store.started = group;
      store.kept_in = steps.tracks(*group) ? py::none() : steps.trace;
    } else {  // The iteration has departed from its plan, so Python enters the region.
      store.started = nullptr;
      now.set_started(py::cast(group));
    }
    if (!group->is_silent) {
      call_before(tensor, Callback([engine, group] { leave(engine, group); }));
    }
    return true;
  }

  // Enters the region of the started group.
  static bool enter(const py::object& engine) {
    const Iteration now(GET(engine, "now"));
    if (current_pass(now) == nullptr || now.has_started()) return false;
    const Steps& steps = inside<Steps>(now.steps());
    return steps.store->started && Regions::enter(engine, steps);
  }

  // Ends the group of that name at its output `tensor`, which it returns with the end mark.
  static py::object end(const py::object& engine, const py::object& tensor,
                        const py::object& name) {
    Iteration now(GET(engine, "now"));
    Pass* chunk_pass = current_pass(now);
    if (chunk_pass == nullptr || !is_torch_tensor(tensor) ||
        PyObject_IsTrue(chunk_pass->given_up_by.ptr()) != 0) {
      return py::none();
    }
    const auto group = chunk_pass->commit_group(name);
    if (!group) return tensor;
    if (group->untracked_in.is_none()) Store::commit(*group);
    advance(engine, now, python->forward_commit, *group);
    if (group->is_silent) return tensor;
    return mark(tensor, Callback([engine, group] { use(engine, group); }));
  }

  // Called when forward reaches the output layer, or has computed it.
  static bool mark_output(const py::object& engine, const py::object& kind) {
    Iteration now(GET(engine, "now"));
    Pass* chunk_pass = current_pass(now);
    if (chunk_pass == nullptr || chunk_pass->groups.empty()) return false;
    advance(engine, now, kind, place_of(*chunk_pass, kind));
    return true;
  }

  // Marks the point where backward first has the gradient of any of `tensors`, a list.
  static bool mark_gradient(const py::object& engine, const py::object& kind,
                            const py::object& tensors) {
    const Iteration now(GET(engine, "now"));
    Pass* chunk_pass = current_pass(now);
    if (chunk_pass == nullptr || chunk_pass->groups.empty() || !PyList_CheckExact(tensors.ptr())) {
      return false;
    }
    std::vector<Node*> nodes;
    for (const auto& item : py::reinterpret_borrow<py::list>(tensors)) {
      const auto object = py::reinterpret_borrow<py::object>(item);
      if (!is_torch_tensor(object)) return false;
      const at::Tensor& tensor = THPVariable_Unpack(object.ptr());
      if (!tensor.requires_grad()) continue;
      if (!tensor.grad_fn()) return false;  // A leaf has no grad_fn.
      nodes.push_back(tensor.grad_fn().get());
    }
    const auto arrival = std::make_shared<Arrival>(
        Arrival{py::reinterpret_borrow<py::object>(now.chunk()), place_of(*chunk_pass, kind)});
    for (Node* node : nodes) {
      call_at_gradient(*node, Callback([engine, kind, arrival] { come(engine, kind, *arrival); }));
    }
    return true;
  }

 private:
  using Node = torch::autograd::Node;

  // Shared by the marks on several gradients, so that only the first arrival counts.
  struct Arrival {
    py::object chunk_pass;
    Place place;
    bool is_over = false;
  };

  // Returns the current forward pass; null if marks here are not part of the plan. While offloading
  // is suspended, or layers are captured, no steps are followed.
  static Pass* current_pass(const Iteration& now) {
    if (!now.follows_steps() || now.chunk().is_none() || !at::GradMode::is_enabled() ||
        torch::autograd::get_current_graph_task_id() != -1) {
      return nullptr;
    }
    return &inside<Pass>(now.chunk());
  }

  // Whether the group belongs to the current iteration: backward may outlive its own.
  static bool is_current(const Iteration& now, const Group& group) {
    return now.find(group.chunk_pass, group.index) == &group;
  }

  // Called when backward reaches a mark of the group, which is in state `from` the first time.
  static void reach(const py::object& engine, const std::shared_ptr<Group>& group, GroupState from,
                    GroupState to, const py::object& kind) {
    const HostTime time(HostTime::AUTOGRAD);
    Iteration now(GET(engine, "now"));
    if (group->state != from || !is_current(now, *group)) return;
    group->move_to(to);
    advance(engine, now, kind, *group);
  }

  // Returns the place of a mark outside groups: `mark_of_no_group` in chunk.py.
  static Place place_of(Pass& chunk_pass, const py::object& kind) {
    if (kind.ptr() == python->backward_start.ptr()) return {chunk_pass.index, -1, python->backward};
    if (kind.ptr() == python->output_start.ptr()) ++chunk_pass.num_outputs;
    return {chunk_pass.index, -1 - chunk_pass.num_outputs, python->output_layer};
  }

  // Called when backward has computed a marked gradient.
  static void come(const py::object& engine, const py::object& kind, Arrival& arrival) {
    const HostTime time(HostTime::AUTOGRAD);
    Iteration now(GET(engine, "now"));
    if (std::exchange(arrival.is_over, true)) return;
    if (now.has_pass(arrival.place.chunk_pass, arrival.chunk_pass)) {
      advance(engine, now, kind, arrival.place);
    }
  }

  // Called when backward starts to need the group.
  static void use(const py::object& engine, const std::shared_ptr<Group>& group) {
    reach(engine, group, GroupState::COMMITTED, GroupState::IN_USE, python->backward_use);
  }

  // Called when backward has left the group.
  static void leave(const py::object& engine, const std::shared_ptr<Group>& group) {
    reach(engine, group, GroupState::IN_USE, GroupState::DONE, python->backward_end);
  }

  static void advance(const py::object& engine, Iteration& now, const py::object& kind,
                      Group& group) {
    if (is_planned(engine, now, kind, group.place())) return;
    engine.attr("advance")(kind, group.shared_from_this());
  }

  static void advance(const py::object& engine, Iteration& now, const py::object& kind,
                      const Place& place) {
    if (is_planned(engine, now, kind, place)) return;
    const py::object key = python->group_key(place.chunk_pass, place.group);
    engine.attr("advance")(kind, python->step(kind, key, place.name));
  }

  // Performs the step. Returns false, with no effect, if the plan has a different step or none.
  static bool is_planned(const py::object& engine, Iteration& now, const py::object& kind,
                         const Place& place) {
    if (!now.follows_steps()) return false;
    const auto executor = [&engine] { return GET(engine, "executor"); };
    return inside<Steps>(now.steps()).come_to(executor, now, kind, place);
  }
};

}  // namespace slipstream
