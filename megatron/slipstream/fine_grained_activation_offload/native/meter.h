// Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

// Counts the memory of a CPU that stands in for a device, as DeviceMemoryMeter in Python.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pybind11/pybind11.h>
#include <torch/library.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <thread>
#include <unordered_map>
#include <vector>

namespace slipstream {

namespace py = pybind11;

class Meter {
 public:
  Meter(double gloo_releases_s, int max_releases)
      : gloo_releases_s_(gloo_releases_s), max_releases_(max_releases) {}

  void enter() {
    listen();
    entered().push_back(this);
    c10::impl::tls_set_dispatch_key_included(kKey, true);
  }

  void exit() {
    auto& meters = entered();
    meters.erase(std::find(meters.begin(), meters.end(), this));
    c10::impl::tls_set_dispatch_key_included(kKey, !meters.empty());
  }

  int64_t allocated_bytes() {
    forget_freed();
    return allocated_bytes_;
  }

  int64_t peak_bytes() const { return peak_bytes_; }

  void reset_peak() { peak_bytes_ = allocated_bytes(); }

  void note_size(const c10::Storage& storage) {
    const auto found = live_.find(storage.unsafeGetStorageImpl());
    if (found == live_.end()) return;
    const auto num_bytes = static_cast<int64_t>(storage.nbytes());
    allocated_bytes_ += num_bytes - found->second.num_bytes;
    found->second.num_bytes = num_bytes;
    note_peak();
  }

 private:
  using Impl = c10::StorageImpl;

  struct Live {
    c10::weak_intrusive_ptr<Impl> storage;  // Its address is not used again, but its memory is.
    int64_t num_bytes;
  };

  // Operations arrive with this key where a TorchDispatchMode would see them. torch registers
  // nothing for it, and keeps it for a package that is no longer developed.
  static constexpr auto kKey = c10::DispatchKey::Fake;

  static std::vector<Meter*>& entered() {
    thread_local std::vector<Meter*> meters;
    return meters;
  }

  // Registers with the first meter: a process without one dispatches as if there were none.
  static void listen() {
    static torch::Library* library = nullptr;
    if (library != nullptr) return;
    library = new torch::Library(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
    library->fallback(torch::CppFunction::makeFromBoxedFunction<&Meter::call>());
  }

  static void call(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
    c10::impl::ExcludeDispatchKeyGuard without_operations_inside(kKey);
    const auto& schema = operation.schema();
    std::vector<const Impl*> given;
    each_storage(*stack, schema.arguments().size(), [&](const c10::Storage& storage) {
      given.push_back(storage.unsafeGetStorageImpl());
    });
    operation.callBoxed(stack);
    const bool communicates = operation.operator_name().name.compare(0, 6, "c10d::") == 0;
    for (Meter* meter : entered()) {
      meter->gloo_holds_ |= communicates;
      each_storage(*stack, schema.returns().size(), [&](const c10::Storage& storage) {
        // What existed before, or what no operation created, is never counted later.
        const Impl* const impl = storage.unsafeGetStorageImpl();
        if (std::find(given.begin(), given.end(), impl) == given.end()) meter->count(storage);
      });
    }
  }

  template <typename Visit>
  static void each_storage(const torch::jit::Stack& stack, size_t number, const Visit& visit) {
    for (auto value = stack.end() - static_cast<ptrdiff_t>(number); value != stack.end(); ++value) {
      each_storage(*value, visit);
    }
  }

  template <typename Visit>
  static void each_storage(const c10::IValue& value, const Visit& visit) {
    if (value.isTensor()) {
      const at::Tensor& tensor = value.toTensor();
      if (tensor.defined() && tensor.has_storage()) visit(tensor.storage());
    } else if (value.isStorage()) {
      visit(value.toStorage());
    } else if (value.isList()) {
      for (const c10::IValue& inner : value.toListRef()) each_storage(inner, visit);
    }
  }

  void count(const c10::Storage& storage) {
    const auto num_bytes = static_cast<int64_t>(storage.nbytes());
    Live live{storage.getWeakStorageImpl(), num_bytes};
    if (!live_.try_emplace(storage.unsafeGetStorageImpl(), std::move(live)).second) return;
    allocated_bytes_ += num_bytes;
    note_peak();
  }

  void note_peak() {
    if (allocated_bytes_ > peak_bytes_) forget_freed();
    if (allocated_bytes_ > peak_bytes_ && gloo_holds_) {
      wait_while_gloo_holds();
      gloo_holds_ = false;
    }
    peak_bytes_ = std::max(peak_bytes_, allocated_bytes_);
  }

  void wait_while_gloo_holds() {
    std::optional<py::gil_scoped_release> others_run;
    if (PyGILState_Check()) others_run.emplace();
    for (int release = 0; release < max_releases_ && allocated_bytes_ > peak_bytes_; ++release) {
      std::this_thread::sleep_for(std::chrono::duration<double>(gloo_releases_s_));
      forget_freed();
    }
  }

  // Only where the sum matters: to hear of each that is freed would take longer.
  void forget_freed() {
    for (auto entry = live_.begin(); entry != live_.end();) {
      if (!entry->second.storage.expired()) {
        ++entry;
        continue;
      }
      allocated_bytes_ -= entry->second.num_bytes;
      entry = live_.erase(entry);
    }
  }

  std::unordered_map<const Impl*, Live> live_;
  int64_t allocated_bytes_ = 0;  // With what has been freed since the last look.
  int64_t peak_bytes_ = 0;
  bool gloo_holds_ = false;
  double gloo_releases_s_;
  int max_releases_;
};

}  // namespace slipstream
