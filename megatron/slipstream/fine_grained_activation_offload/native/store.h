// Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

// Saved-tensor hooks, and offload and reload of groups: `ActivationStore` in activation_store.py is
// the reference. The common cases are handled here. In all others a function returns false with no
// effect, and the Python method of the same name does all of it, on the same objects.

#pragma once

#include <torch/csrc/autograd/graph_task.h>

#include "group.h"

namespace slipstream {

// Counters of a module's groups. Python adds them to its `ModuleCounters` on request.
struct Counters {
  py::object name;
  int64_t num_groups = 0, num_groups_moved = 0, d2h_copies = 0, d2h_bytes = 0, h2d_copies = 0,
          h2d_bytes = 0, freed_bytes = 0, num_kept_for_host_memory = 0;

  py::dict amounts() const {
    using namespace py::literals;
    return py::dict("num_groups"_a = num_groups, "num_groups_moved"_a = num_groups_moved,
                    "d2h_copies"_a = d2h_copies, "d2h_bytes"_a = d2h_bytes,
                    "h2d_copies"_a = h2d_copies, "h2d_bytes"_a = h2d_bytes,
                    "freed_bytes"_a = freed_bytes,
                    "num_kept_for_host_memory"_a = num_kept_for_host_memory);
  }
};

class CountersByName {
 public:
  Counters& operator[](const py::object& name) {
    for (auto& counters : all_) {
      if (is_same(counters.name, name)) return counters;
    }
    all_.push_back({name});
    return all_.back();
  }

  // Pairs of module name and amounts by counter name.
  py::list items() const {
    py::list items;
    for (const auto& counters : all_) {
      items.append(py::make_tuple(counters.name, counters.amounts()));
    }
    return items;
  }

 private:
  std::vector<Counters> all_;
};

// Returns the tensor that autograd keeps for one that stays. An output that its own operation saves
// must be detached, since otherwise it and its graph would keep each other alive.
inline py::object keep(py::object object, const at::Tensor& tensor) {
  if (!tensor.grad_fn()) return object;
  return wrap(tensor.detach());
}

// `is_dense` in storage.py.
inline bool is_dense(const at::Tensor& tensor) {
  return tensor.layout() == c10::kStrided && tensor.has_storage() && !tensor.is_nested() &&
         !tensor.is_quantized() && !tensor.key_set().has(c10::DispatchKey::Functionalize);
}

// Whether megatron-core (on parameters) or Transformer Engine (on weights) forbids offloading.
inline bool has_opted_out(PyObject* tensor) {
  static PyObject* const names[] = {PyUnicode_InternFromString("_do_not_offload"),
                                    PyUnicode_InternFromString("_TE_do_not_offload")};
  const auto attributes =
      py::reinterpret_steal<py::object>(PyObject_GenericGetDict(tensor, nullptr));
  if (!attributes) throw py::error_already_set();
  if (PyDict_GET_SIZE(attributes.ptr()) == 0) return false;
  for (PyObject* name : names) {
    PyObject* value = PyDict_GetItemWithError(attributes.ptr(), name);
    if (value != nullptr && PyObject_IsTrue(value) == 1) return true;
  }
  return false;
}

class Iteration;

class Store : Alive<Store> {
 public:
  // `waits` is a `Waits`, `entered` the list `ActivationStore.entered`.
  Store(const py::object& backend, py::object waits, py::object pool, py::object copies,
        py::list entered)
      : pool(std::move(pool)),
        entered(std::move(entered)),
        waits_(waits.cast<Waits*>()),
        context_(std::make_shared<Context>()),
        backend_(backend),
        device_type_(c10::Device(backend.attr("device_type").cast<std::string>()).type()) {
    context_->owner_of_waits = std::move(waits);
    context_->waits = waits_;
    context_->copies = std::move(copies);
  }

  template <typename Visit>
  void references(const Visit& visit) {
    visit(pool);
    visit(backend_);
    visit(kept_in);
    if (context_.use_count() == 1) {  // No storage needs it.
      visit(context_->owner_of_waits);
      visit(context_->copies);
    }
  }

  // The host pool for storages saved from now on.
  py::object pool;
  // The regions entered and not left, on which Python works too.
  const py::list entered;
  // The latest iteration whose plan C++ follows or has followed. Python owns it.
  std::weak_ptr<Iteration> now;
  CountersByName modules;
  const std::shared_ptr<SpentGroups> spent = std::make_shared<SpentGroups>();
  // The group last started by a mark in C++, whose region is not yet entered, and the trace of the
  // plan if its saved tensors need no tracking, else None.
  std::shared_ptr<Group> started;
  py::object kept_in = py::none();
  bool is_verified = false;
  bool crosses_streams = false;

  py::object pack(const std::shared_ptr<Group>& group, py::object object) {
    const at::Tensor& tensor = THPVariable_Unpack(object.ptr());
    if (!group) return is_torch_tensor(object) ? keep(std::move(object), tensor) : object;
    if (!is_torch_tensor(object)) {
      group->add_staying(kind_of_subclass(tensor, object));
      return object;
    }
    if (const auto kind = why_it_stays(tensor, object)) {
      group->add_staying(*kind);
      return keep(std::move(object), tensor);
    }
    const auto known = context_->by_memory.find(tensor.storage().unsafeGetStorageImpl());
    std::shared_ptr<Storage> storage;
    if (known != context_->by_memory.end()) storage = known->second->shared();
    if (!storage || !storage->serves(tensor)) {
      if (const auto kind = why_its_storage_stays(tensor, group->min_numel)) {
        group->add_staying(*kind);
        return keep(std::move(object), tensor);
      }
      storage = std::make_shared<Storage>(tensor, group, static_cast<int64_t>(group->held.size()),
                                          pool, context_);
    }
    if (!group->holds(*storage)) group->hold(storage);
    storage->note_stream(driver().current());
    const int64_t index = storage->save(tensor, group->serial);
    auto saved_tensor = SavedTensorObject::make({std::move(storage), group, index, {}});
    if (!group->is_planned) SavedTensorObject::of(saved_tensor.ptr()).storage_object();
    return saved_tensor;
  }

  // Unusual cases are left to `engine`.
  py::object unpack(const py::object& engine, const py::object& object) {
    if (!SavedTensorObject::is(object.ptr())) return object;
    const SavedTensor& saved = SavedTensorObject::of(object.ptr());
    Storage& storage = *saved.storage;
    const auto read_slowly = [&](const py::object& object) { return GET(engine, "read")(object); };
    if (saved.group->state == GroupState::COMMITTED || storage.is_overwritten(saved.index)) {
      return read_slowly(object);
    }
    if (storage.residence == Residence::DEVICE || storage.residence == Residence::STAYS) {
      return storage.alias(saved.index);
    }
    const bool is_back =
        storage.residence == Residence::RELOADING || storage.residence == Residence::RELOADED;
    if (!is_back || !storage.in_signal || !waits_->is_plain() || is_verified ||
        !storage.is_copy_current()) {
      return read_slowly(object);
    }
    const int here = driver().current();
    if (storage.returned_on != here) return read_slowly(object);
    waits_->wait(Edge::E5, here, *storage.in_signal);
    if (storage.residence == Residence::RELOADING) storage.move_to(Residence::RELOADED);
    return storage.view_returned(saved.index);
  }

  // Each of the following returns false, with no effect, if the Python method must do it.

  // `layout`: of the host pool, if it is followed; else null.
  bool copy_out(Group& group, const py::object& kept, const py::object& numbers, Layout* layout) {
    if (!can_move()) return false;
    std::vector<std::shared_ptr<Storage>> leaving;
    std::vector<int64_t> planned;
    for (size_t position = 0; position < group.held.size(); ++position) {
      auto storage = group.held[position].storage.lock();
      if (!storage || storage->residence != Residence::DEVICE) continue;
      storage->settle_extent();
      if (storage->has_lost_memory() || contains(kept, position)) continue;
      leaving.push_back(std::move(storage));
      planned.push_back(layout == nullptr ? -1 : number_at(numbers, position));
    }
    if (leaving.empty()) return true;
    if (!allocate(leaving, planned, layout)) {
      ++modules[group.name].num_kept_for_host_memory;
      return true;
    }
    start_copies_out(leaving);
    Counters& counters = modules[group.name];
    ++counters.num_groups_moved;
    counters.d2h_copies += static_cast<int64_t>(leaving.size());
    counters.d2h_bytes += total_nbytes(leaving);
    return true;
  }

  bool release(Group& group) {
    if (!can_move()) return false;
    const auto storages = group.storages();
    for (const auto& storage : storages) {
      const bool is_leaving = storage->residence == Residence::OFFLOADING;
      if (is_leaving && (storage->is_emptied() || !storage->is_copy_current())) return false;
    }
    for (const auto& storage : storages) {
      const bool is_last = storage->drop_holder(group.serial);
      if (is_last && storage->residence == Residence::OFFLOADING) storage->release(group.name);
    }
    return true;
  }

  bool copy_in(Group& group) {
    if (!can_move()) return false;
    std::vector<std::shared_ptr<Storage>> returning;
    for (auto& storage : group.storages()) {
      if (storage->residence != Residence::HOST) continue;
      if (storage->live_original()) return false;
      returning.push_back(std::move(storage));
    }
    if (returning.empty()) return true;
    start_copies_in(returning);
    for (const auto& storage : returning) {
      Counters& counters = modules[storage->owner->name];
      ++counters.h2d_copies;
      counters.h2d_bytes += storage->nbytes;
      counters.freed_bytes += storage->nbytes;
    }
    return true;
  }

  static void commit(Group& group) {
    for (auto& item : group.held) {
      const auto storage = item.storage.lock();
      if (!storage) continue;
      if (storage->residence == Residence::DEVICE) storage->settle_extent();
      item.nbytes = storage->nbytes;
    }
  }

  // Returns the saved storage for the StorageImpl at this address; null if there is none.
  std::shared_ptr<Storage> find(int64_t address) const {
    const auto known = context_->by_memory.find(reinterpret_cast<c10::StorageImpl*>(address));
    return known == context_->by_memory.end() ? nullptr : known->second->shared();
  }

  int64_t num_known() const { return static_cast<int64_t>(context_->by_memory.size()); }

 private:
  Driver& driver() const { return *waits_->driver; }

  bool can_move() const { return waits_->is_plain() && !is_verified && !crosses_streams; }

  static bool contains(const py::object& positions, size_t position) {
    if (PyFrozenSet_CheckExact(positions.ptr()) && PySet_GET_SIZE(positions.ptr()) == 0) {
      return false;
    }
    const int found = PySequence_Contains(positions.ptr(), py::int_(position).ptr());
    if (found < 0) throw py::error_already_set();
    return found == 1;
  }

  // Returns the trace index of the storage at this position; -1 if it is not in the trace.
  static int64_t number_at(const py::object& numbers, size_t position) {
    const auto tuple = py::reinterpret_borrow<py::tuple>(numbers);
    return position < tuple.size() ? tuple[position].cast<int64_t>() : -1;
  }

  static int64_t total_nbytes(const std::vector<std::shared_ptr<Storage>>& storages) {
    int64_t total = 0;
    for (const auto& storage : storages) total += storage->nbytes;
    return total;
  }

  // Allocates a host buffer for each storage. If host memory does not suffice for all, allocates
  // none and returns false.
  bool allocate(const std::vector<std::shared_ptr<Storage>>& storages,
                const std::vector<int64_t>& planned, Layout* layout) const {
    try {
      for (size_t index = 0; index < storages.size(); ++index) {
        Storage& storage = *storages[index];
        if (storage.allocation) storage.free(storage.take_allocation());  // of a copy that failed
        // An unplanned request ends the layout.
        if (layout != nullptr && layout->is_followed && storage.pool.is(pool)) {
          storage.allocation = layout->allocate(planned[index], storage.nbytes);
        }
        if (!storage.allocation) {
          storage.allocation = storage.pool.attr("allocate")(storage.nbytes)
                                   .cast<std::shared_ptr<HostAllocation>>();
        }
      }
    } catch (py::error_already_set& error) {
      if (!error.matches(python->host_memory_full)) throw;
      for (const auto& storage : storages) {
        if (storage->allocation) storage->free(storage->take_allocation());
      }
      return false;
    }
    return true;
  }

  int d2h() {
    if (d2h_ < 0) d2h_ = add_copy_stream(context_->copies.attr("d2h"));
    return d2h_;
  }

  int h2d() {
    if (h2d_ < 0) h2d_ = add_copy_stream(context_->copies.attr("h2d"));
    return h2d_;
  }

  int add_copy_stream(const py::object& stream) {
    return driver().add_stream(backend_.attr("stream_id")(stream), stream);
  }

  void start_copies_out(const std::vector<std::shared_ptr<Storage>>& storages) {
    const int here = driver().current();
    std::vector<int> producers{here};
    std::vector<Signal> last_uses;
    std::vector<Copy> copies;
    for (const auto& storage : storages) {
      storage->note_stream(here);
      for (const int stream : storage->streams) {
        if (std::find(producers.begin(), producers.end(), stream) == producers.end()) {
          producers.push_back(stream);
        }
      }
      storage->note_copy_out();
      for (const auto& use : storage->allocation->last_use) Waits::add_latest(last_uses, use);
      copies.push_back({storage->allocation->buffer, storage->source()});
    }
    for (const int producer : producers) {
      Signal signal = waits_->record(producer);
      waits_->wait(Edge::E1, d2h(), signal);
    }
    for (auto& use : last_uses) waits_->wait(Edge::E2, d2h(), use);
    const Signal signal = run(d2h(), [&] { driver().copy(copies, d2h()); }, [&](size_t index) {
      storages[index]->allocation->in_flight = copies[index].source.storage;
    }, storages.size());
    for (const auto& storage : storages) {
      storage->allocation->last_use = {signal};
      storage->out_signal = signal;
      storage->move_to(Residence::OFFLOADING);
    }
  }

  // Issues copies, and returns the signal after them. `mark` notes that a copy may have no signal:
  // [Note: Copies without a signal] in host_pool.py.
  template <typename Issue, typename Mark>
  Signal run(int stream, const Issue& issue, const Mark& mark, size_t number) {
    try {
      issue();
      return waits_->record(stream);
    } catch (...) {
      for (size_t index = 0; index < number; ++index) mark(index);
      throw;
    }
  }

  void start_copies_in(const std::vector<std::shared_ptr<Storage>>& storages) {
    // Allocate everything before changing any state: the device may be out of memory.
    std::vector<Copy> copies;
    for (const auto& storage : storages) {
      c10::Storage memory = driver().allocate(storage->nbytes, storage->device());
      copies.push_back({{std::move(memory), 0, storage->nbytes}, storage->buffer_to_read()->buffer});
    }
    const int here = driver().current();
    std::vector<Signal> copied_out;
    for (const auto& storage : storages) {
      if (storage->out_signal) Waits::add_latest(copied_out, *storage->out_signal);
    }
    // [Note: A copy in follows its own copy out]
    for (auto& signal : copied_out) waits_->wait(Edge::E3, here, signal);
    Signal begun = waits_->record(here);
    waits_->wait(Edge::E4, h2d(), begun);
    const auto issue = [&] {
      driver().copy(copies, h2d());
      driver().drop_host_contents(copies, h2d());
    };
    const Signal signal = run(h2d(), issue, [&](size_t index) {
      storages[index]->allocation->in_flight = copies[index].to.storage;
    }, storages.size());
    for (size_t index = 0; index < storages.size(); ++index) {
      Storage& storage = *storages[index];
      auto allocation = storage.take_allocation();
      allocation->last_use = {signal};
      storage.returned = std::move(copies[index].to.storage);
      storage.in_signal = signal;
      storage.returned_on = here;
      storage.move_to(Residence::RELOADING);
      storage.free(std::move(allocation));
    }
  }

  static Staying kind_of_subclass(const at::Tensor& tensor, const py::object& object) {
    const auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object.ptr()));
    if (type == python->parameter.ptr() || py::isinstance(object, python->parameter)) {
      return Staying::PARAMETER;
    }
    return tensor.is_nested() ? Staying::NESTED : Staying::SUBCLASS;
  }

  // Why a plain tensor of any size cannot move.
  std::optional<Staying> why_it_stays(const at::Tensor& tensor, const py::object& object) const {
    if (tensor.device().type() != device_type_) return Staying::ELSEWHERE;
    if (!is_dense(tensor)) return tensor.is_nested() ? Staying::NESTED : Staying::NOT_DENSE;
    if (tensor.numel() == 0) return Staying::EMPTY;
    if (tensor.is_conj() || tensor.is_neg() || tensor._is_zerotensor()) return Staying::LAZY;
    if (tensor._fw_grad(/*level=*/0).defined()) return Staying::DUAL;
    if (has_opted_out(object.ptr())) return Staying::MARKED;
    return std::nullopt;
  }

  static std::optional<Staying> why_its_storage_stays(const at::Tensor& tensor, int64_t min_numel) {
    const auto nbytes = static_cast<int64_t>(tensor.storage().nbytes());
    if (is_of_parameter(tensor)) return Staying::PARAMETER;
    if (extent_of(tensor).stop > nbytes) return Staying::DISCARDED;
    if (nbytes / static_cast<int64_t>(tensor.element_size()) < min_numel) return Staying::SMALL;
    return std::nullopt;
  }

  static bool is_of_parameter(const at::Tensor& tensor) {
    return tensor.is_view() && py::isinstance(wrap(at::Tensor(tensor._base())), python->parameter);
  }

  Waits* waits_;
  std::shared_ptr<Context> context_;
  py::object backend_;
  c10::DeviceType device_type_;
  int d2h_ = -1, h2d_ = -1;
};

}  // namespace slipstream
