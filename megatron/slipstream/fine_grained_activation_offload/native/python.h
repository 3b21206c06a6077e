// Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

// Python objects that C++ uses, and conversions between torch's C++ and Python types.

#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/Storage.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/python_variable.h>

#include <utility>

namespace slipstream {

namespace py = pybind11;

// In the order of `Residence` in storage.py.
enum class Residence { DEVICE, OFFLOADING, STAYS, HOST, HELD_OUTSIDE, RELOADING, RELOADED };
constexpr int kNumResidences = 7;

// In the order of `GroupState` in group.py.
enum class GroupState { OPEN, COMMITTED, IN_USE, DONE };
constexpr int kNumGroupStates = 4;

// In the order of `Staying` in staying.py, whose members C++ does not need otherwise.
enum class Staying {
  SMALL, PARAMETER, SUBCLASS, NESTED, NOT_DENSE, ELSEWHERE, LAZY, DUAL, MARKED, EMPTY, DISCARDED
};

// Set once, when the module is loaded. Never freed: storages may outlive Python's modules.
struct Python {
  py::object residences[kNumResidences], group_states[kNumGroupStates];
  py::object bytes, empty_if_hidden, refill, parameter, size_class_bytes, host_memory_full;
  py::object group_key, group_label, step;
  // Members of `StepKind`: the marks of a group, and the two other marks that C++ distinguishes.
  py::object forward_start, forward_commit, backward_use, backward_end;
  py::object output_start, backward_start;
  // Names of the marks outside groups.
  py::object output_layer, backward;
};
inline Python* python = nullptr;

inline py::object wrap(c10::Storage storage) {
  return py::reinterpret_steal<py::object>(THPStorage_Wrap(std::move(storage)));
}

inline py::object wrap(at::Tensor tensor) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(tensor)));
}

// Whether `object` is exactly a `torch.Tensor`, not of a subclass.
inline bool is_torch_tensor(const py::object& object) {
  return reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())) == THPVariableClass;
}

inline bool is_same(const py::object& left, const py::object& right) {
  if (left.ptr() == right.ptr()) return true;
  const int same = PyObject_RichCompareBool(left.ptr(), right.ptr(), Py_EQ);
  if (same < 0) throw py::error_already_set();
  return same == 1;
}

template <size_t count>
int index_in(const py::object (&members)[count], const py::object& member) {
  for (size_t index = 0; index < count; ++index) {
    if (members[index].ptr() == member.ptr()) return static_cast<int>(index);
  }
  throw py::type_error(std::string(py::repr(member)) + " is no state");
}

// Returns `object.name`, without creating a string for the name each time.
inline py::object attribute(const py::handle& object, PyObject* name) {
  PyObject* value = PyObject_GetAttr(object.ptr(), name);
  if (value == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(value);
}

inline void set_attribute(const py::handle& object, PyObject* name, const py::object& value) {
  if (PyObject_SetAttr(object.ptr(), name, value.ptr()) != 0) throw py::error_already_set();
}

#define SLIPSTREAM_NAME(name)                                       \
  [] {                                                              \
    static PyObject* const interned = PyUnicode_InternFromString(name); \
    return interned;                                                \
  }()
#define GET(object, name) ::slipstream::attribute(object, SLIPSTREAM_NAME(name))

// Returns the C++ object inside a pybind11 object of this class; null before it is constructed. A
// cast takes as long as the work of a mark.
template <typename T>
T* constructed(PyObject* object) {
  const auto* instance = reinterpret_cast<py::detail::instance*>(object);
  return instance->simple_layout ? static_cast<T*>(instance->simple_value_holder[0]) : nullptr;
}

inline std::string name_of(const py::object& member) { return py::str(member.attr("name")); }

}  // namespace slipstream
