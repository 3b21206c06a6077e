// Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

// One group of saved storages: `OffloadTensorGroup` in group.py is the reference.

#pragma once

#include "plain_object.h"
#include "storage.h"

namespace slipstream {

// The place of a mark, whether or not it belongs to a group: key and name of a `Step`.
struct Place {
  int64_t chunk_pass, group;
  py::object name;
};

class Group : public std::enable_shared_from_this<Group>, Alive<Group> {
 public:
  Group(py::object label, int64_t min_numel)
      : serial(next_serial_++), min_numel(min_numel), label_(std::move(label)) {
    const auto fields = py::reinterpret_borrow<py::tuple>(label_);
    const auto key = py::reinterpret_borrow<py::tuple>(py::object(fields[0]));
    chunk_pass = key[0].cast<int64_t>();
    index = key[1].cast<int64_t>();
    name = fields[1];
  }

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
  int64_t chunk_pass, index;
  py::object name;
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
  int64_t layer_ = 0, micro_batch_ = 0, vp_stage_ = 0;
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

}  // namespace slipstream
