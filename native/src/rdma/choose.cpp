// Decisions about rails that need no device: whether options make sense, which rail answers which, how a
// GID is written.
#include <bit>
#include <cstdio>

#include "rdma/fabric.h"

namespace mooncache::rdma {

namespace {

constexpr size_t kMappedPrefixBytes = 12;  // ::ffff: before an IPv4 address

size_t common_bits(const Gid& a, const Gid& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    const auto differ = std::to_integer<uint8_t>(a[i] ^ b[i]);
    if (differ != 0) return i * 8 + static_cast<size_t>(std::countl_zero(differ));
  }
  return a.size() * 8;
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
            "the RDMA retry count must be 1 to 6: with 7 a device may try for ever, and a dead peer is never "
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
