// Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

// Callbacks at points of the autograd graph, without Python functions in the graph.

#pragma once

#include <c10/util/intrusive_ptr.h>

#include <functional>
#include <type_traits>

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/utils.h>

#include "python.h"

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

}  // namespace slipstream
