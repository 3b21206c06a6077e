// Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

// The steps of a plan and their actions: `PlanExecutor` in plan_executor.py is the reference.

#pragma once

#include "pass.h"
#include "store.h"

namespace slipstream {

// In the order of `ActionKind` in plan/actions.py.
enum class ActionKind { D2H, FREE, H2D };

struct Action {
  ActionKind kind;
  int64_t chunk_pass, group;
  // Of a copy out: positions of the group's storages that stay, and their indices in the trace.
  py::object kept, numbers;
  // The action in Python.
  py::object object;
};

struct Step {
  py::object kind;
  int64_t chunk_pass, group;
  py::object name;
  std::vector<Action> actions;
};

class Steps {
 public:
  // Each step is (kind, key, name, actions), each action (kind, key, kept, numbers, object).
  explicit Steps(const py::iterable& steps) {
    for (const auto& item : steps) {
      const auto fields = py::reinterpret_borrow<py::tuple>(item);
      Step step{fields[0], number(fields[1], 0), number(fields[1], 1), fields[2], {}};
      for (const auto& action : py::object(fields[3])) {
        const auto parts = py::reinterpret_borrow<py::tuple>(action);
        step.actions.push_back({static_cast<ActionKind>(parts[0].cast<int>()), number(parts[1], 0),
                                number(parts[1], 1), parts[2], parts[3], parts[4]});
      }
      steps_.push_back(std::move(step));
    }
  }

  // Performs the actions of step `index`. False, with nothing done, if the plan's step differs.
  bool come_to(Store& store, const py::object& executor, const py::object& now, size_t index,
               const py::object& kind, const py::object& at) const {
    if (index >= steps_.size()) return false;
    const Step& step = steps_[index];
    if (step.kind.ptr() != kind.ptr() || !is_at(step, at)) return false;
    if (step.actions.empty()) return true;
    const py::object passes = GET(now, "passes");
    for (const auto& action : step.actions) {
      Group* group = find(passes, action);
      if (group == nullptr || group->state == GroupState::OPEN) continue;
      if (!perform(store, executor, now, action, *group)) {
        executor.attr("perform")(now, action.object);
      }
    }
    return true;
  }

 private:
  static int64_t number(const py::object& key, int place) {
    return py::reinterpret_borrow<py::tuple>(key)[place].cast<int64_t>();
  }

  static bool is_at(const Step& step, const py::object& at) {
    if (py::isinstance<Group>(at)) {
      const Group& group = at.cast<const Group&>();
      return step.chunk_pass == group.chunk_pass && step.group == group.index &&
             is_same(step.name, group.name);
    }
    const py::object key = at.attr("key");
    return step.chunk_pass == number(key, 0) && step.group == number(key, 1) &&
           is_same(step.name, at.attr("name"));
  }

  static Group* find(const py::object& passes, const Action& action) {
    if (action.chunk_pass >= PyList_GET_SIZE(passes.ptr())) return nullptr;
    const Pass& chunk_pass =
        py::handle(PyList_GET_ITEM(passes.ptr(), action.chunk_pass)).cast<const Pass&>();
    const auto& groups = chunk_pass.groups;
    return action.group < static_cast<int64_t>(groups.size()) ? groups[action.group].get()
                                                              : nullptr;
  }

  static bool perform(Store& store, const py::object& executor, const py::object& now,
                      const Action& action, Group& group) {
    if (action.kind == ActionKind::H2D) return store.copy_in(group, GET(executor, "store"));
    if (group.state != GroupState::COMMITTED) return true;
    if (action.kind == ActionKind::FREE) return store.release(group, GET(executor, "store"));
    const bool has_layout = GET(now, "has_layout").cast<bool>();
    return store.copy_out(group, action.kept, has_layout ? action.numbers : py::none());
  }

  std::vector<Step> steps_;
};

}  // namespace slipstream
