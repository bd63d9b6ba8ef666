// The native half of `mooncache bench transfer` for Python: one call runs one measurement without the GIL;
// and what `mooncache doctor rdma` asks of libibverbs itself.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "calls.h"
#include "module.h"
#include "mooncache/probe.h"
#include "rdma/choose.h"
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
      refuse(name + " is not a setting of the transfer benchmark, or has the wrong type");
  }
  const ProbeResult result = value_or_raise(without_gil([&] { return probe_transfers(options); }));
  nb::dict out;
  out["bytes"] = result.bytes;
  out["seconds"] = result.seconds;
  out["cpu_seconds"] = result.cpu_seconds;
  out["batch_us"] = result.batch_us;
  return out;
}

constexpr std::string_view kInfinibandName = "InfiniBand";
constexpr std::string_view kRoceV2Name = "RoCE v2";

std::string_view layer_name(rdma::LinkLayer layer) {
  return layer == rdma::LinkLayer::kInfiniband ? kInfinibandName : kRoceV2Name;
}

nb::list rdma_ports(const nb::dict& values) {
  RdmaConfig config;
  for (const auto& [key, value] : values) {
    const auto name = nb::cast<std::string>(key);
    if (!set_rdma_field(name, value, config)) refuse(name + " is not a setting of RDMA");
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
    port["link_layer"] = layer_name(report.info.layer);
    port["gid"] = report.usable ? rdma::gid_text(report.info.gid) : "";
    port["gid_index"] = report.info.gid_index;
    port["gid_reason"] = report.info.gid_reason;
    port["mtu_bytes"] = report.info.mtu == 0 ? 0 : 128u << report.info.mtu;
    port["megabits_per_s"] = report.info.megabits_per_s;
    out.append(port);
  }
  return out;
}

// A rail as another host described it: it can be chosen, not used.
class TakenDown final : public rdma::Rail {
 public:
  explicit TakenDown(rdma::RailInfo info) : info_(std::move(info)) {}
  const rdma::RailInfo& info() const override { return info_; }
  bool up() const override { return true; }
  Result<std::unique_ptr<rdma::Domain>> make_domain() override {
    return {Code::kTransportUnavailable, "RDMA unavailable, because this rail is on another host"};
  }

 private:
  const rdma::RailInfo info_;
};

// (link layer, GID of 16 bytes)
rdma::RailInfo to_rail(nb::handle described) {
  rdma::RailInfo info;
  const auto [layer, gid] = nb::cast<std::pair<std::string, nb::bytes>>(described);
  if (gid.size() != info.gid.size()) refuse("a GID has 16 bytes");
  if (layer != kInfinibandName && layer != kRoceV2Name) refuse("a link layer is InfiniBand or RoCE v2");
  info.layer = layer == kInfinibandName ? rdma::LinkLayer::kInfiniband : rdma::LinkLayer::kRoceV2;
  std::memcpy(info.gid.data(), gid.c_str(), info.gid.size());
  return info;
}

rdma::GidKind to_kind(const std::string& name) {
  if (name == kInfinibandName) return rdma::GidKind::kInfiniband;
  return name == kRoceV2Name ? rdma::GidKind::kRoceV2 : rdma::GidKind::kRoceV1;
}

// (usable, index in the port's table, why this one or why none)
nb::tuple rdma_address(const std::string& layer, const nb::list& table, int wanted) {
  rdma::RailInfo info;
  info.layer = layer == kInfinibandName ? rdma::LinkLayer::kInfiniband : rdma::LinkLayer::kRoceV2;
  std::vector<rdma::GidEntry> entries;
  for (const nb::handle item : table) {
    const auto [index, kind, gid] = nb::cast<std::tuple<uint32_t, std::string, nb::bytes>>(item);
    rdma::GidEntry& entry = entries.emplace_back(rdma::GidEntry{{}, index, to_kind(kind)});
    if (gid.size() != entry.gid.size()) refuse("a GID has 16 bytes");
    std::memcpy(entry.gid.data(), gid.c_str(), entry.gid.size());
  }
  std::string why;
  const bool usable = rdma::choose_gid(entries, wanted, info, why);
  return nb::make_tuple(usable, info.gid_index, usable ? info.gid_reason : why);
}

std::string rdma_distance(const std::pair<std::string, int>& one, const std::pair<std::string, int>& other) {
  return rdma::distance_name(
      rdma::distance(rdma::PciPlace{one.first, one.second}, rdma::PciPlace{other.first, other.second}));
}

std::vector<size_t> rdma_order(const std::vector<std::pair<uint64_t, bool>>& rails) {
  std::vector<rdma::RailLoad> loads;
  for (const auto& [megabits_per_s, far] : rails) {
    rdma::RailLoad& load = loads.emplace_back();
    load.megabits_per_s = megabits_per_s;
    load.far = far;
  }
  return rdma::order_rails(loads, 0);
}

std::optional<size_t> rdma_answer(const nb::list& rails, nb::handle peer, const std::vector<uint32_t>& used) {
  std::vector<std::shared_ptr<rdma::Rail>> ours;
  for (const nb::handle rail : rails) ours.push_back(std::make_shared<TakenDown>(to_rail(rail)));
  if (used.size() != ours.size()) refuse("each rail needs the number of its users");
  const rdma::RailInfo theirs = to_rail(peer);
  rdma::EndpointAddress address;
  address.gid = theirs.gid;
  address.layer = theirs.layer;
  const size_t chosen = rdma::choose_rail(ours, address, used);
  if (chosen == SIZE_MAX) return std::nullopt;
  return chosen;
}

}  // namespace

void bind_probe(nb::module_& m) {
  m.def("rdma_ports", &rdma_ports, "settings"_a,
        "The RDMA ports as a client or node with these settings sees them: device, port, usable, reason (why "
        "not), link_layer, gid, gid_index, gid_reason, mtu_bytes, megabits_per_s, gpu_direct (how it would "
        "reach GPU memory, and why not better). Raises RuntimeError(code, name, message).");
  m.def("rdma_address", &rdma_address, "link_layer"_a, "table"_a, "wanted"_a,
        "Which address of a port is used: [(index, kind, GID)] -> (usable, index, why this one or why none). "
        "Kinds: InfiniBand, RoCE v1, RoCE v2; `wanted`: only this index, -1 = any.");
  m.def("rdma_distance", &rdma_distance, "one"_a, "other"_a,
        "How far apart two PCI devices (path from the host bridge down, NUMA node or -1) are: PIX, PXB, PHB, "
        "NODE, SYS, UNKNOWN.");
  m.def("rdma_order", &rdma_order, "rails"_a,
        "Positions of the rails (Mbit/s, far from the memory) in the order in which a client that is idle "
        "takes them for a connection.");
  m.def("rdma_answer", &rdma_answer, "rails"_a, "peer"_a, "used"_a,
        "Position of the rail (link layer, GID) that a node answers the peer's with; `used`: how much each "
        "has to do already. None: none reaches it.");
  m.def("transfer_probe", &transfer_probe, "options"_a,
        "One measurement of a transport against a node: bytes, seconds, cpu_seconds of the moving threads, "
        "batch_us of each batch. Raises RuntimeError(code, name, message).");
}

}  // namespace mooncache::python
