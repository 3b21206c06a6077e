// Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

// The saved-tensor hooks of a group's region, and its entry and exit: regions.py is the
// reference.

#pragma once

#include <ATen/SavedTensorHooks.h>
#include <torch/csrc/PyInterpreter.h>

#include "store.h"

namespace slipstream {

// Hooks hold the Python object that owns the store. Autograd owns the hooks, so the garbage
// collector cannot see cycles through them.
struct PackHook {
  py::object owner_of_store;
  Store* store;
  std::shared_ptr<Group> group;
};

// The hook, not the store, holds the engine, so that the engine is freed with its last graph.
struct UnpackHook {
  py::object owner_of_store;
  Store* store;
  py::object engine;
};

using PackHookObject = PlainObject<PackHook>;
using UnpackHookObject = PlainObject<UnpackHook>;

inline PyObject* only_argument(PyObject* const* arguments, size_t count) {
  if (count != 1) throw py::type_error("a saved-tensor hook takes one argument");
  return arguments[0];
}

inline PyObject* call_pack(PackHook& hook, PyObject* const* arguments, size_t count) {
  const HostTime time(HostTime::AUTOGRAD);
  auto tensor = py::reinterpret_borrow<py::object>(only_argument(arguments, count));
  return hook.store->pack(hook.group, std::move(tensor)).release().ptr();
}

inline PyObject* call_unpack(UnpackHook& hook, PyObject* const* arguments, size_t count) {
  const HostTime time(HostTime::AUTOGRAD);
  const auto saved = py::reinterpret_borrow<py::object>(only_argument(arguments, count));
  return hook.store->unpack(hook.engine, saved).release().ptr();
}

class Regions {
 public:
  // Returns the pack hook and the unpack hook.
  static std::pair<py::object, py::object> hooks(const py::object& owner_of_store, Store* store,
                                                 const std::shared_ptr<Group>& group,
                                                 const py::object& engine) {
    return {PackHookObject::make({owner_of_store, store, group}),
            UnpackHookObject::make({owner_of_store, store, engine})};
  }

  // Whether saved-tensor hooks other than an engine's are active.
  static bool others_save() {
    const auto hooks = at::SavedTensorDefaultHooks::get_hooks();
    return hooks.has_value() && !PackHookObject::is(hooks->first.ptr(getPyInterpreter()));
  }

  // Enters the region of the group that a mark in C++ started last. Appends to the entered
  // regions the flag's previous value, or None if the region has no hooks. Returns false, with no
  // effect, if Python must do it.
  static bool enter(const py::object& owner_of_store, Store& store, const py::object& engine,
                    const py::object& flag) {
    const auto group = std::exchange(store.started, nullptr);
    if (others_save()) return false;
    group->untracked_in = std::exchange(store.kept_in, py::none());
    py::object before = py::none();
    if (group->untracked_in.is_none()) {
      auto [pack, unpack] = hooks(owner_of_store, &store, group, engine);
      at::SavedTensorDefaultHooks::lazy_initialize();
      at::SavedTensorDefaultHooks::push_hooks(owned(std::move(pack)), owned(std::move(unpack)));
      before = set_flag(flag, group->name);
    }
    if (PyList_Append(store.entered.ptr(), before.ptr()) != 0) throw py::error_already_set();
    return true;
  }

  // Leaves the region entered last, in C++ or in Python. Returns whether there was one.
  static bool leave(Store& store, const py::object& flag) {
    PyObject* entered = store.entered.ptr();
    const Py_ssize_t last = PyList_GET_SIZE(entered) - 1;
    if (last < 0) return false;
    const auto before = py::reinterpret_borrow<py::object>(PyList_GET_ITEM(entered, last));
    if (PyList_SetSlice(entered, last, last + 1, nullptr) != 0) throw py::error_already_set();
    if (before.is_none()) return true;
    at::SavedTensorDefaultHooks::pop_hooks();
    if (!flag.is_none() && before.ptr() == Py_False) {
      set_attribute(item(flag, 0), item(flag, 1).ptr(), before);
    }
    return true;
  }

 private:
  static c10::SafePyObject owned(py::object object) {
    return c10::SafePyObject(object.release().ptr(), getPyInterpreter());
  }

  static py::handle item(const py::object& tuple, int place) {
    return PyTuple_GET_ITEM(tuple.ptr(), place);
  }

  // Sets the flag (a `RegionFlag`, or None) for the region of a group of that name. Returns its
  // previous value.
  static py::object set_flag(const py::object& flag, const py::object& name) {
    if (flag.is_none()) return py::bool_(false);
    py::object before = attribute(item(flag, 0), item(flag, 1).ptr());
    if (before.ptr() == Py_False && PySet_Contains(item(flag, 2).ptr(), name.ptr()) == 0) {
      set_attribute(item(flag, 0), item(flag, 1).ptr(), py::bool_(true));
    }
    return before;
  }
};

}  // namespace slipstream
