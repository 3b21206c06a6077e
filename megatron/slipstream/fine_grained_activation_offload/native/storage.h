// Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

// One saved storage: `SavedStorage` in storage.py is the reference.

#pragma once

#include <ATen/core/DimVector.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <unordered_map>

#include "host_layout.h"

namespace slipstream {

// Device allocations begin at multiples of this; kernels are selected by alignment.
constexpr int64_t kDeviceAlignmentBytes = 512;

inline bool may_go(Residence from, Residence to) {
  switch (from) {
    case Residence::DEVICE:
      return to == Residence::OFFLOADING;
    case Residence::OFFLOADING:
      return to == Residence::STAYS || to == Residence::HOST;
    case Residence::HOST:
      return to == Residence::RELOADING || to == Residence::HELD_OUTSIDE;
    case Residence::HELD_OUTSIDE:
      return to == Residence::RELOADED || to == Residence::HOST;
    case Residence::RELOADING:
      return to == Residence::RELOADED;
    default:
      return false;
  }
}

struct Extent {
  int64_t start, stop;
};

// First byte and last byte + 1 of a strided tensor within its storage.
inline Extent extent_of(const at::Tensor& tensor) {
  const int64_t itemsize = tensor.element_size();
  const int64_t start = tensor.storage_offset() * itemsize;
  if (tensor.is_contiguous()) {
    return {start, start + tensor.numel() * itemsize};
  }
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  return {start, start + (last + 1) * itemsize};
}

// Returns a tensor over `storage` that requires no gradient, bypassing the dispatcher.
inline at::Tensor view_over(c10::Storage storage, caffe2::TypeMeta dtype,
                            at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset) {
  const auto key = c10::computeDispatchKey(c10::typeMetaToScalarType(dtype), c10::kStrided,
                                           storage.device());
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), key, dtype);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return tensor;
}

// One saved tensor. `alias` keeps its memory alive, as long as it stays on the device.
struct Saved {
  at::Tensor alias;
  caffe2::TypeMeta dtype;
  at::DimVector sizes, strides;
  int64_t offset;
  c10::VariableVersion counter;
  uint32_t version;
  uint32_t copied_version;
  // A weak reference to a leaf that may become hidden; once released, set only if it was emptied.
  py::object leaf;

  bool is_changed_since(uint32_t then) const { return counter.current_version() != then; }
};

// The objects that a store shares with its storages.
struct Context {
  // The Python object that owns `waits`.
  py::object owner_of_waits;
  Waits* waits;
  // `CopyStreams`, for work left to Python.
  py::object copies;
  std::unordered_map<c10::StorageImpl*, class Storage*> by_memory;
};

class Group;

class Storage : public std::enable_shared_from_this<Storage>, Alive<Storage> {
 public:
  Storage(const at::Tensor& tensor, std::shared_ptr<Group> owner, int64_t position, py::object pool,
          std::shared_ptr<Context> context)
      : serial(next_serial_++),
        owner(std::move(owner)),
        position(position),
        pool(std::move(pool)),
        context_(std::move(context)),
        memory_(tensor.storage()),
        device_(tensor.device()),
        storage_nbytes(static_cast<int64_t>(tensor.storage().nbytes())),
        start(storage_nbytes),
        key_(tensor.storage().unsafeGetStorageImpl()) {
    context_->by_memory[key_] = this;
  }

  ~Storage() {
    const auto known = context_->by_memory.find(key_);
    if (known != context_->by_memory.end() && known->second == this) {
      context_->by_memory.erase(known);
    }
    // It may be freed while an exception is raised, which the Python code below would lose.
    const py::error_scope raised;
    try {
      // Autograd has freed the storage, but a copy may still use its device memory.
      if (residence == Residence::OFFLOADING) {
        release(py::str(""));
      } else if (residence == Residence::RELOADING) {
        abandon();
      }
      if (allocation) free(std::move(allocation));
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("SavedStorage");
    } catch (const std::exception& error) {
      PyErr_SetString(PyExc_RuntimeError, error.what());
      PyErr_WriteUnraisable(nullptr);
    }
  }

  // Null during destruction.
  std::shared_ptr<Storage> shared() { return weak_from_this().lock(); }

  const int64_t serial;
  // The group that saved it first.
  std::shared_ptr<Group> owner;
  int64_t position;
  py::object pool;

 private:
  std::shared_ptr<Context> context_;
  c10::Storage memory_;
  c10::Device device_;

 public:
  const int64_t storage_nbytes;
  int64_t start;
  int64_t stop = 0;
  int64_t nbytes = 0;
  Residence residence = Residence::DEVICE;
  // The device memory that backward reads: the reloaded copy, or the original if it stayed alive.
  c10::Storage returned;
  std::shared_ptr<HostAllocation> allocation;
  std::optional<Signal> out_signal, in_signal;
  // The stream on which the returned memory was allocated; -1 if the engine did not allocate it.
  int returned_on = -1;
  bool is_given_up = false;
  // Streams that computed or used the memory.
  std::vector<int> streams;

  // The owner's label.
  const py::object& label() const;

  bool is_on_device() const {
    return residence == Residence::DEVICE || residence == Residence::OFFLOADING ||
           residence == Residence::STAYS;
  }

  void move_to(Residence to) {
    if (!may_go(residence, to)) {
      throw std::runtime_error("storage of " + std::string(py::str(label())) + " of " +
                               std::to_string(nbytes) + " bytes cannot go from " +
                               name(residence) + " to " + name(to));
    }
    residence = to;
  }

  void note_stream(int stream) {
    if (std::find(streams.begin(), streams.end(), stream) == streams.end()) {
      streams.push_back(stream);
    }
  }

  void add_holder(int64_t group) {
    if (std::find(holders_.begin(), holders_.end(), group) == holders_.end()) {
      holders_.push_back(group);
    }
  }

  // Removes a holder. Returns whether all groups have released the storage.
  bool drop_holder(int64_t group) {
    holders_.erase(std::remove(holders_.begin(), holders_.end(), group), holders_.end());
    return holders_.empty();
  }

  bool serves(const at::Tensor& tensor) const {
    if (static_cast<int64_t>(tensor.storage().nbytes()) != storage_nbytes) return false;
    if (residence == Residence::DEVICE) return true;
    // The discarded storage may have been refilled with other bytes.
    if (is_given_up && !is_on_device()) return false;
    const Extent extent = extent_of(tensor);
    if (extent.start < start || stop < extent.stop || !is_copy_current()) return false;
    const auto version = torch::autograd::impl::version_counter(tensor).current_version();
    return has_copied_ && version == saved_.front().copied_version;
  }

  int64_t save(const at::Tensor& tensor, int64_t group) {
    const int64_t index = static_cast<int64_t>(saved_.size());
    auto counter = torch::autograd::impl::version_counter(tensor);
    const auto version = counter.current_version();
    Saved saved{at::Tensor(), tensor.dtype(), at::DimVector(tensor.sizes()),
                at::DimVector(tensor.strides()),
                tensor.storage_offset(), counter, version, version, py::object()};
    if (is_on_device()) {
      saved.alias = at::Tensor(tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(
          counter, /*allow_tensor_metadata_change=*/true));
      add_holder(group);
      const Extent extent = extent_of(tensor);
      start = std::min(start, extent.start);
      stop = std::max(stop, extent.stop);
      nbytes = stop - start;
      if (tensor.is_leaf() && tensor.requires_grad()) {
        saved.leaf = py::reinterpret_steal<py::object>(
            PyWeakref_NewRef(wrap(tensor).ptr(), nullptr));
      }
    }
    saved_.push_back(std::move(saved));
    return index;
  }

  void settle_extent() {
    if (2 * nbytes >= storage_nbytes) {
      start = 0;
      stop = storage_nbytes;
    } else {
      start -= start % kDeviceAlignmentBytes;
    }
    nbytes = stop - start;
  }

  Region source() const { return {memory_, start, nbytes}; }

  // Whether the memory was discarded since it was saved, so that there is nothing to copy out.
  bool has_lost_memory() const { return static_cast<int64_t>(memory_.nbytes()) != storage_nbytes; }

  void note_copy_out() {
    for (auto& saved : saved_) saved.copied_version = saved.counter.current_version();
    has_copied_ = true;
    copied_address_ = memory_.data();
  }

  bool is_overwritten(int64_t index) const {
    const Saved& saved = saved_.at(index);
    return saved.is_changed_since(saved.version);
  }

  bool is_copy_current() const {
    for (const auto& saved : saved_) {
      if (saved.is_changed_since(saved.copied_version)) return false;
    }
    return true;
  }

  bool is_emptied() const { return has_lost_memory() || memory_.data() != copied_address_; }

  void release(const py::object& label) {
    Waits& waits = *context_->waits;
    const bool is_plain = waits.is_plain() && !is_given_up;
    if (!is_plain) {
      context_->copies.attr("before_release")(out_signal ? py::cast(*out_signal) : py::none(),
                                              streams_by_id(), label);
    } else if (out_signal) {
      for (const int stream : streams) waits.wait(Edge::E3, stream, *out_signal);
    }
    // Also prevents reuse of the StorageImpl's address, which identifies the storage.
    original_ = memory_.getWeakStorageImpl();
    for (auto& saved : saved_) saved.alias.reset();
    for (auto& saved : saved_) {  // [Note: Hidden leaves]
      if (saved.leaf && !python->empty_if_hidden(saved.leaf).cast<bool>()) {
        saved.leaf = py::object();
      }
    }
    move_to(Residence::HOST);
    c10::Storage memory = std::move(memory_);
    memory_ = c10::Storage();
    if (is_plain) {
      waits.driver->drop_device(std::move(memory));
      return;
    }
    // The Python object holds our only remaining reference, as in the Python implementation.
    const py::object object = wrap(std::move(memory));
    context_->copies.attr("drop")(object);
    if (is_given_up) context_->copies.attr("empty")(object);
  }

  bool is_memory_gone() const {
    if (is_given_up) return !is_on_device();
    return original_.has_value() && original_->expired();
  }

  bool is_original_emptied() const {
    const auto original = live_original();
    return original && static_cast<int64_t>(original.nbytes()) != storage_nbytes;
  }

  // Returns the original storage if another reference keeps it alive; null otherwise.
  c10::Storage live_original() const {
    if (is_given_up || !original_.has_value()) return {};
    return c10::Storage(original_->lock());
  }

  std::shared_ptr<HostAllocation> take_allocation() {
    if (!allocation) {
      throw std::runtime_error("storage of " + std::string(py::str(label())) +
                               " has no host buffer in " + name(residence));
    }
    return std::move(allocation);
  }

  // Returns the host buffer, for a copy in.
  const std::shared_ptr<HostAllocation>& buffer_to_read() const {
    if (!allocation || allocation->in_flight) {
      throw std::runtime_error("storage of " + std::string(py::str(label())) +
                               " cannot be reloaded because an earlier reload of it failed; run "
                               "forward again");
    }
    return allocation;
  }

  void free(std::shared_ptr<HostAllocation> buffer) {
    const auto layout = buffer->layout.lock();
    if (layout && !buffer->in_flight && layout->is_followed && layout->has(*buffer)) {
      layout->free(*buffer);
    } else {
      pool.attr("free")(buffer);
    }
  }

  at::IntArrayRef shape_of(int64_t index) const { return saved_.at(index).sizes; }

  py::object alias(int64_t index) const { return wrap(saved_.at(index).alias); }

  py::object view_returned(int64_t index) {
    if (!returned) {
      throw std::runtime_error("storage of " + std::string(py::str(label())) + " is in " +
                               name(residence));
    }
    const Saved& saved = saved_.at(index);
    int64_t offset = saved.offset;
    if (static_cast<int64_t>(returned.nbytes()) != storage_nbytes) {
      offset -= start / static_cast<int64_t>(saved.dtype.itemsize());
    }
    py::object view = wrap(view_over(returned, saved.dtype, saved.sizes, saved.strides, offset));
    if (saved.leaf) python->refill(saved.leaf, view);
    return view;
  }

  c10::Device device() const { return device_; }

  py::dict streams_by_id() const {
    py::dict by_id;
    for (const int number : streams) {
      const Stream& stream = context_->waits->driver->stream(number);
      by_id[stream.id] = stream.object;
    }
    return by_id;
  }

  py::object here_returned_on() const {
    if (returned_on < 0) return py::none();
    const Stream& stream = context_->waits->driver->stream(returned_on);
    return py::make_tuple(stream.id, stream.object);
  }

  void set_returned_on(const py::object& here) {
    if (here.is_none()) {
      returned_on = -1;
      return;
    }
    const auto pair = py::reinterpret_borrow<py::tuple>(here);
    returned_on = context_->waits->driver->add_stream(pair[0], pair[1]);
  }

  void note_stream_by_id(py::object id, py::object stream) {
    note_stream(context_->waits->driver->add_stream(std::move(id), std::move(stream)));
  }

 private:
  static std::string name(Residence residence) {
    return name_of(python->residences[static_cast<int>(residence)]);
  }

  // Releases reloaded memory that was never read.
  void abandon() {
    Waits& waits = *context_->waits;
    c10::Storage memory = std::move(returned);
    returned = c10::Storage();
    if (waits.is_plain() && in_signal && returned_on >= 0) {
      try {
        waits.wait(Edge::E6, returned_on, *in_signal);
      } catch (...) {
        context_->copies.attr("keep_until_finished")(wrap(std::move(memory)));
        throw;
      }
      waits.driver->drop_device(std::move(memory));
      return;
    }
    context_->copies.attr("abandon")(memory ? wrap(std::move(memory)) : py::none(),
                                     in_signal ? py::cast(*in_signal) : py::none(),
                                     here_returned_on());
  }

  std::vector<Saved> saved_;
  // Groups that have not released it; the last one frees the memory.
  std::vector<int64_t> holders_;
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> original_;
  bool has_copied_ = false;
  const void* copied_address_ = nullptr;
  c10::StorageImpl* key_;
  static inline int64_t next_serial_ = 0;
};

}  // namespace slipstream
