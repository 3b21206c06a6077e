// Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

// The saved-tensor hooks and the storages behind them, as `activation_store.py` and `storage.py`
// have them in Python, which is the reference: what is common is done here, and everything else is
// handed to the Python method of the same name, which works on the same objects.

#include <optional>
#include <unordered_map>
#include <vector>

#include <ATen/ops/empty.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

namespace py = pybind11;

namespace {

// Device allocations begin at multiples of this, and kernels choose by alignment.
constexpr int64_t kDeviceAlignmentBytes = 512;

// In the order of `Residence` in storage.py.
enum class Residence { DEVICE, OFFLOADING, STAYS, HOST, HELD_OUTSIDE, RELOADING, RELOADED };
constexpr int kNumResidences = 7;

bool may_go(Residence from, Residence to) {
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

// What the Python side gives once, when the module is loaded. Never freed: storages may outlive the
// interpreter's modules.
struct Python {
  PyObject* residences[kNumResidences] = {};
  py::object bytes, empty_if_hidden, refill, parameter, committed;
};
Python* python = nullptr;

struct Extent {
  int64_t start, stop;
};

// First byte and last byte + 1 of a strided tensor within its storage.
Extent extent_of(const at::Tensor& tensor) {
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

// A tensor over `storage` that requires no gradient, made without the dispatcher.
at::Tensor view_over(c10::Storage storage, caffe2::TypeMeta dtype, const std::vector<int64_t>& sizes,
                     const std::vector<int64_t>& strides, int64_t offset) {
  const auto key = c10::computeDispatchKey(c10::typeMetaToScalarType(dtype), c10::kStrided,
                                           storage.device());
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), key, dtype);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return tensor;
}

py::object wrap_storage(c10::Storage storage) {
  return py::reinterpret_steal<py::object>(THPStorage_Wrap(std::move(storage)));
}

py::object wrap(at::Tensor tensor) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(tensor)));
}

// One saved tensor. `alias` is its memory, as long as that is kept on the device.
struct Saved {
  at::Tensor alias;
  caffe2::TypeMeta dtype;
  std::vector<int64_t> sizes, strides;
  int64_t offset;
  c10::VariableVersion counter;
  uint32_t version;
  uint32_t copied_version;
  // A weak reference to a leaf that autograd may come to hide, and whether it gave its memory up.
  py::object leaf;

  bool is_changed_since(uint32_t then) const { return counter.current_version() != then; }
};

class Hooks;

class Storage {
 public:
  Storage(const at::Tensor& tensor, py::object owner, int64_t position, py::object pool,
          py::object copies, py::object serial, py::object hooks)
      : serial(std::move(serial)),
        owner(std::move(owner)),
        position(position),
        pool(std::move(pool)),
        copies_(std::move(copies)),
        memory_(tensor.storage()),
        device_(tensor.device()),
        storage_nbytes(static_cast<int64_t>(tensor.storage().nbytes())),
        start(storage_nbytes),
        hooks_(std::move(hooks)),
        key_(tensor.storage().unsafeGetStorageImpl()) {}

  ~Storage();

  py::object serial;
  py::object owner;
  int64_t position;
  py::object pool;
  py::object returned = py::none();
  py::object allocation = py::none();
  py::set holders_to_release;
  py::dict streams;
  py::object out_signal = py::none();
  py::object in_signal = py::none();
  py::object returned_on = py::none();
  bool is_given_up = false;

 private:
  py::object copies_;
  c10::Storage memory_;
  c10::Device device_;

 public:
  int64_t storage_nbytes;
  int64_t start;
  int64_t stop = 0;
  int64_t nbytes = 0;
  Residence residence = Residence::DEVICE;
  // The id of the stream that waited for the copy in last, and how often waits had been forgotten.
  py::object waited_on;
  int64_t waited_when = 0;

  bool is_on_device() const {
    return residence == Residence::DEVICE || residence == Residence::OFFLOADING ||
           residence == Residence::STAYS;
  }

  void move_to(Residence to) {
    if (!may_go(residence, to)) {
      throw std::runtime_error("storage of " + std::string(py::str(owner)) + " of " +
                               std::to_string(nbytes) + " bytes cannot go from " + name(residence) +
                               " to " + name(to));
    }
    residence = to;
  }

  bool serves(const at::Tensor& tensor) const {
    if (static_cast<int64_t>(tensor.storage().nbytes()) != storage_nbytes) return false;
    if (residence == Residence::DEVICE) return true;
    // The owner of the emptied storage may have filled it with other bytes.
    if (is_given_up && !is_on_device()) return false;
    const Extent extent = extent_of(tensor);
    if (extent.start < start || stop < extent.stop || !is_copy_current()) return false;
    const auto version = torch::autograd::impl::version_counter(tensor).current_version();
    return has_copied_ && version == saved_.front().copied_version;
  }

  int64_t save(const at::Tensor& tensor, PyObject* holder) {
    const int64_t index = static_cast<int64_t>(saved_.size());
    auto counter = torch::autograd::impl::version_counter(tensor);
    const auto version = counter.current_version();
    Saved saved{at::Tensor(), tensor.dtype(), tensor.sizes().vec(), tensor.strides().vec(),
                tensor.storage_offset(), counter, version, version, py::object()};
    if (is_on_device()) {
      saved.alias = at::Tensor(tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(
          counter, /*allow_tensor_metadata_change=*/true));
      if (PySet_Add(holders_to_release.ptr(), holder) != 0) throw py::error_already_set();
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

  py::object source_bytes() const { return python->bytes(wrap_storage(memory_), start, nbytes); }

  py::object bytes_to_copy() const {
    if (static_cast<int64_t>(memory_.nbytes()) != storage_nbytes) return py::none();
    return source_bytes();
  }

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

  bool is_emptied() const {
    return static_cast<int64_t>(memory_.nbytes()) != storage_nbytes ||
           memory_.data() != copied_address_;
  }

  void release(const py::object& label) {
    // Also keeps torch from using the storage object's address again, by which it is found.
    original_ = memory_.getWeakStorageImpl();
    for (auto& saved : saved_) saved.alias.reset();
    for (auto& saved : saved_) {  // [Note: Hidden leaves]
      if (saved.leaf && !python->empty_if_hidden(saved.leaf).cast<bool>()) {
        saved.leaf = py::object();
      }
    }
    move_to(Residence::HOST);
    // The Python object has the only reference that is left of ours, as in Python.
    py::object memory = wrap_storage(std::move(memory_));
    memory_ = c10::Storage();
    copies_.attr("release")(memory, out_signal, streams, label);
    if (is_given_up) copies_.attr("empty")(memory);
  }

  bool is_memory_gone() const {
    if (is_given_up) return !is_on_device();
    return original_.has_value() && original_->expired();
  }

  bool is_original_emptied() const {
    const auto original = lock_original();
    return original && static_cast<int64_t>(original->nbytes()) != storage_nbytes;
  }

  py::object live_original() const {
    auto original = lock_original();
    if (!original) return py::none();
    return wrap_storage(c10::Storage(std::move(original)));
  }

  py::object take_allocation() {
    if (allocation.is_none()) {
      throw std::runtime_error("storage of " + std::string(py::str(owner)) +
                               " has no host buffer in " + name(residence));
    }
    py::object taken = std::move(allocation);
    allocation = py::none();
    return taken;
  }

  std::vector<int64_t> shape_of(int64_t index) const { return saved_.at(index).sizes; }

  py::object alias(int64_t index) const { return wrap(saved_.at(index).alias); }

  py::object view_returned(int64_t index) {
    if (returned.is_none()) {
      throw std::runtime_error("storage of " + std::string(py::str(owner)) + " is in " +
                               name(residence));
    }
    const Saved& saved = saved_.at(index);
    c10::Storage memory = THPStorage_Unpack(returned.ptr());
    int64_t offset = saved.offset;
    if (static_cast<int64_t>(memory.nbytes()) != storage_nbytes) {
      offset -= start / static_cast<int64_t>(saved.dtype.itemsize());
    }
    py::object view = wrap(view_over(std::move(memory), saved.dtype, saved.sizes, saved.strides,
                                     offset));
    if (saved.leaf) python->refill(saved.leaf, view);
    return view;
  }

  py::object device() const {
    return py::reinterpret_steal<py::object>(THPDevice_New(device_));
  }

  static std::string name(Residence residence) {
    return py::str(py::handle(python->residences[static_cast<int>(residence)]).attr("name"));
  }

 private:
  c10::intrusive_ptr<c10::StorageImpl> lock_original() const {
    if (is_given_up || !original_.has_value()) return {};
    return original_->lock();
  }

  std::vector<Saved> saved_;
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> original_;
  bool has_copied_ = false;
  const void* copied_address_ = nullptr;
  py::object hooks_;
  c10::StorageImpl* key_;
  friend class Hooks;
};

// What autograd keeps in place of a saved tensor.
struct SavedTensor {
  py::object storage, group;
  int64_t index;
};

// What autograd keeps of a tensor that stays: a result that its own operation saves must not be
// kept with its graph, which would hold it.
py::object keep(py::object object, const at::Tensor& tensor) {
  if (!tensor.grad_fn()) return object;
  return wrap(tensor.detach());
}

// Set by megatron-core on parameters, and by Transformer Engine on weights.
bool has_opted_out(PyObject* tensor) {
  static PyObject* const names[] = {PyUnicode_InternFromString("_do_not_offload"),
                                    PyUnicode_InternFromString("_TE_do_not_offload")};
  const auto attributes = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(tensor, nullptr));
  if (!attributes) throw py::error_already_set();
  if (PyDict_GET_SIZE(attributes.ptr()) == 0) return false;
  for (PyObject* name : names) {
    PyObject* value = PyDict_GetItemWithError(attributes.ptr(), name);
    if (value != nullptr && PyObject_IsTrue(value) == 1) return true;
  }
  return false;
}

bool is_same(const py::object& left, const py::object& right) {
  const int same = PyObject_RichCompareBool(left.ptr(), right.ptr(), Py_EQ);
  if (same < 0) throw py::error_already_set();
  return same == 1;
}

// The hooks of one `ActivationStore`.
class Hooks {
 public:
  Hooks(const py::object& backend, py::object pool, py::object copies, const std::string& device_type)
      : device_type_(c10::Device(device_type).type()),
        pool(std::move(pool)),
        copies_(std::move(copies)),
        current_stream_id_(backend.attr("current_stream_id")),
        current_stream_(backend.attr("current_stream")) {}

  py::object pool;

  py::object pack(const py::object& group, py::object object) {
    if (reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())) != THPVariableClass) return object;
    const at::Tensor& tensor = THPVariable_Unpack(object.ptr());
    if (!is_movable(tensor, object)) return keep(std::move(object), tensor);
    c10::StorageImpl* key = tensor.storage().unsafeGetStorageImpl();
    const auto known = by_memory_.find(key);
    Storage* storage = known == by_memory_.end() ? nullptr : known->second;
    py::object wrapped;
    static PyObject* const held_name = PyUnicode_InternFromString("held");
    const auto held = py::reinterpret_steal<py::dict>(
        PyObject_GetAttr(group.ptr(), held_name));
    if (!held) throw py::error_already_set();
    if (storage == nullptr || !storage->serves(tensor)) {
      if (is_of_parameter(tensor) || tensor.numel() < group.attr("min_numel").cast<int64_t>() ||
          extent_of(tensor).stop > static_cast<int64_t>(tensor.storage().nbytes())) {
        return keep(std::move(object), tensor);
      }
      storage = new Storage(tensor, group.attr("label"), static_cast<int64_t>(held.size()), pool,
                            copies_, py::int_(next_serial_++), py::cast(this));
      wrapped = py::cast(storage, py::return_value_policy::take_ownership);
      by_memory_[key] = storage;
    } else {
      wrapped = py::cast(storage);
    }
    if (!held.contains(storage->serial)) group.attr("hold")(wrapped);
    const py::object stream_id = current_stream_id_();
    if (!storage->streams.contains(stream_id)) storage->streams[stream_id] = current_stream_();
    const int64_t index = storage->save(tensor, group.attr("key").ptr());
    return py::cast(SavedTensor{std::move(wrapped), group, index});
  }

  // `read_slowly` is the engine's method, in Python, for all that is not read from where it is.
  py::object unpack(const py::object& read_slowly, const py::object& object) {
    if (!py::isinstance<SavedTensor>(object)) return object;
    const SavedTensor& saved = object.cast<const SavedTensor&>();
    static PyObject* const state_name = PyUnicode_InternFromString("state");
    const auto state = py::reinterpret_steal<py::object>(
        PyObject_GetAttr(saved.group.ptr(), state_name));
    if (state.is(python->committed)) return read_slowly(object);
    Storage& storage = saved.storage.cast<Storage&>();
    if (storage.is_overwritten(saved.index)) return read_slowly(object);
    if (storage.residence == Residence::DEVICE || storage.residence == Residence::STAYS) {
      return storage.alias(saved.index);
    }
    if (storage.residence != Residence::RELOADING && storage.residence != Residence::RELOADED) {
      return read_slowly(object);
    }
    const py::object stream_id = current_stream_id_();
    const int64_t now = copies_.attr("num_forgotten").cast<int64_t>();
    const bool has_waited = storage.residence == Residence::RELOADED && storage.waited_on &&
                            storage.waited_when == now && is_same(storage.waited_on, stream_id);
    if (!has_waited) {
      py::object read = read_slowly(object);
      storage.waited_on = stream_id;
      storage.waited_when = now;
      return read;
    }
    if (!storage.returned_on.is_none() &&
        (!storage.is_copy_current() ||
         !is_same(py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(storage.returned_on.ptr(), 0)),
                  stream_id))) {
      return read_slowly(object);
    }
    return storage.view_returned(saved.index);
  }

  // The storage that is saved from the storage object at this address; None if there is none.
  py::object find(int64_t address) const {
    const auto known = by_memory_.find(reinterpret_cast<c10::StorageImpl*>(address));
    return known == by_memory_.end() ? py::none() : py::cast(known->second);
  }

  int64_t num_known() const { return static_cast<int64_t>(by_memory_.size()); }

  void forget(c10::StorageImpl* key, const Storage* storage) {
    const auto known = by_memory_.find(key);
    if (known != by_memory_.end() && known->second == storage) by_memory_.erase(known);
  }

 private:
  bool is_movable(const at::Tensor& tensor, const py::object& object) const {
    return tensor.device().type() == device_type_ && tensor.layout() == c10::kStrided &&
           !tensor.is_nested() && tensor.numel() > 0 && !tensor.is_conj() && !tensor.is_neg() &&
           !tensor._is_zerotensor() && !tensor._fw_grad(/*level=*/0).defined() &&
           !has_opted_out(object.ptr());
  }

  static bool is_of_parameter(const at::Tensor& tensor) {
    return tensor.is_view() && py::isinstance(wrap(at::Tensor(tensor._base())), python->parameter);
  }

  c10::DeviceType device_type_;
  py::object copies_, current_stream_id_, current_stream_;
  std::unordered_map<c10::StorageImpl*, Storage*> by_memory_;
  static inline int64_t next_serial_ = 0;
};

Storage::~Storage() {
  hooks_.cast<Hooks&>().forget(key_, this);
  try {
    // Autograd wants it no more, though a copy may still be using the device memory.
    if (residence == Residence::OFFLOADING) {
      release(py::str(""));
    } else if (residence == Residence::RELOADING) {
      copies_.attr("abandon")(std::exchange(returned, py::none()), in_signal, returned_on);
    }
    if (!allocation.is_none()) pool.attr("free")(allocation);
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("SavedStorage");
  }
}

Residence residence_of(const py::object& object) {
  for (int index = 0; index < kNumResidences; ++index) {
    if (python->residences[index] == object.ptr()) return static_cast<Residence>(index);
  }
  throw py::type_error("it is no Residence");
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("configure", [](const py::list& residences, py::object bytes,
                             py::object empty_if_hidden, py::object refill, py::object parameter,
                             py::object committed) {
    python = new Python();
    for (int index = 0; index < kNumResidences; ++index) {
      python->residences[index] = py::object(residences[index]).release().ptr();
    }
    python->bytes = std::move(bytes);
    python->empty_if_hidden = std::move(empty_if_hidden);
    python->refill = std::move(refill);
    python->parameter = std::move(parameter);
    python->committed = std::move(committed);
  });

  py::class_<Storage>(module, "SavedStorage")
      .def_readonly("serial", &Storage::serial)
      .def_readonly("owner", &Storage::owner)
      .def_readonly("position", &Storage::position)
      .def_readonly("pool", &Storage::pool)
      .def_property_readonly("device", &Storage::device)
      .def_readonly("storage_nbytes", &Storage::storage_nbytes)
      .def_readonly("start", &Storage::start)
      .def_readonly("stop", &Storage::stop)
      .def_readonly("nbytes", &Storage::nbytes)
      .def_readwrite("returned", &Storage::returned)
      .def_readwrite("allocation", &Storage::allocation)
      .def_readonly("holders_to_release", &Storage::holders_to_release)
      .def_readonly("streams", &Storage::streams)
      .def_readwrite("out_signal", &Storage::out_signal)
      .def_readwrite("in_signal", &Storage::in_signal)
      .def_readwrite("returned_on", &Storage::returned_on)
      .def_readwrite("is_given_up", &Storage::is_given_up)
      .def_property_readonly("residence",
                             [](const Storage& storage) {
                               return py::reinterpret_borrow<py::object>(
                                   python->residences[static_cast<int>(storage.residence)]);
                             })
      .def_property_readonly("is_on_device", &Storage::is_on_device)
      .def_property_readonly("is_copy_current", &Storage::is_copy_current)
      .def_property_readonly("is_emptied", &Storage::is_emptied)
      .def_property_readonly("is_memory_gone", &Storage::is_memory_gone)
      .def_property_readonly("is_original_emptied", &Storage::is_original_emptied)
      .def("move_to", [](Storage& storage, const py::object& to) {
        storage.move_to(residence_of(to));
      })
      .def("serves", [](const Storage& storage, const py::object& tensor) {
        return storage.serves(THPVariable_Unpack(tensor.ptr()));
      })
      .def("settle_extent", &Storage::settle_extent)
      .def("source_bytes", &Storage::source_bytes)
      .def("bytes_to_copy", &Storage::bytes_to_copy)
      .def("note_copy_out", &Storage::note_copy_out)
      .def("is_overwritten", &Storage::is_overwritten)
      .def("release", &Storage::release, py::arg("label") = "")
      .def("live_original", &Storage::live_original)
      .def("take_allocation", &Storage::take_allocation)
      .def("shape_of",
           [](const Storage& storage, int64_t index) {
             py::list shape;
             for (int64_t size : storage.shape_of(index)) shape.append(size);
             return shape;
           })
      .def("alias", &Storage::alias)
      .def("view_returned", &Storage::view_returned);

  py::class_<SavedTensor>(module, "SavedTensor")
      .def_readonly("storage", &SavedTensor::storage)
      .def_readonly("group", &SavedTensor::group)
      .def_readonly("index", &SavedTensor::index);

  py::class_<Hooks>(module, "Hooks")
      .def(py::init<const py::object&, py::object, py::object, const std::string&>())
      .def_readwrite("pool", &Hooks::pool)
      .def("pack", &Hooks::pack)
      .def("unpack", &Hooks::unpack)
      .def("find", &Hooks::find)
      .def_property_readonly("num_known", &Hooks::num_known);
}
