// Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

// One group of saved storages, and the groups of one pass: `OffloadTensorGroup` in group.py and
// `ChunkOffloadHandler` in chunk.py are the reference.

#pragma once

#include "storage.h"

namespace slipstream {

// The place of a mark, whether or not it belongs to a group: key and name of a `Step`.
struct Place {
  int64_t chunk_pass, group;
  py::object name;
};

class Group : public std::enable_shared_from_this<Group>, Alive<Group> {
 public:
  Group(int64_t chunk_pass, int64_t index, py::object name, int64_t layer, int64_t micro_batch,
        int64_t vp_stage, int64_t min_numel)
      : serial(next_serial_++),
        chunk_pass(chunk_pass),
        index(index),
        name(std::move(name)),
        min_numel(min_numel),
        layer_(layer),
        micro_batch_(micro_batch),
        vp_stage_(vp_stage) {}

  const int64_t serial;
  // The group's key: its pass and its position in the pass.
  const int64_t chunk_pass, index;
  const py::object name;
  GroupState state = GroupState::OPEN;
  int64_t min_numel;
  bool is_read_first = false;
  // Whether a mark in C++ opened it, so that its iteration follows a plan.
  bool is_planned = false;
  // Whether it has no marks in backward.
  bool is_silent = false;
  // The trace of the plan that keeps it, if its saved tensors are therefore not tracked; else None.
  py::object untracked_in = py::none();

  // The `GroupLabel`, created on request.
  const py::object& label() {
    if (!label_) {
      const py::object key = python->group_key(chunk_pass, index);
      label_ = python->group_label(key, name, layer_, micro_batch_, vp_stage_);
    }
    return label_;
  }

  py::object key() { return label()[py::int_(0)]; }

  Place place() const { return {chunk_pass, index, name}; }

  // A storage that the group saved. Autograd owns it.
  struct Held {
    std::weak_ptr<Storage> storage;
    int64_t serial;
    // The key of the group that saved it first. Not a reference to that group, which may be the one
    // that holds this object.
    int64_t owner_pass, owner_index;
    // Bytes that copying it would move, as of the commit; -1 before the commit.
    int64_t nbytes;
  };
  // In the order in which this group first saved them.
  std::vector<Held> held;
  // Kinds of tensors that it saved and that cannot move: the bits of `Staying`.
  int64_t kinds_staying = 0;

  void add_staying(Staying kind) { kinds_staying |= int64_t{1} << static_cast<int>(kind); }

  void move_to(GroupState to) {
    if (static_cast<int>(to) != static_cast<int>(state) + 1) {
      throw std::runtime_error("group " + std::string(py::str(label())) + " cannot go from " +
                               name_of(python->group_states[static_cast<int>(state)]) + " to " +
                               name_of(python->group_states[static_cast<int>(to)]));
    }
    state = to;
  }

  bool holds(const Storage& storage) const {
    for (const auto& item : held) {
      if (item.serial == storage.serial) return true;
    }
    return false;
  }

  void hold(const std::shared_ptr<Storage>& storage) {
    const Group& owner = *storage->owner;
    held.push_back({storage, storage->serial, owner.chunk_pass, owner.index, -1});
  }

  bool is_alive() const {
    return std::any_of(held.begin(), held.end(),
                       [](const Held& item) { return !item.storage.expired(); });
  }

  std::vector<std::shared_ptr<Storage>> storages() const {
    std::vector<std::shared_ptr<Storage>> alive;
    for (const auto& item : held) {
      if (auto storage = item.storage.lock()) alive.push_back(std::move(storage));
    }
    return alive;
  }

 private:
  py::object label_;
  const int64_t layer_, micro_batch_, vp_stage_;
  static inline int64_t next_serial_ = 0;
};

inline const py::object& Storage::label() const { return owner->label(); }

// Replaces a saved tensor in autograd.
struct SavedTensor {
  std::shared_ptr<Storage> storage;
  std::shared_ptr<Group> group;
  int64_t index;
  // The storage's Python object, which keeps Python's weak references to it valid as long as the
  // storage lives. For planned groups, which have no such references, created on request.
  py::object object;

  const py::object& storage_object() {
    if (!object) object = py::cast(storage);
    return object;
  }
};
using SavedTensorObject = PlainObject<SavedTensor>;

// Groups of earlier iterations. Each new group frees one, so that they are not all freed at the end
// of an iteration.
using SpentGroups = std::vector<std::shared_ptr<Group>>;

class Pass : Alive<Pass> {
 public:
  Pass(int64_t index, int64_t vp_stage, int64_t min_numel, int64_t micro_batch,
       std::shared_ptr<SpentGroups> spent)
      : index(index),
        vp_stage(vp_stage),
        min_numel(min_numel),
        micro_batch(micro_batch),
        spent_(std::move(spent)) {}
  Pass(const Pass&) = delete;

  ~Pass() { std::move(groups.begin(), groups.end(), std::back_inserter(*spent_)); }

  const int64_t index, vp_stage, min_numel, micro_batch;
  py::object given_up_by = py::tuple();
  int64_t num_outputs = 0;
  std::vector<std::shared_ptr<Group>> groups;

  std::shared_ptr<Group> open_group(const py::object& name) {
    if (!spent_->empty()) spent_->pop_back();
    auto group = std::make_shared<Group>(index, static_cast<int64_t>(groups.size()), name,
                                         next_layer(name), micro_batch, vp_stage, min_numel);
    is_over_ = false;
    groups.push_back(group);
    return group;
  }

  // Returns the group at a position in the order of starts; null if it has not started.
  std::shared_ptr<Group> find(int64_t place) const {
    return 0 <= place && place < static_cast<int64_t>(groups.size()) ? groups[place] : nullptr;
  }

  // Commits and returns the innermost open group of that name; null if there is none.
  std::shared_ptr<Group> commit_group(const py::object& name) {
    for (auto group = groups.rbegin(); group != groups.rend(); ++group) {
      if ((*group)->state == GroupState::OPEN && is_same((*group)->name, name)) {
        (*group)->move_to(GroupState::COMMITTED);
        committed_.push_back((*group)->index);
        return *group;
      }
    }
    return nullptr;
  }

  // Returns the `depth` groups that backward most likely reaches right after `group`, or first if
  // `group` is null.
  py::list used_before(const std::shared_ptr<Group>& group, int64_t depth) const {
    const int64_t last = group ? group->index : -1;
    auto place = std::find(committed_.begin(), committed_.end(), last) - committed_.begin();
    py::list before;
    while (place > 0 && depth-- > 0) before.append(groups[committed_[--place]]);
    return before;
  }

  bool lacks_backward() {
    if (is_over_) return false;
    bool is_over = !groups.empty(), has_saved = false;
    for (const auto& group : groups) {
      if (group->is_silent) continue;
      if (group->state == GroupState::OPEN || group->state == GroupState::COMMITTED) {
        is_over = false;
        has_saved = has_saved || !group->held.empty();
      }
    }
    is_over_ = is_over;
    return has_saved;
  }

  bool awaits_backward() const {
    return std::any_of(groups.begin(), groups.end(),
                       [](const std::shared_ptr<Group>& group) { return group->is_alive(); });
  }

 private:
  int64_t next_layer(const py::object& name) {
    for (auto& [known, number] : num_layers_) {
      if (is_same(known, name)) return number++;
    }
    num_layers_.emplace_back(name, 1);
    return 0;
  }

  std::shared_ptr<SpentGroups> spent_;
  // Positions of the groups, in the order of their commits.
  std::vector<int64_t> committed_;
  // Number of groups of each name.
  std::vector<std::pair<py::object, int64_t>> num_layers_;
  // Whether backward has reached all groups, after forward has ended.
  bool is_over_ = false;
};

}  // namespace slipstream
