// The native half of `mooncache bench transfer` for Python: one call runs one measurement without the GIL;
// and what `mooncache doctor rdma` asks of libibverbs itself.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "calls.h"
#include "module.h"
#include "mooncache/probe.h"
#include "rdma/fabric.h"
#include "rdma_arguments.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mooncache::python {
namespace {

bool set_probe_field(const std::string& name, nb::handle value, ProbeOptions& options) {
  if (name == "transport") return nb::try_cast(value, options.transport);
  if (name == "tcp_host") return nb::try_cast(value, options.peer.tcp_host);
  if (name == "tcp_port") return nb::try_cast(value, options.peer.tcp_port);
  if (name == "unix_path") return nb::try_cast(value, options.peer.unix_path);
  if (name == "block_bytes") return nb::try_cast(value, options.block_bytes);
  if (name == "batch") return nb::try_cast(value, options.batch);
  if (name == "threads") return nb::try_cast(value, options.threads);
  if (name == "duration_ms") return nb::try_cast(value, options.duration_ms);
  if (name == "warm_up_batches") return nb::try_cast(value, options.warm_up_batches);
  if (name == "continuous") return nb::try_cast(value, options.continuous);
  if (name == "verify") return nb::try_cast(value, options.verify);
  if (name == "write") {
    bool write = false;
    if (!nb::try_cast(value, write)) return false;
    options.direction = write ? Direction::kWrite : Direction::kRead;
    return true;
  }
  if (name == "token") {
    std::string token;
    if (!nb::try_cast(value, token)) return false;
    options.peer.credentials = value_or_raise(credentials_from_token(token));
    return true;
  }
  return set_rdma_field(name, value, options.rdma);
}

nb::dict transfer_probe(const nb::dict& values) {
  ProbeOptions options;
  for (const auto& [key, value] : values) {
    const auto name = nb::cast<std::string>(key);
    if (!set_probe_field(name, value, options))
      refuse(name + " is no setting of the transfer benchmark, or has the wrong type");
  }
  const ProbeResult result = value_or_raise(without_gil([&] { return probe_transfers(options); }));
  nb::dict out;
  out["bytes"] = result.bytes;
  out["seconds"] = result.seconds;
  out["cpu_seconds"] = result.cpu_seconds;
  out["batch_us"] = result.batch_us;
  return out;
}

nb::list rdma_ports(const nb::dict& values) {
  RdmaConfig config;
  for (const auto& [key, value] : values) {
    const auto name = nb::cast<std::string>(key);
    if (!set_rdma_field(name, value, config)) refuse(name + " is no setting of RDMA");
  }
  const auto found = value_or_raise(without_gil([&] { return rdma::look_for_rails(config); }));
  nb::list out;
  for (const rdma::RailReport& report : found) {
    nb::dict port;
    port["device"] = report.info.device;
    port["port"] = report.info.port;
    port["usable"] = report.usable;
    port["reason"] = report.reason;
    port["gpu_direct"] = report.gpu_direct;
    out.append(port);
  }
  return out;
}

}  // namespace

void bind_probe(nb::module_& m) {
  m.def("rdma_ports", &rdma_ports, "settings"_a,
        "The RDMA ports as libibverbs shows them: device, port, usable, reason (why not), gpu_direct (how it "
        "would "
        "reach GPU memory, and why not better). Raises RuntimeError(code, name, message).");
  m.def("transfer_probe", &transfer_probe, "options"_a,
        "One measurement of a transport against a node: bytes, seconds, cpu_seconds of the moving threads, "
        "batch_us of each batch. Raises RuntimeError(code, name, message).");
}

}  // namespace mooncache::python
