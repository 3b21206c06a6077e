// Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

// The steps of a plan, and what is due at each: `PlanExecutor` in plan_executor.py is the reference.

#pragma once

#include "store.h"

namespace slipstream {

// In the order of `ActionKind` in plan/actions.py.
enum class ActionKind { D2H, FREE, H2D };
constexpr int kNumActionKinds = 3;

struct Action {
  ActionKind kind;
  py::object key;
  // Of a copy out: positions of the group's storages that stay, and their indices in the trace.
  py::object kept, numbers;
  // The action in Python.
  py::object object;
};

struct Step {
  py::object kind, key, name;
  std::vector<Action> actions;
};

class Steps {
 public:
  // Each step is (kind, key, name, actions), each action (kind, key, kept, numbers, object).
  explicit Steps(const py::iterable& steps) {
    for (const auto& item : steps) {
      const auto fields = py::reinterpret_borrow<py::tuple>(item);
      Step step{fields[0], fields[1], fields[2], {}};
      for (const auto& action : py::object(fields[3])) {
        const auto parts = py::reinterpret_borrow<py::tuple>(action);
        step.actions.push_back({static_cast<ActionKind>(parts[0].cast<int>()), parts[1], parts[2],
                                parts[3], parts[4]});
      }
      steps_.push_back(std::move(step));
    }
  }

  // Do what is due at step `index`. False, with nothing done, if the plan has another step there.
  bool come_to(Store& store, const py::object& executor, const py::object& now, size_t index,
               const py::object& kind, const py::object& at) const {
    if (index >= steps_.size()) return false;
    const Step& step = steps_[index];
    if (step.kind.ptr() != kind.ptr() || !is_at(step, at)) return false;
    if (step.actions.empty()) return true;
    const auto groups = py::reinterpret_steal<py::object>(attribute(now, "groups"));
    for (const auto& action : step.actions) {
      PyObject* found = PyDict_GetItemWithError(groups.ptr(), action.key.ptr());
      if (found == nullptr) {
        if (PyErr_Occurred() != nullptr) throw py::error_already_set();
        continue;
      }
      Group& group = py::handle(found).cast<Group&>();
      if (group.state == GroupState::OPEN) continue;
      if (!perform(store, executor, now, action, group)) {
        executor.attr("perform")(now, action.object);
      }
    }
    return true;
  }

 private:
  static PyObject* attribute(const py::object& object, const char* name) {
    PyObject* value = PyObject_GetAttrString(object.ptr(), name);
    if (value == nullptr) throw py::error_already_set();
    return value;
  }

  static bool is_at(const Step& step, const py::object& at) {
    if (py::isinstance<Group>(at)) {
      const Group& group = at.cast<const Group&>();
      return is_same(step.key, group.key) && is_same(step.name, group.name);
    }
    return is_same(step.key, at.attr("key")) && is_same(step.name, at.attr("name"));
  }

  static bool perform(Store& store, const py::object& executor, const py::object& now,
                      const Action& action, Group& group) {
    if (action.kind == ActionKind::H2D) return store.copy_in(group, executor.attr("store"));
    if (group.state != GroupState::COMMITTED) return true;
    if (action.kind == ActionKind::FREE) return store.release(group, executor.attr("store"));
    const bool has_layout = now.attr("has_layout").cast<bool>();
    return store.copy_out(group, action.kept, has_layout ? action.numbers : py::none());
  }

  std::vector<Step> steps_;
};

}  // namespace slipstream
