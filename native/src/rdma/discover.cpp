// Which ports there are, which can be used, and why not the others.
#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>

#include "rdma/device.h"
#include "rdma/place.h"

namespace mooncache::rdma {

namespace {

constexpr uint32_t kMaxGids = 256;

uint64_t speed_of(const ibv_port_attr& port) {
  // active_speed is a bit per generation (lane rates in Mb/s), active_width a bit per width
  static constexpr std::pair<unsigned, uint64_t> kLanes[] = {{1, 2'500},   {2, 5'000},    {4, 10'000},
                                                             {8, 10'000},  {16, 14'000},  {32, 25'000},
                                                             {64, 50'000}, {128, 100'000}};
  uint64_t lane = 0;
  for (const auto& [bit, rate] : kLanes) {
    if ((port.active_speed & bit) != 0) lane = rate;
  }
  uint64_t width = 1;
  if ((port.active_width & 2) != 0) width = 4;
  if ((port.active_width & 4) != 0) width = 8;
  if ((port.active_width & 8) != 0) width = 12;
  if ((port.active_width & 16) != 0) width = 2;
  return lane * width;
}

GidKind kind_of(uint32_t type) {
  if (type == IBV_GID_TYPE_ROCE_V2) return GidKind::kRoceV2;
  return type == IBV_GID_TYPE_IB ? GidKind::kInfiniband : GidKind::kRoceV1;
}

}  // namespace

bool choose_gid(const VerbsDevice& device, const Options& options, uint32_t table_length, RailInfo& info,
                std::string& why) {
  std::vector<GidEntry> table;
  for (uint32_t index = 0; index < std::min(table_length, kMaxGids); ++index) {
    ibv_gid_entry entry{};
    if (device.verbs.query_gid_ex(device.context, info.port, index, &entry, 0, sizeof entry) != 0) continue;
    GidEntry& one = table.emplace_back(GidEntry{{}, entry.gid_index, kind_of(entry.gid_type)});
    std::memcpy(one.gid.data(), entry.gid.raw, one.gid.size());
  }
  return choose_gid(table, options.gid_index, info, why);
}

namespace {

bool wanted(const Options& options, const std::string& device, uint32_t port) {
  if (options.devices.empty()) return true;
  const std::string with_port = device + ":" + std::to_string(port);
  return std::any_of(options.devices.begin(), options.devices.end(),
                     [&](const std::string& name) { return name == device || name == with_port; });
}

enum class Depth : uint8_t { kToUse, kToReport };

RailReport look_at(const VerbsDevice& device, const ibv_device_attr& facts, const Options& options,
                   uint32_t number, Depth depth) {
  RailReport report;
  RailInfo& info = report.info;
  info.device = device.name;
  info.port = number;
  if (!wanted(options, device.name, number)) {
    report.reason = "not used, because the configuration names other devices";
    return report;
  }
  ibv_port_attr port{};
  const int error = device.verbs.query_port(device.context, static_cast<uint8_t>(number), &port);
  if (error != 0) {
    report.reason = "not used, because ibv_query_port failed: " + std::string(std::strerror(error));
    return report;
  }
  info.layer = port.link_layer == IBV_LINK_LAYER_ETHERNET ? LinkLayer::kRoceV2 : LinkLayer::kInfiniband;
  info.lid = port.lid;
  info.mtu = static_cast<uint8_t>(port.active_mtu);
  info.max_message_bytes = port.max_msg_sz;
  info.max_outstanding_reads = static_cast<uint32_t>(std::clamp(facts.max_qp_init_rd_atom, 1, 16));
  // Of reads a device may say less, or nothing.
  const int gathers = facts.max_sge_rd > 0 ? std::min(facts.max_sge, facts.max_sge_rd) : facts.max_sge;
  info.max_gather = static_cast<uint32_t>(std::clamp(gathers, 1, static_cast<int>(kMaxGather)));
  info.megabits_per_s = speed_of(port);
  const PciPlace place =
      place_of_device(options.sysfs_folder + "/class/infiniband/" + device.name + "/device");
  info.numa_node = place.numa_node;
  info.pci_path = place.path;
  if (port.state != IBV_PORT_ACTIVE) {
    report.reason = "not used, because the port is not active (cable, switch or `ip link set ... up`)";
    return report;
  }
  if (depth == Depth::kToReport) report.gpu_direct = gpu_direct_of(device, options);
  report.usable =
      choose_gid(device, options, static_cast<uint32_t>(std::max(port.gid_tbl_len, 0)), info, report.reason);
  return report;
}

struct Found {
  std::vector<std::shared_ptr<VerbsDevice>> devices;
  std::vector<std::shared_ptr<Port>> ports;
  std::vector<RailReport> reports;
};

Status look_into(const Verbs& verbs, ibv_device* which, const Options& options, Depth depth, Found& found) {
  const char* name = verbs.get_device_name(which);
  errno = 0;
  ibv_context* context = verbs.open_device(which);
  RailReport report;
  report.info.device = name;
  if (context == nullptr) {
    report.reason = "not used, because the device cannot be opened: " + std::string(std::strerror(errno)) +
                    " (are /dev/infiniband/uverbs* readable and writable?)";
    found.reports.push_back(report);
    return Status::ok();
  }
  auto device = std::make_shared<VerbsDevice>(verbs, context, name);
  ibv_device_attr facts{};
  if (const int error = verbs.query_device(context, &facts); error != 0) {
    report.reason = "not used, because ibv_query_device failed: " + std::string(std::strerror(error));
    found.reports.push_back(report);
    return Status::ok();
  }
  bool used = false;
  for (uint32_t number = 1; number <= facts.phys_port_cnt; ++number) {
    RailReport port = look_at(*device, facts, options, number, depth);
    if (port.usable) found.ports.push_back(std::make_shared<Port>(device, port.info, options));
    used = used || port.usable;
    found.reports.push_back(std::move(port));
  }
  if (used) found.devices.push_back(std::move(device));
  return Status::ok();
}

Result<Found> look(const Options& options, Depth depth) {
  if (Status status = check(options); !status) return status;
  auto verbs = load_verbs(options.library);
  if (!verbs) return verbs.status();
  int count = 0;
  errno = 0;
  ibv_device** list = (*verbs)->get_device_list(&count);
  if (list == nullptr) return refused("ibv_get_device_list", errno);
  Found found;
  Status status;
  for (int i = 0; i < count && status; ++i) status = look_into(**verbs, list[i], options, depth, found);
  (*verbs)->free_device_list(list);
  if (!status) return status;
  return found;
}

class OpenFabric final : public Fabric {
 public:
  explicit OpenFabric(Found found)
      : rails_(found.ports.begin(), found.ports.end()),
        reports_(std::move(found.reports)),
        watcher_(std::move(found.devices), std::move(found.ports)) {}
  std::span<const std::shared_ptr<Rail>> rails() const override { return rails_; }
  std::vector<RailReport> report() const override { return reports_; }

 private:
  const std::vector<std::shared_ptr<Rail>> rails_;
  const std::vector<RailReport> reports_;
  Watcher watcher_;
};

}  // namespace

Result<std::shared_ptr<Fabric>> open_fabric(const Options& options) {
  auto found = look(options, Depth::kToUse);
  if (!found) return found.status();
  if (found->ports.empty()) {
    if (found->reports.empty()) return unavailable("this machine has no RDMA device");
    std::string reasons;
    for (const RailReport& report : found->reports) {
      reasons += (reasons.empty() ? "" : "; ") + report.info.device + ":" + std::to_string(report.info.port) +
                 " is " + report.reason;
    }
    return unavailable("no port can be used: " + reasons);
  }
  return std::shared_ptr<Fabric>(std::make_shared<OpenFabric>(std::move(*found)));
}

Result<std::vector<RailReport>> look_for_rails(const Options& options) {
  auto found = look(options, Depth::kToReport);
  if (!found) return found.status();
  return std::move(found->reports);
}

}  // namespace mooncache::rdma
