// Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

// The groups of one pass: `ChunkOffloadHandler` in chunk.py is the reference.

#pragma once

#include "group.h"

namespace slipstream {

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
