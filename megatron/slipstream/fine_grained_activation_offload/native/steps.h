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
  // For a copy out: positions of the group's storages that stay, and the trace indices of all.
  py::object kept, numbers;
  // The action in Python.
  py::object object;
};

struct Step {
  py::object kind;
  Place place;
  std::vector<Action> actions;
  // Whether its mark may be left out.
  bool is_silent;

  bool is_at(const py::object& other_kind, const Place& other) const {
    return kind.ptr() == other_kind.ptr() && place.chunk_pass == other.chunk_pass &&
           place.group == other.group && is_same(place.name, other.name);
  }
};

// The running iteration: `Iteration` in iteration.py.
class Iteration {
 public:
  explicit Iteration(py::object object) : object_(std::move(object)) {}

  const py::object& object() const { return object_; }

  bool follows_steps() const { return !slots().steps.get(object_).is_none(); }
  py::handle steps() const { return slots().steps.get(object_); }
  py::handle passes() const { return slots().passes.get(object_); }
  py::handle chunk() const { return slots().chunk.get(object_); }
  bool has_started() const { return !slots().started.get(object_).is_none(); }
  void set_started(py::object group) { slots().started.set(object_, std::move(group)); }
  bool has_layout() const { return slots().has_layout.get(object_).ptr() == Py_True; }

  size_t num_steps() const {
    const size_t number = PyLong_AsSize_t(slots().num_steps.get(object_).ptr());
    if (PyErr_Occurred()) throw py::error_already_set();
    return number;
  }

  void set_num_steps(size_t number) { slots().num_steps.set(object_, py::int_(number)); }

  bool has_pass(int64_t index, const py::object& chunk_pass) const {
    PyObject* all = passes().ptr();
    return index < PyList_GET_SIZE(all) && PyList_GET_ITEM(all, index) == chunk_pass.ptr();
  }

  // Returns the group with that key; null if it has not started.
  Group* find(int64_t chunk_pass, int64_t index) const {
    PyObject* all = passes().ptr();
    if (chunk_pass >= PyList_GET_SIZE(all)) return nullptr;
    const auto& groups = inside<Pass>(PyList_GET_ITEM(all, chunk_pass)).groups;
    return index < static_cast<int64_t>(groups.size()) ? groups[index].get() : nullptr;
  }

 private:
  struct Slots {
    explicit Slots(PyTypeObject* type)
        : steps(type, "steps"),
          num_steps(type, "num_steps"),
          passes(type, "passes"),
          chunk(type, "chunk"),
          started(type, "started"),
          has_layout(type, "has_layout") {}

    Slot steps, num_steps, passes, chunk, started, has_layout;
  };

  const Slots& slots() const {
    static const Slots slots(Py_TYPE(object_.ptr()));
    return slots;
  }

  py::object object_;
};

// A set of group keys.
class Keys {
 public:
  explicit Keys(const py::iterable& keys) {
    for (const auto& item : keys) {
      const auto key = py::reinterpret_borrow<py::tuple>(item);
      const auto chunk_pass = key[0].cast<size_t>(), group = key[1].cast<size_t>();
      if (by_pass_.size() <= chunk_pass) by_pass_.resize(chunk_pass + 1);
      if (by_pass_[chunk_pass].size() <= group) by_pass_[chunk_pass].resize(group + 1, false);
      by_pass_[chunk_pass][group] = true;
    }
  }

  bool contain(int64_t chunk_pass, int64_t group) const {
    return group >= 0 && chunk_pass < static_cast<int64_t>(by_pass_.size()) &&
           group < static_cast<int64_t>(by_pass_[chunk_pass].size()) && by_pass_[chunk_pass][group];
  }

 private:
  std::vector<std::vector<bool>> by_pass_;
};

class Steps : Alive<Steps> {
 public:
  // Each step is (kind, key, name, actions), each action (kind, key, kept, numbers, object).
  // `untracked` has the keys of groups whose saved tensors need not be tracked, because the plan
  // keeps them on the device; `silent` those of groups whose backward marks may be left out;
  // `trace` is the plan's trace; `store` is a `Store`.
  Steps(py::object store, const py::iterable& steps, const py::iterable& untracked,
        const py::iterable& silent, py::object trace)
      : store(store.cast<Store*>()),
        owner_of_store(std::move(store)),
        trace(std::move(trace)),
        untracked_(untracked),
        silent_(silent) {
    for (const auto& item : steps) {
      const auto fields = py::reinterpret_borrow<py::tuple>(item);
      Step step{fields[0], place_of(fields[1], fields[2]), {}, false};
      step.is_silent = (step.kind.ptr() == python->backward_use.ptr() ||
                        step.kind.ptr() == python->backward_end.ptr()) &&
                       silent_.contain(step.place.chunk_pass, step.place.group);
      for (const auto& action : py::object(fields[3])) {
        const auto parts = py::reinterpret_borrow<py::tuple>(action);
        step.actions.push_back({static_cast<ActionKind>(parts[0].cast<int>()), number(parts[1], 0),
                                number(parts[1], 1), parts[2], parts[3], parts[4]});
      }
      steps_.push_back(std::move(step));
    }
  }

  template <typename Visit>
  void references(const Visit& visit) {
    visit(owner_of_store);
    visit(trace);
  }

  Store* const store;
  // The Python object that owns `store`.
  py::object owner_of_store;
  py::object trace;

  // Whether marks of silent groups are left out: [Note: Silent groups] in plan_executor.py.
  bool leaves_out_marks = false;

  bool tracks(const Group& group) const {
    return !untracked_.contain(group.chunk_pass, group.index);
  }

  bool leaves_out(const Group& group) const {
    return leaves_out_marks && silent_.contain(group.chunk_pass, group.index);
  }

  // Performs the actions of the next step. Returns false, with no effect, if the plan's step
  // differs. `executor` performs rare actions in Python.
  template <typename Executor>
  bool come_to(const Executor& executor, Iteration& now, const py::object& kind,
               const Place& place) const {
    size_t index = now.num_steps();
    while (may_skip(index) && !steps_[index].is_at(kind, place)) ++index;
    if (index >= steps_.size() || !steps_[index].is_at(kind, place)) return false;
    now.set_num_steps(index + 1);
    perform_all(executor, now, steps_[index]);
    return true;
  }

  // The same for any mark; `at` is a group or a `Step`.
  bool come_to_any(const py::object& executor, const py::object& iteration, const py::object& kind,
                   const py::object& at) const {
    const auto given = [&executor] { return executor; };
    const Place place = py::isinstance<Group>(at) ? at.cast<const Group&>().place()
                                                  : place_of(at.attr("key"), at.attr("name"));
    Iteration now(iteration);
    return come_to(given, now, kind, place);
  }

  // Returns the number of steps of an iteration that ended after `num_steps`, including trailing
  // ones that were left out.
  size_t end_of(size_t num_steps) const {
    while (may_skip(num_steps)) ++num_steps;
    return num_steps;
  }

 private:
  static int64_t number(const py::object& key, int place) {
    return py::reinterpret_borrow<py::tuple>(key)[place].cast<int64_t>();
  }

  static Place place_of(const py::object& key, py::object name) {
    return {number(key, 0), number(key, 1), std::move(name)};
  }

  template <typename Executor>
  void perform_all(const Executor& executor, const Iteration& now, const Step& step) const {
    for (const auto& action : step.actions) {
      Group* group = now.find(action.chunk_pass, action.group);
      if (group == nullptr || group->state == GroupState::OPEN) continue;
      if (!perform(executor, now, action, *group)) {
        executor().attr("perform")(now.object(), action.object);
      }
    }
  }

  template <typename Executor>
  bool perform(const Executor& executor, const Iteration& now, const Action& action,
               Group& group) const {
    const auto in_python = [&executor] { return py::object(executor().attr("store")); };
    if (action.kind == ActionKind::H2D) return store->copy_in(group, in_python);
    if (group.state != GroupState::COMMITTED) return true;
    if (action.kind == ActionKind::FREE) return store->release(group, in_python);
    return store->copy_out(group, action.kept, now.has_layout() ? action.numbers : py::none());
  }

  bool may_skip(size_t index) const {
    return leaves_out_marks && index < steps_.size() && steps_[index].is_silent;
  }

  std::vector<Step> steps_;
  const Keys untracked_, silent_;
};

}  // namespace slipstream
