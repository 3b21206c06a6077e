// Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

// Participation of pybind11 objects in Python's garbage collection. Without it a reference cycle
// through a C++ object is never freed: the backend that a store holds refers to the models, and
// these to the engine that holds the store.

#pragma once

#include <utility>
#include <vector>

#include "python.h"

namespace slipstream {

// Makes the objects of a class visible to the garbage collector. `T::references(visit)` calls
// `visit` with each Python reference that belongs to this object alone.
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

}  // namespace slipstream
