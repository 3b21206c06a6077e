// Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

// The marks of an iteration that follows its plan and is not measured: the methods of the same
// names in engine.py are the reference. In all other cases a function returns false (or None) with
// no effect, and the engine does it. `engine` has the methods of `EngineOfMarks` in
// native_store.py; it keeps its store.

#pragma once

#include "hooks.h"
#include "mark.h"
#include "steps.h"

namespace slipstream {

class Marks {
 public:
  // Starts a group whose input is `tensor`.
  static bool start(Store& store, const py::object& engine, const py::object& tensor,
                    const py::object& name) {
    const auto now = followed(store);
    Pass* chunk_pass = current_pass(now);
    if (chunk_pass == nullptr || !is_torch_tensor(tensor)) return false;
    const auto group = chunk_pass->open_group(name);
    ++store.modules[name].num_groups;
    advance(now, engine, python->forward_start, *group);
    store.started = nullptr;
    if (now->is_followed) {  // else Python enters the region
      group->is_planned = true;
      group->is_silent = now->leaves_out(*group);
      store.started = group;
      store.kept_in = now->steps().tracks(*group) ? py::none() : now->steps().trace;
    }
    if (!group->is_silent) {
      call_before(tensor, Callback([engine, &store, group] { leave(store, engine, group); }));
    }
    return true;
  }

  // Enters the region of the started group.
  static bool enter(const py::object& owner_of_store, Store& store, const py::object& engine,
                    const py::object& flag) {
    if (!store.started || current_pass(followed(store)) == nullptr) return false;
    return Regions::enter(owner_of_store, store, engine, flag);
  }

  // Ends the group of that name at its output `tensor`, which it returns with the end mark.
  static py::object end(Store& store, const py::object& engine, const py::object& tensor,
                        const py::object& name) {
    const auto now = followed(store);
    Pass* chunk_pass = current_pass(now);
    if (chunk_pass == nullptr || !is_torch_tensor(tensor) ||
        PyObject_IsTrue(chunk_pass->given_up_by.ptr()) != 0) {
      return py::none();
    }
    const auto group = chunk_pass->commit_group(name);
    if (!group) return tensor;
    if (group->untracked_in.is_none()) Store::commit(*group);
    advance(now, engine, python->forward_commit, *group);
    if (group->is_silent) return tensor;
    return mark(tensor, Callback([engine, &store, group] { use(store, engine, group); }));
  }

  // Called when forward reaches the output layer, or has computed it.
  static bool mark_output(Store& store, const py::object& engine, const py::object& kind) {
    const auto now = followed(store);
    Pass* chunk_pass = current_pass(now);
    if (chunk_pass == nullptr || chunk_pass->groups.empty()) return false;
    const Place place = place_of(*chunk_pass, kind);
    if (!is_planned(*now, engine, kind, place)) engine.attr("depart")(kind, step_at(kind, place));
    return true;
  }

  // Marks the point where backward first has the gradient of any of `tensors`, a list.
  static bool mark_gradient(Store& store, const py::object& engine, const py::object& kind,
                            const py::object& tensors) {
    const auto now = followed(store);
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
    const auto arrival =
        std::make_shared<Arrival>(Arrival{now->current, place_of(*chunk_pass, kind)});
    for (Node* node : nodes) {
      call_at_gradient(*node, Callback([engine, &store, kind, arrival] {
        come(store, engine, kind, *arrival);
      }));
    }
    return true;
  }

 private:
  using Node = torch::autograd::Node;

  // Shared by the marks on several gradients, so that only the first arrival counts.
  struct Arrival {
    std::shared_ptr<Pass> chunk_pass;
    Place place;
    bool is_over = false;
  };

  // Returns the iteration whose plan C++ follows now; null if there is none.
  static std::shared_ptr<Iteration> followed(const Store& store) {
    auto now = store.now.lock();
    return now && now->is_followed ? now : nullptr;
  }

  // Returns the current forward pass; null if marks here are not part of the plan. While offloading
  // is suspended, or layers are captured, no plan is followed.
  static Pass* current_pass(const std::shared_ptr<Iteration>& now) {
    if (!now || !at::GradMode::is_enabled() ||
        torch::autograd::get_current_graph_task_id() != -1) {
      return nullptr;
    }
    return now->current.get();
  }

  // Called when backward reaches a mark of the group, which is in state `from` the first time.
  static void reach(const std::shared_ptr<Iteration>& now, const py::object& engine, Group& group,
                    GroupState from, GroupState to, const py::object& kind) {
    // Backward may outlive its iteration.
    const bool is_current = now->find(group.chunk_pass, group.index) == &group;
    if (group.state != from || !is_current) return;
    group.move_to(to);
    advance(now, engine, kind, group);
  }

  // Returns the place of a mark outside groups: `mark_of_no_group` in chunk.py.
  static Place place_of(Pass& chunk_pass, const py::object& kind) {
    if (kind.ptr() == python->backward_start.ptr()) return {chunk_pass.index, -1, python->backward};
    if (kind.ptr() == python->output_start.ptr()) ++chunk_pass.num_outputs;
    return {chunk_pass.index, -1 - chunk_pass.num_outputs, python->output_layer};
  }

  static py::object step_at(const py::object& kind, const Place& place) {
    return python->step(kind, python->group_key(place.chunk_pass, place.group), place.name);
  }

  // Called when backward has computed a marked gradient.
  static void come(Store& store, const py::object& engine, const py::object& kind,
                   Arrival& arrival) {
    const HostTime time(HostTime::AUTOGRAD);
    if (std::exchange(arrival.is_over, true)) return;
    const auto now = followed(store);
    if (now && !now->has(arrival.chunk_pass.get())) return;
    if (now && is_planned(*now, engine, kind, arrival.place)) return;
    engine.attr("come_to_gradient")(step_at(kind, arrival.place), arrival.chunk_pass);
  }

  // Called when backward starts to need the group.
  static void use(Store& store, const py::object& engine, const std::shared_ptr<Group>& group) {
    const HostTime time(HostTime::AUTOGRAD);
    if (const auto now = followed(store)) {
      reach(now, engine, *group, GroupState::COMMITTED, GroupState::IN_USE, python->backward_use);
    } else {
      engine.attr("use_group")(group);
    }
  }

  // Called when backward has left the group.
  static void leave(Store& store, const py::object& engine, const std::shared_ptr<Group>& group) {
    const HostTime time(HostTime::AUTOGRAD);
    if (const auto now = followed(store)) {
      reach(now, engine, *group, GroupState::IN_USE, GroupState::DONE, python->backward_end);
    } else {
      engine.attr("end_group")(group);
    }
  }

  static void advance(const std::shared_ptr<Iteration>& now, const py::object& engine,
                      const py::object& kind, Group& group) {
    if (is_planned(*now, engine, kind, group.place())) return;
    engine.attr("depart")(kind, group.shared_from_this());
  }

  // Performs the step of a mark. Returns false, with no effect, if the plan has another one or none
  // there.
  static bool is_planned(Iteration& now, const py::object& engine, const py::object& kind,
                         const Place& place) {
    const auto outcome = now.come_to(kind, place);
    if (!outcome.left.empty()) engine.attr("perform")(Iteration::in_python(outcome.left));
    return outcome.is_planned;
  }
};

}  // namespace slipstream
