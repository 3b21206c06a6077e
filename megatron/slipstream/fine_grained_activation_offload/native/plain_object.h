// Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

// Python objects created through CPython's own API. Creating one through pybind11, which registers
// it in a table by its C++ pointer, takes as long as all other work for a saved tensor.

#pragma once

#include <torch/csrc/Exceptions.h>

#include "python.h"

namespace slipstream {

// Runs `function`, which returns a new reference. Sets exceptions as Python's, and returns null.
template <typename Function>
PyObject* guarded(const Function& function) {
  HANDLE_TH_ERRORS
  try {
    return function();
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  }
  END_HANDLE_TH_ERRORS
}

template <typename Fields>
class PlainObject {
 public:
  using Call = PyObject* (*)(Fields&, PyObject* const*, size_t);

  // Creates the type. `call` implements calls of its objects; null if they are not callable.
  static void make_type(const char* name, PyGetSetDef* attributes, Call call = nullptr) {
    call_ = call;
    PyMemberDef members[] = {
        {"__vectorcalloffset__", Py_T_PYSSIZET, offsetof(Layout, vectorcall), Py_READONLY, nullptr},
        {nullptr, 0, 0, 0, nullptr}};
    static PyGetSetDef none[] = {{nullptr, nullptr, nullptr, nullptr, nullptr}};
    PyType_Slot slots[] = {
        {Py_tp_dealloc, reinterpret_cast<void*>(&deallocate)},
        {Py_tp_getset, attributes == nullptr ? none : attributes},
        {call == nullptr ? 0 : Py_tp_call, reinterpret_cast<void*>(&PyVectorcall_Call)},
        {Py_tp_members, members},
        {0, nullptr}};
    unsigned int flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION;
    if (call != nullptr) flags |= Py_TPFLAGS_HAVE_VECTORCALL;
    PyType_Spec spec{name, sizeof(Layout), 0, flags, slots};
    type_ = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
    if (type_ == nullptr) throw py::error_already_set();
  }

  static py::object type() {
    return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(type_));
  }

  static bool is(PyObject* object) { return Py_TYPE(object) == type_; }

  static Fields& of(PyObject* object) { return reinterpret_cast<Layout*>(object)->fields; }

  static py::object make(Fields fields) {
    auto* object = PyObject_New(Layout, type_);
    if (object == nullptr) throw py::error_already_set();
    object->vectorcall = &run;
    new (&object->fields) Fields(std::move(fields));
    return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(object));
  }

 private:
  struct Layout {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    Fields fields;
  };

  static PyObject* run(PyObject* self, PyObject* const* arguments, size_t flags, PyObject*) {
    return guarded([&] { return call_(of(self), arguments, PyVectorcall_NARGS(flags)); });
  }

  static void deallocate(PyObject* self) {
    of(self).~Fields();
    PyTypeObject* type = Py_TYPE(self);
    PyObject_Free(self);
    Py_DECREF(type);
  }

  static inline PyTypeObject* type_ = nullptr;
  static inline Call call_ = nullptr;
};

}  // namespace slipstream
