// Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

// The device calls of a `Backend` that each group needs, and the signals and waits between streams.
// `CudaDriver` calls the CUDA driver directly; `PythonDriver` calls the backend's methods, so it
// works with any backend. Of the signals, `Waits` in copy_streams.py is the reference.

#pragma once

#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <chrono>
#include <memory>
#include <optional>
#include <vector>

#include "objects.h"

namespace slipstream {

// Host time by kind of call, for benchmarks, since these calls cannot be timed from Python.
struct HostTime {
  enum Kind { AUTOGRAD, DRIVER };

  static inline bool is_taken = false;
  // In callbacks from autograd, and in calls to the device's driver and allocator.
  static inline int64_t nanoseconds[2] = {0, 0};

  explicit HostTime(Kind kind) : kind(kind) {
    if (is_taken) begin = std::chrono::steady_clock::now();
  }

  ~HostTime() {
    if (!is_taken) return;
    const auto passed = std::chrono::steady_clock::now() - begin;
    nanoseconds[kind] += std::chrono::duration_cast<std::chrono::nanoseconds>(passed).count();
  }

  const Kind kind;
  std::chrono::steady_clock::time_point begin;
};

// A stream that the engine uses. Streams are numbered in order of first use.
struct Stream {
  py::object id, object;
  void* handle = nullptr;
  // `stream_id` and `device_index` of the torch stream; CUDA only.
  int64_t number = 0;
  int64_t device = 0;
};

struct Event {
  py::object object;
  void* handle = nullptr;
};

struct Region {
  c10::Storage storage;
  int64_t start, nbytes;

  char* address() const { return static_cast<char*>(storage.mutable_data()) + start; }
  py::object bytes() const { return python->bytes(wrap(storage), start, nbytes); }
};

// `bytes` is a `Bytes` of backend.py, a tuple.
inline Region region_of(const py::handle& bytes) {
  const auto fields = py::reinterpret_borrow<py::tuple>(bytes);
  return {THPStorage_Unpack(py::object(fields[0]).ptr()), fields[1].cast<int64_t>(),
          fields[2].cast<int64_t>()};
}

// If one region is longer, only its first bytes are copied.
struct Copy {
  Region to, source;

  int64_t nbytes() const { return std::min(to.nbytes, source.nbytes); }
};

// Rows of the edge table in plan/edges.py: those whose waits C++ issues.
enum class Edge { NONE, E1, E2, E3, E4, E5, E6 };

class Driver {
 public:
  explicit Driver(py::object backend) : backend_(std::move(backend)) {}
  virtual ~Driver() = default;

  // Returns the number of the current stream.
  virtual int current() = 0;

  Event record(int stream) {
    const HostTime time(HostTime::DRIVER);
    return record_now(stream);
  }

  void wait(Edge edge, int stream, Event& event) {
    const HostTime time(HostTime::DRIVER);
    wait_now(edge, stream, event);
  }

  void copy(const std::vector<Copy>& copies, int stream) {
    const HostTime time(HostTime::DRIVER);
    copy_now(copies, stream);
  }

  c10::Storage allocate(int64_t nbytes, c10::Device device) {
    const HostTime time(HostTime::DRIVER);
    return allocate_now(nbytes, device);
  }

  // Returns the memory to its allocator, unless something else refers to it.
  void drop_device(c10::Storage memory) {
    const HostTime time(HostTime::DRIVER);
    drop_device_now(std::move(memory));
  }

  virtual void drop_host_contents(const std::vector<Copy>&, int) {}

  template <typename Visit>
  void references(const Visit& visit) {
    visit(backend_);
  }

  const Stream& stream(int number) const { return streams_[number]; }

  int number_of(const py::object& id) const {
    for (size_t number = 0; number < streams_.size(); ++number) {
      if (is_same(streams_[number].id, id)) return static_cast<int>(number);
    }
    return -1;
  }

  int add_stream(py::object id, py::object object) {
    const int known = number_of(id);
    if (known >= 0) return known;
    id.inc_ref();  // Never freed: see `Signal`.
    streams_.push_back({std::move(id), std::move(object)});
    prepare(streams_.back());
    return static_cast<int>(streams_.size()) - 1;
  }

 protected:
  virtual Event record_now(int stream) = 0;
  virtual void wait_now(Edge edge, int stream, Event& event) = 0;
  virtual void copy_now(const std::vector<Copy>& copies, int stream) = 0;
  virtual c10::Storage allocate_now(int64_t nbytes, c10::Device device) = 0;
  virtual void drop_device_now(c10::Storage memory) = 0;
  virtual void prepare(Stream&) {}

  py::object backend_;
  std::vector<Stream> streams_;
};

class PythonDriver : public Driver {
 public:
  using Driver::Driver;

  int current() override {
    const py::tuple here = backend_.attr("here")();
    const int known = number_of(here[0]);
    return known >= 0 ? known : add_stream(here[0], here[1]);
  }

  Event record_now(int stream) override {
    return {backend_.attr("record")(streams_[stream].object), nullptr};
  }

  void wait_now(Edge, int stream, Event& event) override {
    backend_.attr("wait")(streams_[stream].object, event.object);
  }

  void copy_now(const std::vector<Copy>& copies, int stream) override {
    backend_.attr("run_copies")(pairs(copies), streams_[stream].object);
  }

  void drop_host_contents(const std::vector<Copy>& copies, int stream) override {
    backend_.attr("drop_host_contents")(pairs(copies), streams_[stream].object);
  }

  c10::Storage allocate_now(int64_t nbytes, c10::Device device) override {
    const auto torch_device = py::reinterpret_steal<py::object>(THPDevice_New(device));
    const py::object memory = backend_.attr("allocate_device")(nbytes, torch_device);
    return THPStorage_Unpack(memory.ptr());
  }

  void drop_device_now(c10::Storage memory) override {
    // The Python object holds the engine's only remaining reference.
    const py::object object = wrap(std::move(memory));
    backend_.attr("drop_device")(object);
  }

 private:
  static py::list pairs(const std::vector<Copy>& copies) {
    py::list list;
    for (const auto& copy : copies) {
      list.append(py::make_tuple(copy.to.bytes(), copy.source.bytes()));
    }
    return list;
  }
};

// Functions of libcuda.so.1, looked up at run time so that compilation does not need CUDA.
struct CudaFunctions {
  int (*record)(void* event, void* stream);
  int (*wait)(void* stream, void* event, unsigned int flags);
  int (*copy)(uintptr_t to, uintptr_t source, size_t nbytes, void* stream);

  CudaFunctions() {
    void* library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    if (library == nullptr) throw std::runtime_error("libcuda.so.1 cannot be loaded");
    find(library, "cuEventRecord", record);
    find(library, "cuStreamWaitEvent", wait);
    find(library, "cuMemcpyAsync", copy);
  }

 private:
  template <typename Function>
  static void find(void* library, const char* name, Function*& function) {
    function = reinterpret_cast<Function*>(dlsym(library, name));
    if (function == nullptr) throw std::runtime_error(std::string("libcuda.so.1 has no ") + name);
  }
};

class CudaDriver : public Driver {
 public:
  explicit CudaDriver(py::object backend)
      : Driver(std::move(backend)),
        guard_(c10::DeviceType::CUDA) {}

  int current() override {
    const c10::Stream now = guard_.getStream(guard_.getDevice());
    for (size_t number = 0; number < streams_.size(); ++number) {
      const Stream& stream = streams_[number];
      if (stream.number == now.id() && stream.device == now.device_index()) {
        return static_cast<int>(number);
      }
    }
    const py::tuple here = backend_.attr("here")();
    return add_stream(here[0], here[1]);
  }

  // [Note: Events are reused] in cuda_backend.py.
  Event record_now(int stream) override {
    if (rings_.size() <= static_cast<size_t>(stream)) rings_.resize(stream + 1);
    Ring& ring = rings_[stream];
    if (ring.events.empty()) {
      const py::object make = py::module_::import("torch").attr("cuda").attr("Event");
      for (int count = 0; count < kEventsPerStream; ++count) {
        py::object event = make();
        event.attr("record")(streams_[stream].object);  // which creates it
        void* handle = PyLong_AsVoidPtr(py::object(event.attr("cuda_event")).ptr());
        ring.events.push_back({std::move(event), handle});
      }
    }
    const Event& event = ring.events[ring.next];
    ring.next = (ring.next + 1) % kEventsPerStream;
    check(cuda_.record(event.handle, streams_[stream].handle), "an event");
    return event;
  }

  void wait_now(Edge, int stream, Event& event) override {
    if (event.handle == nullptr) {
      event.handle = PyLong_AsVoidPtr(py::object(event.object.attr("cuda_event")).ptr());
    }
    check(cuda_.wait(streams_[stream].handle, event.handle, 0), "a wait");
  }

  void copy_now(const std::vector<Copy>& copies, int stream) override {
    for (const auto& copy : copies) {
      check(cuda_.copy(reinterpret_cast<uintptr_t>(copy.to.address()),
                       reinterpret_cast<uintptr_t>(copy.source.address()), copy.nbytes(),
                       streams_[stream].handle),
            "a copy");
    }
  }

  c10::Storage allocate_now(int64_t nbytes, c10::Device device) override {
    // From the current stream's pool: see `Backend.allocate_device`.
    auto* allocator = c10::GetAllocator(c10::DeviceType::CUDA);
    (void)device;  // Always the current device.
    return c10::Storage(c10::Storage::use_byte_size_t(), nbytes, allocator->allocate(nbytes),
                        allocator, /*resizable=*/true);
  }

  void drop_device_now(c10::Storage memory) override {
    if (GET(backend_, "poisons_dropped").ptr() == Py_True) {
      const py::object object = wrap(std::move(memory));
      backend_.attr("drop_device")(object);
    }
  }

 private:
  static constexpr int kEventsPerStream = 64;

  struct Ring {
    std::vector<Event> events;
    int next = 0;
  };

  void prepare(Stream& stream) override {
    stream.handle = PyLong_AsVoidPtr(py::object(stream.object.attr("cuda_stream")).ptr());
    stream.number = stream.object.attr("stream_id").cast<int64_t>();
    stream.device = stream.object.attr("device_index").cast<int64_t>();
  }

  static void check(int status, const char* what) {
    if (status != 0) {
      throw std::runtime_error(std::string("the CUDA driver refused ") + what + " with error " +
                               std::to_string(status));
    }
  }

  CudaFunctions cuda_;
  c10::impl::VirtualGuardImpl guard_;
  std::vector<Ring> rings_;
};

// A driver that leaves out the waits of one edge, for mutation tests. A subclass, so that no other
// driver tests for it.
template <typename Base>
class WithoutEdge : public Base {
 public:
  WithoutEdge(const py::object& backend, Edge edge) : Base(backend), left_out_(edge) {}

  void wait_now(Edge edge, int stream, Event& event) override {
    if (edge != left_out_) Base::wait_now(edge, stream, event);
  }

 private:
  const Edge left_out_;
};

template <typename Driver>
std::unique_ptr<Driver> make_driver_of(const py::object& backend, Edge left_out) {
  if (left_out == Edge::NONE) return std::make_unique<Driver>(backend);
  return std::make_unique<WithoutEdge<Driver>>(backend, left_out);
}

inline std::unique_ptr<Driver> make_driver(const py::object& backend, Edge left_out) {
  if (py::str(backend.attr("name")).cast<std::string>() == "cuda") {
    return make_driver_of<CudaDriver>(backend, left_out);
  }
  return make_driver_of<PythonDriver>(backend, left_out);
}

// A point in a stream that other streams can wait for.
struct Signal {
  Event event;
  // Never freed, so that copying a signal need not count references.
  PyObject* stream_id;
  int stream;
  int64_t position;
  int64_t graph;
};

class Waits {
 public:
  explicit Waits(const py::object& backend) : driver(make_driver(backend, left_out)) {}

  // The edge whose waits are left out from now on; set by mutation tests.
  static inline Edge left_out = Edge::NONE;

  template <typename Visit>
  void references(const Visit& visit) {
    driver->references(visit);
  }

  std::unique_ptr<Driver> driver;
  // The graph being captured; 0 if none.
  int64_t graph = 0;
  bool is_timed = false;

  // Whether nothing needs the Python path: no timing and no graph capture.
  bool is_plain() const { return graph == 0 && !is_timed; }

  Signal record(int stream) { return signal(driver->record(stream), stream); }

  Signal signal(Event event, int stream) {
    return {std::move(event), driver->stream(stream).id.ptr(), stream, next_position_++, graph};
  }

  // Returns whether `stream` must wait for `signal`; if so, records the wait.
  bool is_due(int stream, const Signal& signal) {
    if (signal.graph != graph) return false;
    const size_t pair = static_cast<size_t>(stream) * kMaxStreams + signal.stream;
    if (stream >= kMaxStreams || signal.stream >= kMaxStreams) return true;
    if (waited_.size() <= pair) waited_.resize(pair + 1, 0);
    if (waited_[pair] >= signal.position) return false;
    waited_[pair] = signal.position;
    return true;
  }

  void wait(Edge edge, int stream, Signal& signal) {
    if (!is_due(stream, signal)) return;
    try {
      driver->wait(edge, stream, signal.event);
    } catch (...) {
      forget();  // It may not have been issued.
      throw;
    }
  }

  // Adds `signal`, keeping only the latest signal of each stream and graph.
  static void add_latest(std::vector<Signal>& latest, const Signal& signal) {
    for (auto& known : latest) {
      if (known.stream == signal.stream && known.graph == signal.graph) {
        if (known.position < signal.position) known = signal;
        return;
      }
    }
    latest.push_back(signal);
  }

  void forget() { waited_.assign(waited_.size(), 0); }

 private:
  static constexpr int kMaxStreams = 64;

  int64_t next_position_ = 1;
  // The latest position waited for, by waiting and signaling stream: [Note: A wait covers what came
  // before].
  std::vector<int64_t> waited_;
};

}  // namespace slipstream
