// Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

// An iteration that follows its plan and is not measured: its steps, of which plan_executor.py is
// the reference, and its marks, for which the methods of the same names in engine.py are. Where C++
// does not do it, a function returns false (or None) with no effect, and the engine does. `engine`
// has the methods of `EngineOfMarks` in native_store.py; it keeps its store.

#pragma once

#include <span>

#include "hooks.h"

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
