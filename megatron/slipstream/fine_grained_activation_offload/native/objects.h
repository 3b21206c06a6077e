// Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

// Objects of C++ classes in Python: how they are created, counted, and freed.

#pragma once

#include <torch/csrc/Exceptions.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "python.h"

namespace slipstream {

// Counts the objects of a class, so that tests see those that are never freed.
template <typename T>
class Alive {
 public:
  Alive() { ++number_; }
  Alive(const Alive&) = delete;
  ~Alive() { --number_; }

  static int64_t number() { return number_; }

 private:
  static inline int64_t number_ = 0;
};

// Makes the objects of a class visible to Python's garbage collector. Without it a reference cycle
// through a C++ object is never freed: the backend that a store holds refers to the models, and
// these to the engine that holds the store. `T::references(visit)` calls `visit` with each Python
// reference that belongs to this object alone.
template <typename T>
py::custom_type_setup collected() {
  return py::custom_type_setup([](PyHeapTypeObject* heap_type) {
    PyTypeObject& type = heap_type->ht_type;
    type.tp_flags |= Py_TPFLAGS_HAVE_GC;
    type.tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
      Py_VISIT(Py_TYPE(self));
      int result = 0;
      if (T* object = constructed<T>(self)) {
        object->references([&](py::object& reference) {
          if (result == 0 && reference) result = visit(reference.ptr(), arg);
        });
      }
      return result;
    };
    type.tp_clear = [](PyObject* self) {
      // Freed only after all are replaced: freeing them runs other code.
      std::vector<py::object> cleared;
      if (T* object = constructed<T>(self)) {
        object->references([&](py::object& reference) {
          cleared.push_back(std::exchange(reference, py::none()));
        });
      }
      return 0;
    };
  });
}

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

// A Python object created through CPython's own API. Creating one through pybind11, which registers
// it in a table by its C++ pointer, takes as long as all other work for a saved tensor.
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
