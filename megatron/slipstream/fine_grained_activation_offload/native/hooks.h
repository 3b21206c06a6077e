// Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

// Callbacks in autograd: at points of its graph, without Python functions there; and the saved-tensor
// hooks of a group's region, with its entry and exit, of which regions.py is the reference.

#pragma once

#include <ATen/SavedTensorHooks.h>
#include <c10/util/intrusive_ptr.h>

#include <functional>
#include <type_traits>

#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/utils.h>

#include "store.h"

namespace slipstream {

// A callback that may hold Python objects. An autograd thread, which may not hold the GIL, may run
// or destroy it.
class Callback {
 public:
  explicit Callback(std::function<void()> function) : function_(std::move(function)) {}
  explicit Callback(py::object function)
      : function_([function = std::move(function)] { function(); }) {}
  Callback(Callback&&) = default;
  Callback& operator=(Callback&&) = delete;

  ~Callback() {
    if (!function_) return;
    py::gil_scoped_acquire gil;
    function_ = nullptr;
  }

  void operator()() const {
    py::gil_scoped_acquire gil;
    function_();
  }

 private:
  std::function<void()> function_;
};

// Runs a callback, then passes the gradients on.
class MarkNode : public torch::autograd::Node {
 public:
  explicit MarkNode(Callback callback) : callback_(std::move(callback)) {}

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    call(callback_);
    return std::move(gradients);
  }

  std::string name() const override { return "SlipstreamMark"; }

  static void call(const Callback& callback) {
    try {
      callback();
    } catch (py::error_already_set& error) {
      // The form in which autograd accepts Python errors from its own threads.
      py::gil_scoped_acquire gil;
      python_error persisted;
      error.restore();
      persisted.persist();
      throw persisted;
    }
  }

 private:
  Callback callback_;
};

class MarkHook : public torch::autograd::FunctionPreHook {
 public:
  explicit MarkHook(Callback callback) : callback_(std::move(callback)) {}

  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& gradients) override {
    MarkNode::call(callback_);
    return gradients;
  }

 private:
  Callback callback_;
};

// Runs the callback in backward once the gradient of the result of `node` is computed, before the
// hooks of `node`, like a tensor hook on that result.
inline void call_at_gradient(torch::autograd::Node& node, Callback callback) {
  node.add_tensor_pre_hook(std::make_unique<MarkHook>(std::move(callback)));
}

// Nodes are intrusively reference-counted in newer torch releases.
template <typename Node, typename... Arguments>
auto make_node(Arguments&&... arguments) {
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, Node>) {
    return c10::make_intrusive<Node>(std::forward<Arguments>(arguments)...);
  } else {
    return std::shared_ptr<Node>(new Node(std::forward<Arguments>(arguments)...),
                                 [](Node* node) { deleteNode(node); });
  }
}

// Returns `object`, a tensor, with a graph node that runs the callback when backward reaches it.
inline py::object mark(const py::object& object, Callback callback) {
  const at::Tensor& tensor = THPVariable_Unpack(object.ptr());
  if (!at::GradMode::is_enabled() || !tensor.requires_grad()) return object;
  auto node = make_node<MarkNode>(std::move(callback));
  node->set_next_edges(torch::autograd::collect_next_edges(tensor));
  // Shares the version counter, so that in-place changes are detected.
  auto marked = at::Tensor(tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(
      torch::autograd::impl::version_counter(tensor), /*allow_tensor_metadata_change=*/false));
  torch::autograd::set_history(marked, node);
  return wrap(std::move(marked));
}

// Runs the callback when backward reaches the operation that computed `object`, a tensor.
inline void call_before(const py::object& object, Callback callback) {
  const auto& node = THPVariable_Unpack(object.ptr()).grad_fn();
  if (node) node->add_pre_hook(std::make_unique<MarkHook>(std::move(callback)));
}

// Hooks hold the Python object that owns the store. Autograd owns the hooks, so the garbage
// collector cannot see cycles through them.
struct PackHook {
  py::object owner_of_store;
  Store* store;
  std::shared_ptr<Group> group;  // None if its saved tensors are not tracked.
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

  // Enters the region of the group that a mark in C++ started last. Appends to the entered
  // regions the flag's previous value, or None if the region has no hooks. Returns false, with no
  // effect, if Python must do it.
  static bool enter(const py::object& owner_of_store, Store& store, const py::object& engine,
                    const py::object& flag) {
    const auto group = std::exchange(store.started, nullptr);
    const auto active = at::SavedTensorDefaultHooks::get_hooks();
    if (active && !PackHookObject::is(active->first.ptr(getPyInterpreter()))) return false;
    group->untracked_in = std::exchange(store.kept_in, py::none());
    py::object before = py::none();
    const bool is_tracked = group->untracked_in.is_none();
    if (is_tracked || active) {  // else a tracked group around it would hold what it saves
      auto [pack, unpack] = hooks(owner_of_store, &store, is_tracked ? group : nullptr, engine);
      at::SavedTensorDefaultHooks::lazy_initialize();
      at::SavedTensorDefaultHooks::push_hooks(owned(std::move(pack)), owned(std::move(unpack)));
      before = flag.is_none() ? py::bool_(false) : attribute(item(flag, 0), item(flag, 1).ptr());
      if (is_tracked && before.ptr() == Py_False) set_flag(flag, group->name);
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

  // Sets the flag (a `RegionFlag`, or None) for the region of a group of that name.
  static void set_flag(const py::object& flag, const py::object& name) {
    if (flag.is_none() || PySet_Contains(item(flag, 2).ptr(), name.ptr()) != 0) return;
    set_attribute(item(flag, 0), item(flag, 1).ptr(), py::bool_(true));
  }
};

}  // namespace slipstream
