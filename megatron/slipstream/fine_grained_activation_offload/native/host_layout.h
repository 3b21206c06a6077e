// Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

// Host buffers of an iteration that follows its plan: `Layout` in host_pool.py is the reference.

#pragma once

#include <algorithm>
#include <memory>

#include "driver.h"

namespace slipstream {

// Bytes of host buffers: in use now, and the most at once.
struct HostUsage {
  int64_t in_use = 0, requested = 0, peak = 0, high_water = 0, high_water_requested = 0;

  void add(int64_t size, int64_t nbytes) {
    in_use += size;
    requested += nbytes;
    peak = std::max(peak, in_use);
    if (in_use > high_water) {
      high_water = in_use;
      high_water_requested = requested;
    }
  }

  void remove(int64_t size, int64_t nbytes) {
    in_use -= size;
    requested -= nbytes;
  }
};

class Layout;

// A host buffer in use.
struct HostAllocation : std::enable_shared_from_this<HostAllocation> {
  Region buffer;
  std::vector<Signal> last_use;
  // Device memory of copies without a signal; null if there are none.
  c10::Storage in_flight;
  // The layout, and the index of its storage there; -1 if the pool allocated the buffer.
  std::weak_ptr<Layout> layout;
  int64_t storage = -1;

  // Whether no storage holds it, so that nothing will free it: a layout or the pool holds one
  // reference.
  bool is_lost() const { return weak_from_this().use_count() == 1; }
};

class Layout : public std::enable_shared_from_this<Layout> {
 public:
  Layout(const py::dict& buffers, const py::list& slabs, std::shared_ptr<HostUsage> usage)
      : usage_(std::move(usage)) {
    for (const auto& slab : slabs) slabs_.push_back(region_of(slab));
    for (const auto& [key, value] : buffers) {
      const auto number = key.cast<size_t>();
      const auto fields = py::reinterpret_borrow<py::tuple>(value);
      if (buffers_.size() <= number) buffers_.resize(number + 1);
      Buffer& buffer = buffers_[number];
      buffer.exists = true;
      buffer.start = fields[0].cast<int64_t>();
      buffer.size = fields[1].cast<int64_t>() - buffer.start;
      for (const auto& earlier : py::object(fields[2])) {
        buffer.used_before.push_back(earlier.cast<size_t>());
      }
      buffer.slab = fields[3].cast<size_t>();
    }
  }

  bool is_followed = false;
  // The signals after the last copies of freed buffers, one per stream.
  std::vector<Signal> newest;

  // Begins an iteration. `carried`: the signals after the last copies of earlier iterations.
  void begin(const std::vector<Signal>& carried) {
    ++iteration_;
    is_followed = true;
    newest.clear();
    for (const auto& signal : carried) note_last_use(signal);
    carried_ = newest;
  }

  // Returns the buffer of a storage; null if it is not planned, or its bytes are still in use.
  std::shared_ptr<HostAllocation> allocate(int64_t storage, int64_t nbytes) {
    if (storage < 0 || storage >= static_cast<int64_t>(buffers_.size())) return nullptr;
    Buffer& buffer = buffers_[storage];
    if (!buffer.exists || !has_size(buffer, nbytes) || buffer.begun_in == iteration_) {
      return nullptr;
    }
    auto allocation = std::make_shared<HostAllocation>();
    allocation->last_use = carried_;
    for (const size_t earlier : buffer.used_before) {
      const Buffer& before = buffers_[earlier];
      if (before.begun_in != iteration_ || !before.is_returned) return nullptr;
      for (const auto& signal : before.last_use) {
        Waits::add_latest(allocation->last_use, signal);
      }
    }
    const Region& slab = slabs_[buffer.slab];
    allocation->buffer = {slab.storage, slab.start + buffer.start, buffer.size};
    allocation->layout = weak_from_this();
    allocation->storage = storage;
    buffer.begun_in = iteration_;
    buffer.is_returned = false;
    buffer.holder = allocation;
    buffer.requested = nbytes;
    usage_->add(buffer.size, nbytes);
    return allocation;
  }

  bool has(const HostAllocation& allocation) const {
    if (allocation.layout.lock().get() != this) return false;
    const Buffer& buffer = buffers_[allocation.storage];
    return !buffer.is_returned && buffer.holder.get() == &allocation;
  }

  void free(const HostAllocation& allocation) {
    Buffer& buffer = buffers_[allocation.storage];
    buffer.is_returned = true;
    buffer.last_use = allocation.last_use;
    for (const auto& signal : allocation.last_use) note_last_use(signal);
    buffer.holder.reset();
    usage_->remove(buffer.size, buffer.requested);
  }

  // Returns (allocation, slab, start, stop, requested bytes) for each buffer in use, which the
  // layout then no longer holds.
  py::list take_in_use() {
    py::list list;
    for (auto& buffer : buffers_) {
      if (!buffer.is_in_use(iteration_)) continue;
      const int64_t stop = buffer.start + buffer.size;
      list.append(py::make_tuple(std::exchange(buffer.holder, nullptr), buffer.slab, buffer.start,
                                 stop, buffer.requested));
      buffer.is_returned = true;
    }
    return list;
  }

  bool is_idle() const {
    return std::none_of(buffers_.begin(), buffers_.end(), [this](const Buffer& buffer) {
      return buffer.is_in_use(iteration_);
    });
  }

  // Whether buffers are in use that no storage holds.
  bool has_lost() const {
    return std::any_of(buffers_.begin(), buffers_.end(), [this](const Buffer& buffer) {
      return buffer.is_in_use(iteration_) && buffer.holder->is_lost();
    });
  }

  // Frees these buffers. No copy may be using them.
  void free_lost() {
    for (auto& buffer : buffers_) {
      if (!buffer.is_in_use(iteration_) || !buffer.holder->is_lost()) continue;
      buffer.holder->last_use.clear();
      free(*std::exchange(buffer.holder, nullptr));
    }
  }

 private:
  struct Buffer {
    bool exists = false;
    int64_t start = 0, size = 0;
    std::vector<size_t> used_before;
    size_t slab = 0;
    // A request size known to be in this size class.
    int64_t known_nbytes = -1;
    // The last iteration that allocated it.
    int64_t begun_in = 0;
    bool is_returned = true;
    std::vector<Signal> last_use;
    std::shared_ptr<HostAllocation> holder;
    int64_t requested = 0;

    bool is_in_use(int64_t iteration) const {
      return exists && begun_in == iteration && !is_returned;
    }
  };

  static bool has_size(Buffer& buffer, int64_t nbytes) {
    if (buffer.known_nbytes == nbytes) return true;
    if (python->size_class_bytes(nbytes).cast<int64_t>() != buffer.size) return false;
    buffer.known_nbytes = nbytes;
    return true;
  }

  void note_last_use(const Signal& signal) { Waits::add_latest(newest, signal); }

  std::shared_ptr<HostUsage> usage_;
  std::vector<Region> slabs_;
  std::vector<Buffer> buffers_;
  std::vector<Signal> carried_;
  int64_t iteration_ = 0;
};

}  // namespace slipstream
