// Registered buffers and lent receive memory for Python. What holds the memory in place while a device may
// touch it is the buffer export: a bytearray cannot be resized, an mmap not closed, an array not freed before
// the export is given back, which happens after the registration ended. Memory of a GPU has no export: there
// the owner of the array is kept.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "client_arguments.h"
#include "client_buffers.h"

namespace mooncache::python {

namespace {

// A listed buffer; ends with close(), or with the object.
class BufferRegistration {
 public:
  BufferRegistration(nb::object client, nb::handle buffer) : owner_(std::move(client)) {
    if (PyObject_CheckBuffer(buffer.ptr()) == 0) {
      refuse(
          "expected an object with the buffer protocol, such as a NumPy array (of a host tensor: "
          "tensor.numpy()), not " +
          std::string(nb::type_name(buffer.type()).c_str()));
    }
    memory_ = export_.emplace().add(buffer, true);
    check(without_gil([&] { return client_().register_buffer(memory_); }));
    listed_ = true;
  }
  BufferRegistration(nb::object client, const std::shared_ptr<GpuDevice>& gpu, DeviceSlice memory,
                     nb::object array)
      : owner_(std::move(client)),
        array_(std::move(array)),
        memory_{reinterpret_cast<std::byte*>(memory.address), static_cast<size_t>(memory.size)} {
    check(without_gil([&] { return client_().register_device_buffer(gpu, memory); }));
    listed_ = true;
  }
  BufferRegistration(const BufferRegistration&) = delete;
  BufferRegistration& operator=(const BufferRegistration&) = delete;
  ~BufferRegistration() { close(); }

  size_t size() const { return memory_.size; }
  void attach() {
    check(without_gil([&] {
      return listed_ ? client_().attach_buffer(memory_) : Status{Code::kClosed, "it is closed"};
    }));
  }
  void close() {
    if (!std::exchange(listed_, false)) return;  // the first to close it gives the export back, not before
    {
      const nb::gil_scoped_release released;  // may wait for another thread that registers it
      (void)client_().unregister_buffer(memory_);
    }
    export_.reset();
    array_.reset();
  }

 private:
  Client& client_() const { return *nb::inst_ptr<Client>(owner_); }

  nb::object owner_;
  std::optional<Buffers> export_;
  nb::object array_;
  Slice memory_;
  bool listed_ = false;
};

// Blocks of device memory: for each the (address, bytes) of its slices.
using DeviceBlocks = std::vector<std::vector<std::pair<uint64_t, uint64_t>>>;

template <typename Block, typename S>
struct DeviceBatch {
  std::vector<Key> keys;
  std::vector<std::vector<S>> slices;
  std::vector<Block> blocks;
  CallOptions options;

  DeviceBatch(nb::handle keys_in, const DeviceBlocks& from, const CallOptions& how)
      : keys(to_keys(keys_in)), slices(from.size()), blocks(from.size()), options(how) {
    if (keys.size() != from.size()) refuse("as many blocks as keys are needed");
    options.device_memory = true;
    for (size_t i = 0; i < from.size(); ++i) {
      for (const auto& [address, size] : from[i])
        slices[i].push_back({reinterpret_cast<std::byte*>(address), static_cast<size_t>(size)});
      blocks[i].key = keys[i];
      blocks[i].slices = slices[i];
    }
  }
};

PutAnswers put_device(Client& client, nb::handle keys, const DeviceBlocks& sources, uint32_t replicas,
                      double timeout_s, const CancelToken* cancel, std::optional<uint32_t> node,
                      std::optional<uint32_t> prefer_node) {
  CallOptions options = to_options(timeout_s, cancel, node);
  options.prefer_node = prefer_node;
  const DeviceBatch<PutBlock, ConstSlice> batch(keys, sources, options);
  std::vector<PutOutcome> outcomes(batch.blocks.size());
  check(interruptible([&] { return client.put(batch.blocks, replicas, batch.options, outcomes); }));
  return answers(outcomes);
}

GetAnswers get_device(Client& client, nb::handle keys, const DeviceBlocks& targets, double timeout_s,
                      const CancelToken* cancel, std::optional<uint32_t> node) {
  const DeviceBatch<GetBlock, Slice> batch(keys, targets, to_options(timeout_s, cancel, node));
  std::vector<GetOutcome> outcomes(batch.blocks.size());
  check(interruptible([&] { return client.get(batch.blocks, {}, batch.options, outcomes); }));
  return answers(outcomes);
}

int export_received(PyObject* self, Py_buffer* view, int flags) {
  const auto* received = nb::inst_ptr<Received>(self);
  return PyBuffer_FillInfo(view, self, received->lent->data(),
                           static_cast<Py_ssize_t>(received->lent->size()), 1, flags);
}

PyType_Slot received_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(&export_received)}, {0, nullptr}};

}  // namespace

void bind_buffers(nb::module_& m, nb::class_<Client>& client) {
  nb::class_<Received>(m, "ReceivedBlock", nb::type_slots(received_slots),
                       "A block in memory that the client lends, read-only; it goes back with the object.");
  nb::class_<BufferRegistration>(m, "Registration", "A buffer that devices may use in place, until close().")
      .def("close", &BufferRegistration::close,
           "Twice is harmless; a call that uses the buffer keeps it registered until it ends.")
      .def("attach", &BufferRegistration::attach,
           "Hand it to the devices now, to stay so until close(); raises why they cannot use it.")
      .def_prop_ro("size_bytes", &BufferRegistration::size);
  client.def(
      "register_buffer",
      [](nb::handle self, nb::handle buffer) {
        return std::make_unique<BufferRegistration>(nb::borrow(self), buffer);
      },
      nb::arg("buffer"));
  const auto cancel = nb::arg("cancel").none() = nb::none();
  const auto node = nb::arg("node").none() = nb::none();
  client
      .def(
          "register_device_buffer",
          [](nb::handle self, const std::shared_ptr<GpuDevice>& gpu, uint64_t address, uint64_t size,
             nb::object array) {
            return std::make_unique<BufferRegistration>(nb::borrow(self), gpu, DeviceSlice{address, size},
                                                        std::move(array));
          },
          nb::arg("gpu"), nb::arg("address"), nb::arg("size"), nb::arg("array"),
          "`array` is kept until the registration ends.")
      .def(
          "gpu_direct",
          [](const Client& self, const std::shared_ptr<GpuDevice>& gpu) {
            return without_gil([&] { return self.gpu_direct(gpu); });
          },
          nb::arg("gpu"), "How calls reach the memory of this GPU, empty before one tried.")
      .def("put_device", &put_device, nb::arg("keys"), nb::arg("sources"), nb::arg("replicas") = 1,
           nb::arg("timeout_s") = 30.0, cancel, node, nb::arg("prefer_node").none() = nb::none(),
           "As put, out of registered device memory only.")
      .def("get_device", &get_device, nb::arg("keys"), nb::arg("destinations"), nb::arg("timeout_s") = 30.0,
           cancel, node, "As get, into registered device memory only.");
}

}  // namespace mooncache::python
