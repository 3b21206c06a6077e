// Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

// Python bindings.

#include "iteration.h"

using namespace slipstream;

namespace {

const at::Tensor& tensor_of(const py::object& object) { return THPVariable_Unpack(object.ptr()); }

py::object storage_or_none(const c10::Storage& storage) {
  return storage ? wrap(c10::Storage(storage)) : py::none();
}

std::optional<Signal> signal_of(const py::object& object) {
  if (object.is_none()) return std::nullopt;
  return object.cast<Signal>();
}

py::object signal_or_none(const std::optional<Signal>& signal) {
  return signal ? py::cast(*signal) : py::none();
}

std::vector<Signal> signals_of(const py::iterable& objects) {
  std::vector<Signal> signals;
  for (const auto& object : objects) signals.push_back(object.cast<Signal>());
  return signals;
}

py::tuple tuple_of(const std::vector<Signal>& signals) {
  py::tuple tuple(signals.size());
  for (size_t index = 0; index < signals.size(); ++index) tuple[index] = py::cast(signals[index]);
  return tuple;
}

void bind_waits(py::module_& module) {
  py::class_<Signal>(module, "Signal")
      .def_property_readonly("event", [](const Signal& signal) { return signal.event.object; })
      .def_property_readonly("stream",
                             [](const Signal& signal) {
                               return py::reinterpret_borrow<py::object>(signal.stream_id);
                             })
      .def_readonly("position", &Signal::position)
      .def_readonly("graph", &Signal::graph);

  py::class_<Waits>(module, "Waits", collected<Waits>())
      .def(py::init<const py::object&>())
      .def_readwrite("graph", &Waits::graph)
      .def_readwrite("is_timed", &Waits::is_timed)
      .def_static("leave_out", [](int edge) { Waits::left_out = static_cast<Edge>(edge); })
      .def("signal",
           [](Waits& waits, py::object event, py::object stream, py::object stream_id) {
             const int number = waits.driver->add_stream(std::move(stream_id), std::move(stream));
             return waits.signal({std::move(event), nullptr}, number);
           })
      .def("is_due",
           [](Waits& waits, const py::object& stream_id, const Signal& signal) {
             const int number = waits.driver->number_of(stream_id);
             return number < 0 ? signal.graph == waits.graph : waits.is_due(number, signal);
           })
      .def("forget", &Waits::forget);
}

void bind_host_layout(py::module_& module) {
  py::class_<HostUsage, std::shared_ptr<HostUsage>>(module, "HostUsage")
      .def(py::init<>())
      .def_readwrite("in_use", &HostUsage::in_use)
      .def_readwrite("requested", &HostUsage::requested)
      .def_readwrite("peak", &HostUsage::peak)
      .def_readwrite("high_water", &HostUsage::high_water)
      .def_readwrite("high_water_requested", &HostUsage::high_water_requested)
      .def("add", &HostUsage::add)
      .def("remove", &HostUsage::remove);

  py::class_<HostAllocation, std::shared_ptr<HostAllocation>>(module, "HostAllocation")
      .def(py::init([](const py::object& buffer, const py::iterable& last_use) {
        auto allocation = std::make_shared<HostAllocation>();
        allocation->buffer = region_of(buffer);
        allocation->last_use = signals_of(last_use);
        return allocation;
      }))
      .def_property_readonly(
          "buffer", [](const HostAllocation& allocation) { return allocation.buffer.bytes(); })
      .def_property(
          "last_use",
          [](const HostAllocation& allocation) { return tuple_of(allocation.last_use); },
          [](HostAllocation& allocation, const py::iterable& signals) {
            allocation.last_use = signals_of(signals);
          })
      .def_property(
          "in_flight",
          [](const HostAllocation& allocation) { return storage_or_none(allocation.in_flight); },
          [](HostAllocation& allocation, const py::object& memory) {
            allocation.in_flight =
                memory.is_none() ? c10::Storage() : THPStorage_Unpack(memory.ptr());
          })
      .def_property_readonly("is_lost", &HostAllocation::is_lost);

  py::class_<Layout, std::shared_ptr<Layout>>(module, "Layout")
      .def(py::init<const py::dict&, const py::list&, std::shared_ptr<HostUsage>>())
      .def_readwrite("is_followed", &Layout::is_followed)
      .def_property_readonly("newest", [](const Layout& layout) { return tuple_of(layout.newest); })
      .def("begin",
           [](Layout& layout, const py::iterable& carried) { layout.begin(signals_of(carried)); })
      .def("allocate", &Layout::allocate)
      .def("has", &Layout::has)
      .def("free", &Layout::free)
      .def("take_in_use", &Layout::take_in_use)
      .def_property_readonly("is_idle", &Layout::is_idle)
      .def_property_readonly("has_lost", &Layout::has_lost)
      .def("free_lost", &Layout::free_lost);
}

void bind_storage(py::module_& module) {
  py::class_<Storage, std::shared_ptr<Storage>>(module, "SavedStorage")
      .def_readonly("serial", &Storage::serial)
      .def_property_readonly("owner", &Storage::label)
      .def_readonly("position", &Storage::position)
      .def_readonly("pool", &Storage::pool)
      .def_property_readonly("device",
                             [](const Storage& storage) {
                               return py::reinterpret_steal<py::object>(
                                   THPDevice_New(storage.device()));
                             })
      .def_readonly("storage_nbytes", &Storage::storage_nbytes)
      .def_readonly("start", &Storage::start)
      .def_readonly("stop", &Storage::stop)
      .def_readonly("nbytes", &Storage::nbytes)
      .def_property(
          "returned", [](const Storage& storage) { return storage_or_none(storage.returned); },
          [](Storage& storage, const py::object& memory) {
            storage.returned = memory.is_none() ? c10::Storage() : THPStorage_Unpack(memory.ptr());
          })
      .def_readonly("allocation", &Storage::allocation)
      .def("own",
           [](Storage& storage, std::shared_ptr<HostAllocation> allocation) {
             storage.allocation = std::move(allocation);
           })
      .def("buffer_to_read", &Storage::buffer_to_read)
      .def_property_readonly("streams", &Storage::streams_by_id)
      .def_property(
          "out_signal", [](const Storage& storage) { return signal_or_none(storage.out_signal); },
          [](Storage& storage, const py::object& signal) {
            storage.out_signal = signal_of(signal);
          })
      .def_property(
          "in_signal", [](const Storage& storage) { return signal_or_none(storage.in_signal); },
          [](Storage& storage, const py::object& signal) { storage.in_signal = signal_of(signal); })
      .def_property("returned_on", &Storage::here_returned_on, &Storage::set_returned_on)
      .def_readwrite("is_given_up", &Storage::is_given_up)
      .def_property_readonly("residence",
                             [](const Storage& storage) {
                               return python->residences[static_cast<int>(storage.residence)];
                             })
      .def_property_readonly("is_on_device", &Storage::is_on_device)
      .def_property_readonly("is_copy_current", &Storage::is_copy_current)
      .def_property_readonly("is_emptied", &Storage::is_emptied)
      .def_property_readonly("is_memory_gone", &Storage::is_memory_gone)
      .def_property_readonly("is_original_emptied", &Storage::is_original_emptied)
      .def("move_to",
           [](Storage& storage, const py::object& to) {
             storage.move_to(static_cast<Residence>(index_in(python->residences, to)));
           })
      .def("serves", [](const Storage& storage,
                        const py::object& tensor) { return storage.serves(tensor_of(tensor)); })
      .def("note_stream", &Storage::note_stream_by_id)
      .def("drop_holder", &Storage::drop_holder)
      .def("settle_extent", &Storage::settle_extent)
      .def("source_bytes", [](const Storage& storage) { return storage.source().bytes(); })
      .def("bytes_to_copy",
           [](const Storage& storage) {
             return storage.has_lost_memory() ? py::none() : storage.source().bytes();
           })
      .def("note_copy_out", &Storage::note_copy_out)
      .def("is_overwritten", &Storage::is_overwritten)
      .def("release", &Storage::release, py::arg("label") = "")
      .def("live_original",
           [](const Storage& storage) { return storage_or_none(storage.live_original()); })
      .def("take_allocation", &Storage::take_allocation)
      .def("shape_of",
           [](const Storage& storage, int64_t index) {
             py::list shape;
             for (const int64_t size : storage.shape_of(index)) shape.append(size);
             return shape;
           })
      .def("alias", &Storage::alias)
      .def("view_returned", &Storage::view_returned);
}

void bind_group(py::module_& module) {
  py::class_<Group, std::shared_ptr<Group>>(module, "OffloadTensorGroup")
      .def_readonly("serial", &Group::serial)
      .def_property_readonly("label", &Group::label)
      .def_property_readonly("key", &Group::key)
      .def_readonly("name", &Group::name)
      .def_property_readonly(
          "state",
          [](const Group& group) { return python->group_states[static_cast<int>(group.state)]; })
      .def_readwrite("min_numel", &Group::min_numel)
      .def_readwrite("is_read_first", &Group::is_read_first)
      .def_readwrite("untracked_in", &Group::untracked_in)
      .def_readwrite("kinds_staying", &Group::kinds_staying)
      .def("__str__", [](Group& group) { return py::str(group.label()); })
      .def("move_to",
           [](Group& group, const py::object& to) {
             group.move_to(static_cast<GroupState>(index_in(python->group_states, to)));
           })
      .def_property_readonly("held",
                             [](const Group& group) {
                               py::dict held;
                               for (const auto& item : group.held) {
                                 held[py::int_(item.serial)] =
                                     python->group_key(item.owner_pass, item.owner_index);
                               }
                               return held;
                             })
      .def_property_readonly("nbytes",
                             [](const Group& group) {
                               py::dict nbytes;
                               for (const auto& item : group.held) {
                                 if (item.nbytes >= 0) nbytes[py::int_(item.serial)] = item.nbytes;
                               }
                               return nbytes;
                             })
      .def("storages",
           [](const Group& group) {
             py::list storages;
             for (const auto& storage : group.storages()) storages.append(storage);
             return storages;
           })
      .def("storages_or_none",
           [](const Group& group) {
             py::list storages;
             for (const auto& item : group.held) storages.append(item.storage.lock());
             return storages;
           })
      .def_property_readonly("is_alive", &Group::is_alive);

  static PyGetSetDef attributes[] = {
      {"storage",
       [](PyObject* self, void*) {
         return guarded([&] {
           return py::object(SavedTensorObject::of(self).storage_object()).release().ptr();
         });
       },
       nullptr, nullptr, nullptr},
      {"group",
       [](PyObject* self, void*) {
         return guarded(
             [&] { return py::cast(SavedTensorObject::of(self).group).release().ptr(); });
       },
       nullptr, nullptr, nullptr},
      {"index",
       [](PyObject* self, void*) { return PyLong_FromLongLong(SavedTensorObject::of(self).index); },
       nullptr, nullptr, nullptr},
      {nullptr, nullptr, nullptr, nullptr, nullptr}};
  SavedTensorObject::make_type("slipstream_native.SavedTensor", attributes);
  module.attr("SavedTensor") = SavedTensorObject::type();
}

void bind_pass(py::module_& module) {
  py::class_<Pass, std::shared_ptr<Pass>>(module, "ChunkOffloadHandler")
      .def_readonly("index", &Pass::index)
      .def_readonly("vp_stage", &Pass::vp_stage)
      .def_readonly("min_offloaded_tensor_size", &Pass::min_numel)
      .def_readonly("micro_batch", &Pass::micro_batch)
      .def_readwrite("given_up_by", &Pass::given_up_by)
      .def_readwrite("num_outputs", &Pass::num_outputs)
      .def_property_readonly("groups",
                             [](const Pass& chunk_pass) {
                               py::list groups;
                               for (const auto& group : chunk_pass.groups) groups.append(group);
                               return groups;
                             })
      .def("find", &Pass::find)
      .def("open_group", &Pass::open_group)
      .def("commit_group", &Pass::commit_group)
      .def("used_before", &Pass::used_before)
      .def_property_readonly("lacks_backward", &Pass::lacks_backward)
      .def_property_readonly("awaits_backward", &Pass::awaits_backward);
}

// A method of `Store` with `count` arguments, bypassing pybind11's conversions.
template <size_t count, py::object (*function)(const py::object&, Store&, const py::object*)>
PyObject* call_fast(PyObject* self, PyObject* const* given, Py_ssize_t number) {
  return guarded([&] {
    if (number != static_cast<Py_ssize_t>(count)) throw py::type_error("wrong number of arguments");
    py::object arguments[count];
    for (size_t index = 0; index < count; ++index) {
      arguments[index] = py::reinterpret_borrow<py::object>(given[index]);
    }
    const auto owner = py::reinterpret_borrow<py::object>(self);
    return function(owner, *constructed<Store>(self), arguments).release().ptr();
  });
}

template <size_t count, py::object (*function)(const py::object&, Store&, const py::object*)>
PyMethodDef fast_method(const char* name) {
  const _PyCFunctionFast pointer = &call_fast<count, function>;
  return {name, reinterpret_cast<PyCFunction>(pointer), METH_FASTCALL, nullptr};
}

py::object start(const py::object&, Store& store, const py::object* given) {
  return py::bool_(Marks::start(store, given[0], given[1], given[2]));
}

py::object enter(const py::object& owner, Store& store, const py::object* given) {
  return py::bool_(Marks::enter(owner, store, given[0], given[1]));
}

py::object leave(const py::object&, Store& store, const py::object* given) {
  return py::bool_(Regions::leave(store, given[0]));
}

py::object end(const py::object&, Store& store, const py::object* given) {
  return Marks::end(store, given[0], given[1], given[2]);
}

py::object mark_output(const py::object&, Store& store, const py::object* given) {
  return py::bool_(Marks::mark_output(store, given[0], given[1]));
}

py::object mark_gradient(const py::object&, Store& store, const py::object* given) {
  return py::bool_(Marks::mark_gradient(store, given[0], given[1], given[2]));
}

// The methods of `Marks` in native_store.py.
void bind_marks(PyTypeObject* store) {
  static PyMethodDef marks[] = {fast_method<3, start>("start"),
                                fast_method<2, enter>("enter"),
                                fast_method<1, leave>("leave"),
                                fast_method<3, end>("end"),
                                fast_method<2, mark_output>("mark_output"),
                                fast_method<3, mark_gradient>("mark_gradient")};
  for (auto& definition : marks) {
    const auto method =
        py::reinterpret_steal<py::object>(PyDescr_NewMethod(store, &definition));
    py::setattr(reinterpret_cast<PyObject*>(store), definition.ml_name, method);
  }
}

void bind_store(py::module_& module) {
  py::class_<CountersByName>(module, "Counters").def("items", &CountersByName::items);
  PackHookObject::make_type("slipstream_native.PackHook", nullptr, &call_pack);
  UnpackHookObject::make_type("slipstream_native.UnpackHook", nullptr, &call_unpack);
  module.attr("PackHook") = PackHookObject::type();
  py::class_<Store> store_class(module, "Store", collected<Store>());
  store_class
      .def(py::init<const py::object&, py::object, py::object, py::object, py::list>())
      .def_readwrite("pool", &Store::pool)
      .def("make_pass",
           [](Store& store, int64_t index, int64_t vp_stage, int64_t min_numel,
              int64_t micro_batch) {
             return std::make_shared<Pass>(index, vp_stage, min_numel, micro_batch, store.spent);
           })
      .def("take_counters", [](Store& store) { return std::exchange(store.modules, {}); })
      .def_readwrite("is_verified", &Store::is_verified)
      .def_readwrite("crosses_streams", &Store::crosses_streams)
      .def("pack", &Store::pack)
      .def("hooks",
           [](const py::object& store, const std::shared_ptr<Group>& group,
              const py::object& engine) {
             return Regions::hooks(store, store.cast<Store*>(), group, engine);
           })
      .def_static("commit", &Store::commit)
      .def("copy_out", &Store::copy_out)
      .def("release", &Store::release)
      .def("copy_in", &Store::copy_in)
      .def("find", &Store::find)
      .def_property_readonly("num_known", &Store::num_known);
  bind_marks(reinterpret_cast<PyTypeObject*>(store_class.ptr()));
}

void bind_steps(py::module_& module) {
  py::class_<Steps>(module, "Steps", collected<Steps>())
      .def(py::init<py::object, const py::iterable&, const py::iterable&, const py::iterable&,
                    py::object>())
      .def("begin", [](const py::object& steps, const py::list& begun,
                       std::shared_ptr<Pass> current, std::shared_ptr<Layout> layout,
                       bool leaves_out_marks) {
        Iteration::Passes passes;
        for (const auto& item : begun) passes.push_back(item.cast<std::shared_ptr<Pass>>());
        auto now = std::make_shared<Iteration>(steps, std::move(passes), std::move(current),
                                               std::move(layout), leaves_out_marks);
        now->steps().store->now = now;
        return now;
      });

  py::class_<Iteration, std::shared_ptr<Iteration>>(module, "Iteration", collected<Iteration>())
      .def_property_readonly("num_steps", &Iteration::num_steps)
      .def_readonly("leaves_out_marks", &Iteration::leaves_out_marks)
      .def("begin_pass", &Iteration::begin_pass)
      .def("leave_pass", [](Iteration& now) { now.current = nullptr; })
      .def("skip_left_out", &Iteration::skip_left_out)
      .def("end", [](Iteration& now) { now.is_followed = false; })
      // Returns None if the mark is not the next one of the plan, else the actions left to Python.
      .def("come_to", [](Iteration& now, const py::object& kind, const py::object& at) {
        const auto step = [&] { return py::reinterpret_borrow<py::tuple>(at); };
        const auto outcome = now.come_to(
            kind, py::isinstance<Group>(at) ? at.cast<const Group&>().place()
                                            : Steps::place_of(step()[1], step()[2]));
        return outcome.is_planned ? py::object(Iteration::in_python(outcome.left)) : py::none();
      });
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("configure", [](const py::kwargs& objects) {
    python = new Python();
    const auto members = [&](const char* name, py::object* to) {
      for (const auto& member : objects[name]) *to++ = py::reinterpret_borrow<py::object>(member);
    };
    members("residences", python->residences);
    members("group_states", python->group_states);
    python->bytes = objects["bytes"];
    python->empty_if_hidden = objects["empty_if_hidden"];
    python->refill = objects["refill"];
    python->parameter = objects["parameter"];
    python->size_class_bytes = objects["size_class_bytes"];
    python->host_memory_full = objects["host_memory_full"];
    python->group_key = objects["group_key"];
    python->group_label = objects["group_label"];
    python->step = objects["step"];
    python->forward_start = objects["forward_start"];
    python->forward_commit = objects["forward_commit"];
    python->backward_use = objects["backward_use"];
    python->backward_end = objects["backward_end"];
    python->output_start = objects["output_start"];
    python->backward_start = objects["backward_start"];
    python->output_layer = objects["output_layer"];
    python->backward = objects["backward"];
  });
  bind_waits(module);
  bind_host_layout(module);
  bind_storage(module);
  bind_group(module);
  bind_pass(module);
  bind_store(module);
  bind_steps(module);
  module.def("mark", [](const py::object& tensor, py::object function) {
    return mark(tensor, Callback(std::move(function)));
  });
  module.def("call_before", [](const py::object& tensor, py::object function) {
    call_before(tensor, Callback(std::move(function)));
  });
  module.def("num_alive", [] {
    py::dict numbers;
    numbers["Store"] = Alive<Store>::number();
    numbers["Steps"] = Alive<Steps>::number();
    numbers["Iteration"] = Alive<Iteration>::number();
    numbers["Pass"] = Alive<Pass>::number();
    numbers["Group"] = Alive<Group>::number();
    numbers["Storage"] = Alive<Storage>::number();
    return numbers;
  });
  py::class_<HostTime>(module, "HostTime")
      .def_readwrite_static("is_taken", &HostTime::is_taken)
      .def_static("take", [] {
        const auto taken = py::make_tuple(HostTime::nanoseconds[HostTime::AUTOGRAD],
                                          HostTime::nanoseconds[HostTime::DRIVER]);
        HostTime::nanoseconds[0] = HostTime::nanoseconds[1] = 0;
        return taken;
      });
}
