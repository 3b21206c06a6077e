// Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

// One group of saved storages: `OffloadTensorGroup` in group.py is the reference.

#pragma once

#include "storage.h"

namespace slipstream {

class Group {
 public:
  Group(py::object label, int64_t min_numel)
      : serial(next_serial_++),
        label(std::move(label)),
        key(this->label.attr("key")),
        name(this->label.attr("name")),
        min_numel(min_numel) {}

  const int64_t serial;
  py::object label, key, name;
  GroupState state = GroupState::OPEN;
  int64_t min_numel;
  bool is_read_first = false;

  // A storage that the group saved. Autograd owns it.
  struct Held {
    std::weak_ptr<Storage> storage;
    int64_t serial;
    py::object owner;
    // What a copy of it would move, as of the commit; -1 before.
    int64_t nbytes;
  };
  // In order of their first save by this group.
  std::vector<Held> held;

  void move_to(GroupState to) {
    if (static_cast<int>(to) != static_cast<int>(state) + 1) {
      throw std::runtime_error("group " + std::string(py::str(label)) + " cannot go from " +
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
    held.push_back({storage, storage->serial, storage->owner.attr("key"), -1});
  }

  std::vector<std::shared_ptr<Storage>> storages() const {
    std::vector<std::shared_ptr<Storage>> alive;
    for (const auto& item : held) {
      if (auto storage = item.storage.lock()) alive.push_back(std::move(storage));
    }
    return alive;
  }

 private:
  static inline int64_t next_serial_ = 0;
};

// What autograd keeps in place of a saved tensor. It has the Python object of the storage, so that
// Python's weak references to that live as long as the storage.
struct SavedTensor {
  SavedTensor(std::shared_ptr<Storage> storage, std::shared_ptr<Group> group, int64_t index)
      : object(py::cast(storage)), storage(std::move(storage)), group(std::move(group)), index(index) {}

  py::object object;
  std::shared_ptr<Storage> storage;
  std::shared_ptr<Group> group;
  int64_t index;
};

}  // namespace slipstream
