// TransferEngine for Python: arguments to ranges, buffers held while bytes of them move.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <vector>

#include "buffer_view.h"
#include "calls.h"
#include "module.h"
#include "mooncache/transfer_engine.h"

namespace nb = nanobind;

namespace mooncache::python {

namespace {

using Grants = std::vector<std::tuple<std::string, uint64_t, uint64_t, bool, bool>>;

// A transfer, and the Python buffers that it moves. Gone only when no byte of them moves.
class HeldTransfer {
 public:
  HeldTransfer(std::shared_ptr<EngineTransfer> transfer, std::vector<std::unique_ptr<BufferView>> buffers)
      : transfer_(std::move(transfer)), buffers_(std::move(buffers)) {}
  ~HeldTransfer() {
    if (!transfer_->done()) without_gil([this] { transfer_->cancel(); });
  }
  HeldTransfer(const HeldTransfer&) = delete;
  HeldTransfer& operator=(const HeldTransfer&) = delete;

  EngineTransfer& transfer() { return *transfer_; }
  void let_go() {
    if (transfer_->done()) buffers_.clear();
  }

 private:
  std::shared_ptr<EngineTransfer> transfer_;
  std::vector<std::unique_ptr<BufferView>> buffers_;
};

EngineGrant to_grant(const std::string& peer, uint64_t offset, uint64_t length, bool read, bool write) {
  return {peer, offset, length, read, write};
}

std::vector<EngineGrant> to_grants(nb::list grants) {
  std::vector<EngineGrant> all;
  for (const nb::handle item : grants) {
    const auto grant = nb::cast<nb::tuple>(item);
    all.push_back(to_grant(nb::cast<std::string>(grant[0]), nb::cast<uint64_t>(grant[1]),
                           nb::cast<uint64_t>(grant[2]), nb::cast<bool>(grant[3]), nb::cast<bool>(grant[4])));
  }
  return all;
}

std::unique_ptr<TransferEngine> open_engine(const std::string& name, const nb::bytes& key,
                                            const nb::bytes& secret, const std::string& host_id,
                                            const std::string& tcp_host, uint16_t tcp_port,
                                            const std::string& advertised_host, const std::string& unix_path,
                                            bool shared_memory, const std::string& tls_cert,
                                            const std::string& tls_key, const std::string& tls_ca,
                                            double progress_timeout_s) {
  EngineConfig config;
  if (key.size() != config.credentials.key.size()) refuse("key has 32 bytes");
  std::memcpy(config.credentials.key.data(), key.c_str(), key.size());
  config.credentials.tenant = name;
  config.credentials.client_name = name;
  config.host_id = host_id;
  config.listens = secret.size() != 0;
  if (config.listens) {
    if (secret.size() != config.secret.size()) refuse("secret has 32 bytes, or none");
    std::memcpy(config.secret.data(), secret.c_str(), secret.size());
  }
  config.tcp_host = tcp_host;
  config.tcp_port = tcp_port;
  config.advertised_host = advertised_host;
  config.unix_path = unix_path;
  config.use_shared_memory = shared_memory;
  config.tls_cert = tls_cert;
  config.tls_key = tls_key;
  config.peer_tls.ca_file = tls_ca;
  config.peer_tls.enabled = !tls_ca.empty();
  if (!(progress_timeout_s > 0 && progress_timeout_s < 4e6))
    refuse("progress_timeout_s must be a number of seconds, more than 0");
  config.progress_timeout_ms = static_cast<uint32_t>(progress_timeout_s * 1000);
  return value_or_raise(without_gil([&] { return TransferEngine::open(std::move(config)); }));
}

std::unique_ptr<HeldTransfer> submit(EnginePeer& peer, bool write, nb::list copies, double timeout_s) {
  std::vector<RangeCopy> ranges;
  std::vector<std::unique_ptr<BufferView>> buffers;
  ranges.reserve(nb::len(copies));
  for (const nb::handle item : copies) {
    const auto copy = nb::cast<nb::tuple>(item);
    if (copy.size() != 3) refuse("a range is (local, remote address, bytes)");
    RangeCopy range;
    range.remote = nb::cast<uint64_t>(copy[1]);
    range.bytes = nb::cast<uint64_t>(copy[2]);
    if (nb::isinstance<nb::int_>(copy[0])) {
      range.local = reinterpret_cast<std::byte*>(nb::cast<uintptr_t>(copy[0]));  // NOLINT
    } else {
      auto view = std::make_unique<BufferView>(copy[0], write ? PyBUF_SIMPLE : PyBUF_WRITABLE);
      if (view->size() < range.bytes) refuse("a local buffer is shorter than its range");
      range.local = const_cast<std::byte*>(view->bytes().data());  // NOLINT
      buffers.push_back(std::move(view));
    }
    ranges.push_back(range);
  }
  const Deadline deadline = deadline_in(timeout_s);
  auto transfer = value_or_raise(without_gil([&] {
    return peer.submit(write ? Direction::kWrite : Direction::kRead, std::move(ranges), deadline);
  }));
  return std::make_unique<HeldTransfer>(std::move(transfer), std::move(buffers));
}

using Region = nb::typed<nb::tuple, uint64_t, uint64_t, bool, bool, bool, nb::str>;

nb::typed<nb::list, Region> regions(const EnginePeer& peer) {
  nb::list list;
  for (const DescribedMemory& region : peer.regions())
    list.append(nb::make_tuple(region.base, region.size, region.readable, region.writable, region.mappable,
                               region.label));
  return list;
}

uint64_t register_memory(TransferEngine& engine, uint64_t address, uint64_t bytes, const std::string& label,
                         nb::list grants, uint64_t base) {
  const auto wanted = to_grants(grants);
  auto* const data = reinterpret_cast<std::byte*>(static_cast<uintptr_t>(address));  // NOLINT
  return value_or_raise(engine.register_memory({data, static_cast<size_t>(bytes)}, label, wanted, base));
}

std::unique_ptr<AllocatedMemory> allocate(TransferEngine& engine, uint64_t bytes, const std::string& label,
                                          nb::list grants) {
  const auto wanted = to_grants(grants);
  return std::make_unique<AllocatedMemory>(
      value_or_raise(without_gil([&] { return engine.allocate(bytes, label, wanted); })));
}

// Views of the memory keep the Python object, and so the memory.
int lend_memory(PyObject* self, Py_buffer* view, int flags) {
  const AllocatedMemory& memory = *nb::inst_ptr<AllocatedMemory>(self);
  return PyBuffer_FillInfo(view, self, memory.memory.data, static_cast<Py_ssize_t>(memory.memory.size), 0,
                           flags);
}
PyType_Slot memory_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(&lend_memory)}, {0, nullptr}};

using Notices = nb::typed<nb::list, nb::typed<nb::tuple, nb::str, nb::bytes>>;

Notices notifications(TransferEngine& engine, size_t most, double timeout_s) {
  const Deadline deadline = deadline_in(timeout_s);
  nb::list list;
  for (const auto& notice : without_gil([&] { return engine.notifications(most, deadline); }))
    list.append(nb::make_tuple(notice.peer, to_bytes(notice.bytes)));
  return list;
}

std::shared_ptr<EnginePeer> connect(TransferEngine& engine, const nb::bytes& descriptor, double timeout_s) {
  const Deadline deadline = deadline_in(timeout_s);
  const std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(descriptor.c_str()),  // NOLINT
                                         descriptor.size());
  return value_or_raise(without_gil([&] { return engine.connect(bytes, deadline); }));
}

std::shared_ptr<EnginePeer> connect_to(TransferEngine& engine, const std::string& host, uint16_t port,
                                       double timeout_s) {
  const Deadline deadline = deadline_in(timeout_s);
  return value_or_raise(without_gil([&] { return engine.connect(host, port, deadline); }));
}

void bind_transfers(nb::module_& m) {
  m.def(
      "address_of",
      [](nb::handle buffer) {
        const BufferView view(buffer);
        return reinterpret_cast<uintptr_t>(view.bytes().data());  // NOLINT
      },
      nb::arg("buffer"), "Where a buffer lies; it is the caller's to keep it.");
  nb::class_<AllocatedMemory>(m, "AllocatedMemory", nb::type_slots(memory_slots),
                              "Memory of an engine, as a writable buffer; mapped as long as anyone has it.")
      .def_ro("base", &AllocatedMemory::base)
      .def("__len__", [](const AllocatedMemory& self) { return self.memory.size; });
  nb::class_<HeldTransfer>(m, "EngineTransfer", "A batch of ranges on its way.")
      .def(
          "wait",
          [](HeldTransfer& self, double timeout_s) {
            const Deadline deadline = deadline_in(timeout_s);
            const Status status = without_gil([&] { return self.transfer().wait(deadline); });
            self.let_go();
            check(status);
          },
          nb::arg("timeout_s"))
      .def("cancel",
           [](HeldTransfer& self) {
             without_gil([&] { self.transfer().cancel(); });
             self.let_go();
           })
      .def("done", [](HeldTransfer& self) { return self.transfer().done(); })
      .def("route", [](HeldTransfer& self) { return self.transfer().route(); });
  nb::class_<EnginePeer>(m, "EnginePeer", "A connection to one engine.")
      .def("name", &EnginePeer::name)
      .def("regions", &regions, "-> [(base, bytes, readable, writable, mappable, label)]")
      .def(
          "refresh",
          [](EnginePeer& self, double timeout_s) {
            const Deadline deadline = deadline_in(timeout_s);
            check(without_gil([&] { return self.refresh(deadline); }));
          },
          nb::arg("timeout_s"))
      .def("submit", &submit, nb::arg("write"), nb::arg("copies"), nb::arg("timeout_s"),
           "copies: [(buffer or local address, remote address, bytes)]")
      .def(
          "notify",
          [](EnginePeer& self, nb::handle bytes, double timeout_s) {
            const BufferView view(bytes);
            const Deadline deadline = deadline_in(timeout_s);
            check(without_gil([&] { return self.notify(view.bytes(), deadline); }));
          },
          nb::arg("bytes"), nb::arg("timeout_s"))
      .def("close", &EnginePeer::close, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace

void bind_transfer(nb::module_& m) {
  bind_transfers(m);
  nb::class_<TransferEngine>(m, "TransferEngine", "Memory that peers read and write in batches of ranges.")
      .def(nb::new_(&open_engine), nb::arg("name"), nb::arg("key"), nb::arg("secret"), nb::arg("host_id"),
           nb::arg("tcp_host"), nb::arg("tcp_port"), nb::arg("advertised_host"), nb::arg("unix_path"),
           nb::arg("shared_memory"), nb::arg("tls_cert"), nb::arg("tls_key"), nb::arg("tls_ca"),
           nb::arg("progress_timeout_s"))
      .def("register_memory", &register_memory, nb::arg("address"), nb::arg("bytes"), nb::arg("label"),
           nb::arg("grants"), nb::arg("base") = 0, "-> base; grants: [(peer, offset, bytes, read, write)]")
      .def("allocate", &allocate, nb::arg("bytes"), nb::arg("label"), nb::arg("grants"),
           "-> memory; its base is its address for peers")
      .def(
          "unregister",
          [](TransferEngine& self, uint64_t base, double timeout_s) {
            const Deadline deadline = deadline_in(timeout_s);
            check(without_gil([&] { return self.unregister(base, deadline); }));
          },
          nb::arg("base"), nb::arg("timeout_s"))
      .def(
          "grant",
          [](TransferEngine& self, uint64_t base, const std::string& peer, uint64_t offset, uint64_t bytes,
             bool read, bool write) { check(self.grant(base, to_grant(peer, offset, bytes, read, write))); },
          nb::arg("base"), nb::arg("peer"), nb::arg("offset"), nb::arg("bytes"), nb::arg("read"),
          nb::arg("write"))
      .def(
          "revoke",
          [](TransferEngine& self, uint64_t base, const std::string& peer, double timeout_s) {
            const Deadline deadline = deadline_in(timeout_s);
            check(without_gil([&] { return self.revoke(base, peer, deadline); }));
          },
          nb::arg("base"), nb::arg("peer"), nb::arg("timeout_s"))
      .def(
          "describe",
          [](const TransferEngine& self, const std::string& peer) {
            return to_bytes(value_or_raise(self.describe(peer)));
          },
          nb::arg("peer") = "")
      .def("connect", &connect, nb::arg("descriptor"), nb::arg("timeout_s"))
      .def("connect_to", &connect_to, nb::arg("host"), nb::arg("port"), nb::arg("timeout_s"))
      .def("tcp_port", &TransferEngine::tcp_port)
      .def("notifications", &notifications, nb::arg("most"), nb::arg("timeout_s"), "-> [(peer, bytes)]")
      .def("stats", &TransferEngine::stats, nb::call_guard<nb::gil_scoped_release>())
      .def("close", &TransferEngine::close, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace mooncache::python
