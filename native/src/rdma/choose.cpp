// Decisions about rails that need no device: whether options make sense, which rail answers which, how a
// GID is written.
#include "rdma/choose.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <numeric>
#include <tuple>

#include "rdma/fabric.h"

namespace mooncache::rdma {

namespace {

constexpr size_t kUnderOneSwitch = 2;  // a downstream port of the switch and the device itself
constexpr uint32_t kFarSlowness = 2;
constexpr uint64_t kPiecesPerRail = 4;
constexpr uint64_t kPacketBytes = 4096;    // the largest there is
constexpr size_t kMappedPrefixBytes = 12;  // ::ffff: before an IPv4 address

size_t common_bits(const Gid& a, const Gid& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    const auto differ = std::to_integer<uint8_t>(a[i] ^ b[i]);
    if (differ != 0) return i * 8 + static_cast<size_t>(std::countl_zero(differ));
  }
  return a.size() * 8;
}

std::vector<std::string_view> parts_of(std::string_view path) {
  std::vector<std::string_view> parts;
  for (size_t end = 0; end != std::string_view::npos; path.remove_prefix(std::min(end + 1, path.size()))) {
    end = path.find('/');
    parts.push_back(path.substr(0, end));
  }
  return parts;
}

bool is_mapped(const Gid& gid) {
  for (size_t i = 0; i < 10; ++i) {
    if (gid[i] != std::byte{0}) return false;
  }
  return gid[10] == std::byte{0xff} && gid[11] == std::byte{0xff};
}

struct Candidate {
  const GidEntry* entry = nullptr;
  int rank = 0;  // higher is better; 0 = useless
  const char* reason = "";
};

Candidate rate(const GidEntry& entry, LinkLayer layer) {
  if (layer == LinkLayer::kInfiniband)
    return {&entry, entry.kind == GidKind::kInfiniband ? 1 : 0, "first GID of an InfiniBand port"};
  if (entry.kind != GidKind::kRoceV2) return {};
  if (is_mapped(entry.gid)) return {&entry, 3, "RoCE v2 over IPv4"};
  const bool local = entry.gid[0] == std::byte{0xfe} && entry.gid[1] == std::byte{0x80};
  if (local) return {&entry, 1, "RoCE v2 over a link-local IPv6 address: there is no routable one"};
  return {&entry, 2, "RoCE v2 over IPv6"};
}

}  // namespace

bool choose_gid(std::span<const GidEntry> table, int wanted, RailInfo& info, std::string& why) {
  Candidate best;
  for (const GidEntry& entry : table) {
    if (wanted >= 0 && entry.index != static_cast<uint32_t>(wanted)) continue;
    const Candidate one = rate(entry, info.layer);
    if (one.rank > best.rank) best = one;
  }
  if (best.rank == 0) {
    why = wanted >= 0
              ? "not used, because GID " + std::to_string(wanted) + " is empty or not routable (RoCE v2)"
              : "not used, because the port has no RoCE v2 GID; give its network interface an IP address";
    return false;
  }
  info.gid = best.entry->gid;
  info.gid_index = best.entry->index;
  info.gid_reason = wanted >= 0 ? "configured" : best.reason;
  return true;
}

Status check(const Options& options) {
  if (options.retry_count == 0 || options.retry_count > 6) {
    return {Code::kConfigInvalid,
            "the RDMA retry count must be 1 to 6: with 7 a device may try forever, and a dead peer is never "
            "seen"};
  }
  if (options.ack_timeout < 8 || options.ack_timeout > 22) {
    return {Code::kConfigInvalid,
            "the RDMA acknowledge timeout must be 8 to 22 (4.096 us * 2^n: 1 ms to 17 s)"};
  }
  if (options.rails_max == 0 || options.rails_max > kMaxRails) {
    return {Code::kConfigInvalid, "an RDMA connection uses 1 to 8 rails"};
  }
  if (options.service_level > 15) return {Code::kConfigInvalid, "the RDMA service level must be 15 at most"};
  return Status::ok();
}

std::string gid_text(const Gid& gid) {
  const auto byte = [&](size_t i) { return std::to_integer<unsigned>(gid[i]); };
  char text[48];
  if (is_mapped(gid)) {
    (void)std::snprintf(text, sizeof text, "%u.%u.%u.%u", byte(kMappedPrefixBytes), byte(13), byte(14),
                        byte(15));
    return text;
  }
  std::string groups;
  for (size_t i = 0; i < gid.size(); i += 2) {
    (void)std::snprintf(text, sizeof text, "%s%02x%02x", i == 0 ? "" : ":", byte(i), byte(i + 1));
    groups += text;
  }
  return groups;
}

uint32_t piece_bytes(uint64_t length, size_t rails, uint32_t max_message_bytes) {
  const uint64_t share = length / (std::max<uint64_t>(rails, 1) * kPiecesPerRail);
  const auto wanted = static_cast<uint32_t>(
      std::clamp<uint64_t>(share / kPacketBytes * kPacketBytes, kPieceBytesMin, kPieceBytesMax));
  return max_message_bytes == 0 ? wanted : std::min(wanted, max_message_bytes);
}

std::vector<size_t> order_rails(std::span<const RailLoad> rails, size_t turn) {
  std::vector<size_t> order(rails.size());
  std::iota(order.begin(), order.end(), size_t{0});
  if (order.empty()) return order;
  std::rotate(order.begin(), order.begin() + static_cast<ptrdiff_t>(turn % order.size()), order.end());
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return std::tuple(rails[a].far, rails[b].megabits_per_s, rails[a].links, rails[a].in_flight_bytes) <
           std::tuple(rails[b].far, rails[a].megabits_per_s, rails[b].links, rails[b].in_flight_bytes);
  });
  return order;
}

uint64_t time_through(const RailLoad& rail, uint64_t bytes, uint32_t slowness) {
  return (rail.in_flight_bytes + bytes) * slowness / std::max<uint64_t>(rail.megabits_per_s / 1000, 1);
}

const char* distance_name(Distance distance) {
  static constexpr const char* kNames[] = {"", "PIX", "PXB", "PHB", "NODE", "SYS", "UNKNOWN"};
  return kNames[static_cast<size_t>(distance)];
}

Distance distance(const PciPlace& one, const PciPlace& other) {
  if (one.path.empty() || other.path.empty()) return Distance::kUnknown;
  const std::vector<std::string_view> a = parts_of(one.path), b = parts_of(other.path);
  if (a[0] != b[0]) {
    return one.numa_node >= 0 && one.numa_node == other.numa_node ? Distance::kNode : Distance::kSys;
  }
  size_t shared = 0;  // bridges below the root and above both devices
  while (shared + 2 < std::min(a.size(), b.size()) && a[shared + 1] == b[shared + 1]) ++shared;
  if (shared == 0) return Distance::kPhb;
  const size_t below = std::max(a.size(), b.size()) - 1 - shared;
  return below <= kUnderOneSwitch ? Distance::kPix : Distance::kPxb;
}

Distance distance(int device_node, int memory_node) {
  if (device_node < 0 || memory_node < 0) return Distance::kUnknown;
  return device_node == memory_node ? Distance::kPhb : Distance::kSys;
}

std::vector<uint32_t> slowness(std::span<const Distance> rails) {
  std::vector<uint32_t> factors;
  if (rails.empty()) return factors;
  const Distance nearest = *std::min_element(rails.begin(), rails.end());
  for (const Distance one : rails) factors.push_back(one == nearest ? 1 : kFarSlowness);
  return factors;
}

size_t choose_rail(std::span<const std::shared_ptr<Rail>> rails, const EndpointAddress& peer,
                   std::span<const uint32_t> used) {
  size_t best = SIZE_MAX;
  size_t best_bits = 0;
  for (size_t i = 0; i < rails.size(); ++i) {
    const RailInfo& info = rails[i]->info();
    if (!rails[i]->up() || info.layer != peer.layer) continue;
    // a mapped IPv4 address and a native IPv6 one do not meet
    if (info.layer == LinkLayer::kRoceV2 && is_mapped(info.gid) != is_mapped(peer.gid)) continue;
    const size_t bits = common_bits(info.gid, peer.gid);
    const bool better =
        best == SIZE_MAX || bits / 8 > best_bits / 8 || (bits / 8 == best_bits / 8 && used[i] < used[best]);
    if (!better) continue;
    best = i;
    best_bits = bits;
  }
  return best;
}

}  // namespace mooncache::rdma
