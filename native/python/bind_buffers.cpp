// Registered buffers and lent receive memory for Python. What holds the memory in place while a device may
// touch it is the buffer export: a bytearray cannot be resized, an mmap not closed, an array not freed before
// the export is given back, which happens after the registration ended.
#include "client_arguments.h"
#include "client_buffers.h"

namespace mooncache::python {

namespace {

// A listed buffer; ends with close(), or with the object.
class Registration {
 public:
  Registration(nb::object client, nb::handle buffer) : owner_(std::move(client)) {
    if (PyObject_CheckBuffer(buffer.ptr()) == 0) {
      refuse(
          "expected an object with the buffer protocol, such as a NumPy array (of a host tensor: "
          "tensor.numpy()), not " +
          std::string(nb::type_name(buffer.type()).c_str()));
    }
    memory_ = export_.emplace().add(buffer, true);
    check(client_().register_buffer(memory_));
    listed_ = true;
  }
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;
  ~Registration() { close(); }

  size_t size() const { return memory_.size; }
  void close() {
    if (!std::exchange(listed_, false)) return;  // whoever closes it first gives the export back, not before
    {
      const nb::gil_scoped_release released;  // may wait for another thread that registers it
      (void)client_().unregister_buffer(memory_);
    }
    export_.reset();
  }

 private:
  Client& client_() const { return *nb::inst_ptr<Client>(owner_); }

  nb::object owner_;
  std::optional<Buffers> export_;
  Slice memory_;
  bool listed_ = false;
};

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
  nb::class_<Registration>(m, "Registration", "A buffer that devices may use in place, until close().")
      .def("close", &Registration::close,
           "Twice is harmless; a call that uses the buffer keeps it registered until it ends.")
      .def_prop_ro("size_bytes", &Registration::size);
  client.def(
      "register_buffer",
      [](nb::handle self, nb::handle buffer) {
        return std::make_unique<Registration>(nb::borrow(self), buffer);
      },
      nb::arg("buffer"));
}

}  // namespace mooncache::python
