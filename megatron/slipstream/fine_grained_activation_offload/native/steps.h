// Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

// The steps of a plan, and an iteration that follows them: `PlanExecutor` in plan_executor.py is the
// reference.

#pragma once

#include <span>

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

// The steps of a plan. Many iterations follow them.
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
                       is_silent(step.place.chunk_pass, step.place.group);
      for (const auto& action : py::object(fields[3])) {
        const auto parts = py::reinterpret_borrow<py::tuple>(action);
        step.actions.push_back({static_cast<ActionKind>(parts[0].cast<int>()), number(parts[1], 0),
                                number(parts[1], 1), parts[2], parts[3], parts[4]});
      }
      all.push_back(std::move(step));
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
  std::vector<Step> all;

  bool tracks(const Group& group) const {
    return !untracked_.contain(group.chunk_pass, group.index);
  }

  bool is_silent(int64_t chunk_pass, int64_t group) const {
    return silent_.contain(chunk_pass, group);
  }

  static Place place_of(const py::object& key, py::object name) {
    return {number(key, 0), number(key, 1), std::move(name)};
  }

 private:
  static int64_t number(const py::object& key, int place) {
    return py::reinterpret_borrow<py::tuple>(key)[place].cast<int64_t>();
  }

  const Keys untracked_, silent_;
};

// An iteration that follows the steps of its plan in C++. At its first mark Python tells it once all
// that C++ needs to know, then only which passes begin.
class Iteration : Alive<Iteration> {
 public:
  using Passes = std::vector<std::shared_ptr<Pass>>;

  // `steps` is a `Steps`; `passes` are those that have begun, and `current` is the running one;
  // `layout` is that of its host buffers, or null. With `leaves_out_marks` it leaves out marks of
  // silent groups: [Note: Silent groups] in plan_executor.py.
  Iteration(py::object steps, Passes passes, std::shared_ptr<Pass> current,
            std::shared_ptr<Layout> layout, bool leaves_out_marks)
      : leaves_out_marks(leaves_out_marks),
        current(std::move(current)),
        steps_(steps.cast<const Steps*>()),
        owner_of_steps_(std::move(steps)),
        passes_(std::move(passes)),
        layout_(std::move(layout)) {}

  template <typename Visit>
  void references(const Visit& visit) {
    visit(owner_of_steps_);
  }

  const bool leaves_out_marks;
  // The running forward pass; null if marks now belong to none.
  std::shared_ptr<Pass> current;
  // False once Python performs the remaining steps.
  bool is_followed = true;

  const Steps& steps() const { return *steps_; }

  void begin_pass(std::shared_ptr<Pass> chunk_pass) {
    current = chunk_pass;
    passes_.push_back(std::move(chunk_pass));
  }

  bool has(const Pass* chunk_pass) const {
    const auto index = static_cast<size_t>(chunk_pass->index);
    return index < passes_.size() && passes_[index].get() == chunk_pass;
  }

  // Returns the group with that key; null if it has not started.
  Group* find(int64_t chunk_pass, int64_t index) const {
    if (chunk_pass >= static_cast<int64_t>(passes_.size())) return nullptr;
    const auto& groups = passes_[chunk_pass]->groups;
    return index < static_cast<int64_t>(groups.size()) ? groups[index].get() : nullptr;
  }

  bool leaves_out(const Group& group) const {
    return leaves_out_marks && steps_->is_silent(group.chunk_pass, group.index);
  }

  size_t num_steps() const { return num_steps_; }

  // Counts the last steps too if their marks were left out. Call at the end of the iteration.
  void skip_left_out() {
    while (may_skip(num_steps_)) ++num_steps_;
  }

  struct Outcome {
    // Whether the mark is the next one of the plan. If not, nothing has been done.
    bool is_planned;
    // The step's actions from the first one on that C++ cannot perform: Python performs them.
    std::span<const Action> left;
  };

  // Performs the actions of the step at a mark.
  Outcome come_to(const py::object& kind, const Place& place) {
    const auto& all = steps_->all;
    size_t index = num_steps_;
    while (may_skip(index) && !all[index].is_at(kind, place)) ++index;
    if (index >= all.size() || !all[index].is_at(kind, place)) return {false, {}};
    num_steps_ = index + 1;
    const auto& actions = all[index].actions;
    size_t done = 0;
    while (done < actions.size() && perform(actions[done])) ++done;
    return {true, std::span(actions).subspan(done)};
  }

  static py::tuple in_python(std::span<const Action> actions) {
    py::tuple objects(actions.size());
    for (size_t index = 0; index < actions.size(); ++index) objects[index] = actions[index].object;
    return objects;
  }

 private:
  // Returns false, with no effect, if Python must do it.
  bool perform(const Action& action) const {
    Group* group = find(action.chunk_pass, action.group);
    if (group == nullptr || group->state == GroupState::OPEN) return true;
    Store& store = *steps_->store;
    if (action.kind == ActionKind::H2D) return store.copy_in(*group);
    if (group->state != GroupState::COMMITTED) return true;
    if (action.kind == ActionKind::FREE) return store.release(*group);
    return store.copy_out(*group, action.kept, action.numbers, layout_.get());
  }

  bool may_skip(size_t index) const {
    return leaves_out_marks && index < steps_->all.size() && steps_->all[index].is_silent;
  }

  const Steps* steps_;
  py::object owner_of_steps_;
  Passes passes_;
  std::shared_ptr<Layout> layout_;
  size_t num_steps_ = 0;
};

}  // namespace slipstream
