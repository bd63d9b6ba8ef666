// Every data-plane message as a checked type. decode() reads untrusted bytes: it returns nullopt unless the
// bytes are exactly one message (no missing byte, none left over, counts within limits), and it allocates
// only after the bytes for that count are known to be there.
//
// Every response begins with a Status (u16 code, str16 message); decode_response() takes it off first.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "mooncache/bytes.h"
#include "mooncache/status.h"
#include "mooncache/types.h"
#include "wire/frame.h"

namespace mooncache::wire {

using Bytes16 = std::array<std::byte, 16>;
using Bytes32 = std::array<std::byte, 32>;
using Meta = std::span<const std::byte>;

// Where a block lies on its node, and the grant (pin or reservation) that lets a peer touch it.
struct WireExtent {
  uint64_t grant = 0;
  uint32_t segment = 0;
  uint32_t slot = 0;
  uint64_t generation = 0;
  uint64_t offset = 0;
  uint64_t size = 0;
};

// ---- connection set-up

struct HelloRequest {
  static constexpr uint16_t kFlagAdmin = 1;
  static constexpr uint16_t kFlagExpires = 2;  // `expires_unix_s` follows; not together with kFlagAdmin
  static constexpr uint16_t kFlagWriter = 4;   // then `writer`; without it the writer is unknown
  uint16_t minor = kMinorVersion;
  uint16_t flags = 0;
  uint32_t pid = 0;
  Bytes16 client_nonce{};
  std::string tenant;
  std::string client_name;
  std::string software_version;
  uint64_t expires_unix_s = 0;  // of a session token: it is part of what its key was made from
  // Whose blocks this connection writes. Its texts have kMaxWriterTextBytes at most; what is no printable
  // ASCII is read as '?'.
  BlockWriter writer;
  void encode(Writer& out) const;
  static std::optional<HelloRequest> decode(Meta meta);
};

struct HelloResponse {
  Bytes16 server_nonce{};
  void encode(Writer& out) const;
  static std::optional<HelloResponse> decode(Reader& in);
};

struct AuthRequest {
  Bytes32 mac{};
  void encode(Writer& out) const;
  static std::optional<AuthRequest> decode(Meta meta);
};

struct AuthResponse {
  // Capabilities.
  static constexpr uint32_t kCanRdma = 1;        // the node answers ENDPOINT
  static constexpr uint32_t kCanWait = 2;        // it answers WAIT and GIVE_UP
  static constexpr uint32_t kWritesSeveral = 4;  // it takes WRITE with kFlagSeveral
  static constexpr uint32_t kHeartbeats = 8;     // it takes WAIT with kFlagHeartbeats
  static constexpr uint32_t kPrefetches = 16;    // it answers PREFETCH
  static constexpr uint32_t kEngine = 32;        // it is a transfer engine: it has ranges, and no blocks
  static constexpr uint32_t kHasMap = 64;        // it answers CLUSTER_MAP
  Bytes32 server_mac{};
  uint16_t minor = kMinorVersion;
  uint32_t capabilities = 0;
  uint64_t incarnation = 0;
  std::string node_id;
  std::string host_id;
  uint32_t max_items = kMaxItems;
  uint32_t max_meta_bytes = kMaxMetaBytes;
  uint64_t max_payload_bytes = kMaxPayloadBytes;
  void encode(Writer& out) const;
  static std::optional<AuthResponse> decode(Reader& in);
};

// The two proofs of AUTH: keyed BLAKE3 over a label, both nonces and the tenant. `client` tells whose proof.
Bytes32 auth_mac(bool client, const Bytes32& key, const Bytes16& server_nonce, const Bytes16& client_nonce,
                 std::string_view tenant);
// The secret of one tenant, from the cluster's secret.
Bytes32 tenant_key(const Bytes32& cluster_secret, std::string_view tenant);
// The secret of a tenant's session token, which is good until then.
Bytes32 session_key(const Bytes32& tenant_key, uint64_t expires_unix_s);
TenantId tenant_id(std::string_view tenant);
// True for [a-z0-9][a-z0-9_.-]{0,62}.
bool tenant_name_valid(std::string_view tenant);
// Compares without an early exit, so that timing tells nothing about the secret.
bool equal_constant_time(std::span<const std::byte> a, std::span<const std::byte> b);

// ---- items of batched messages. Each has a fixed size on the wire: kWireBytes.

struct PutItem {
  static constexpr size_t kWireBytes = 48;
  Key key;
  uint64_t size = 0;
  uint32_t crc32c = 0;
  uint32_t wait_ms = 0;
  void encode(Writer& out) const;
  static PutItem decode(Reader& in);
};

struct GetItem {
  static constexpr size_t kWireBytes = 48;
  Key key;
  uint64_t offset = 0;
  uint64_t max_length = 0;
  void encode(Writer& out) const;
  static GetItem decode(Reader& in);
};

struct GetResult {
  static constexpr size_t kWireBytes = 24;
  Code code = Code::kOk;
  Tier tier = Tier::kDram;
  uint32_t crc32c = 0;
  uint64_t block_size = 0;
  uint64_t length = 0;
  void encode(Writer& out) const;
  static GetResult decode(Reader& in);
};

struct LookupResult {
  static constexpr size_t kWireBytes = 56;
  Code code = Code::kOk;
  Tier tier = Tier::kDram;
  uint32_t crc32c = 0;
  uint64_t size = 0;
  WireExtent extent;
  void encode(Writer& out) const;
  static LookupResult decode(Reader& in);
};

struct ReserveItem {
  static constexpr size_t kWireBytes = 40;
  Key key;
  uint64_t size = 0;
  void encode(Writer& out) const;
  static ReserveItem decode(Reader& in);
};

struct ReserveResult {
  static constexpr size_t kWireBytes = 48;
  Code code = Code::kOk;
  WireExtent extent;
  void encode(Writer& out) const;
  static ReserveResult decode(Reader& in);
};

struct WriteRange {
  static constexpr size_t kWireBytes = 24;
  uint64_t offset = 0;
  uint64_t length = 0;
  uint32_t crc32c = 0;
  void encode(Writer& out) const;
  static WriteRange decode(Reader& in);
};

// An item of WRITE with kFlagSeveral.
struct ReservedRange {
  static constexpr size_t kWireBytes = 32;
  uint64_t reservation = 0;
  WriteRange range;
  void encode(Writer& out) const;
  static ReservedRange decode(Reader& in);
};

struct CommitItem {
  static constexpr size_t kWireBytes = 16;
  static constexpr uint32_t kFlagOneSided = 1;
  uint64_t reservation = 0;
  uint32_t crc32c = 0;
  uint32_t flags = 0;
  void encode(Writer& out) const;
  static CommitItem decode(Reader& in);
};

struct StatResult {
  static constexpr size_t kWireBytes = 32;
  Code code = Code::kOk;
  Tier tier = Tier::kDram;
  uint32_t crc32c = 0;
  uint64_t size = 0;
  uint32_t pins = 0;
  uint32_t hits = 0;
  uint64_t age_ms = 0;
  void encode(Writer& out) const;
  static StatResult decode(Reader& in);
};

struct ListItem {
  static constexpr size_t kWireBytes = 48;
  Key key;
  uint64_t size = 0;
  Tier tier = Tier::kDram;
  uint32_t hits = 0;
  void encode(Writer& out) const;
  static ListItem decode(Reader& in);
};

struct SegmentInfo {
  static constexpr size_t kWireBytes = 16;
  static constexpr uint32_t kArena = 0;
  static constexpr uint32_t kGenerationTable = 1;
  uint32_t segment = 0;
  uint32_t kind = kArena;
  uint64_t size = 0;
  void encode(Writer& out) const;
  static SegmentInfo decode(Reader& in);
};

// ENDPOINT, both ways: one queue pair. An answer without one says why in `code`.
struct RdmaAddress {
  static constexpr size_t kWireBytes = 32;
  Code code = Code::kOk;
  uint16_t lid = 0;
  uint8_t layer = 0;  // 1 InfiniBand, 2 RoCE v2
  uint8_t mtu = 0;    // 1 = 256 ... 5 = 4096
  uint8_t outstanding_reads = 0;
  uint32_t queue_pair = 0;
  uint32_t first_packet = 0;
  Bytes16 gid{};
  void encode(Writer& out) const;
  static RdmaAddress decode(Reader& in);
};
inline constexpr size_t kMaxRails = 8;

// How RDMA reaches a granted extent: behind the results of LOOKUP and RESERVE when kFlagExpose asks for it.
// keys[i] is for the rail that the i-th address of ENDPOINT was connected to.
struct Exposure {
  static constexpr size_t kWireBytes = 48;
  Code code = Code::kOk;  // not OK: use another way for this extent
  uint64_t address = 0;
  std::array<uint32_t, kMaxRails> keys{};
  void encode(Writer& out) const;
  static Exposure decode(Reader& in);
};

// u32 count, then the items. Used for PUT, GET, COMMIT, WRITE of several reservations and, in responses, for
// every per-item result.
template <typename Item>
void encode_items(Writer& out, std::span<const Item> items) {
  out.u32(static_cast<uint32_t>(items.size()));
  for (const Item& item : items) item.encode(out);
}
template <typename Item>
std::optional<std::vector<Item>> decode_items(Reader& in) {
  const uint32_t count = in.u32();
  if (!in.ok() || count > kMaxItems || in.remaining() < count * Item::kWireBytes) return std::nullopt;
  std::vector<Item> items;
  items.reserve(count);
  for (uint32_t i = 0; i < count; ++i) items.push_back(Item::decode(in));
  return items;
}

void encode_keys(Writer& out, std::span<const Key> keys);
std::optional<std::vector<Key>> decode_keys(Reader& in);
void encode_codes(Writer& out, std::span<const Code> codes);
std::optional<std::vector<Code>> decode_codes(Reader& in);
void encode_grants(Writer& out, std::span<const uint64_t> grants);
std::optional<std::vector<uint64_t>> decode_grants(Reader& in);

// A request that is nothing but items (or keys, grants): the whole meta must be used up.
template <typename Item>
std::optional<std::vector<Item>> decode_all_items(Meta meta) {
  Reader in(meta);
  auto items = decode_items<Item>(in);
  return in.done() ? items : std::nullopt;
}
std::optional<std::vector<Key>> decode_all_keys(Meta meta);
std::optional<std::vector<uint64_t>> decode_all_grants(Meta meta);

// ---- requests with more than items

struct ReserveRequest {
  uint32_t wait_ms = 0;
  std::vector<ReserveItem> items;
  void encode(Writer& out) const;
  static std::optional<ReserveRequest> decode(Meta meta);
};

// WRITE without kFlagSeveral.
struct WriteRequest {
  uint64_t reservation = 0;
  std::vector<WriteRange> ranges;
  void encode(Writer& out) const;
  static std::optional<WriteRequest> decode(Meta meta);
};

struct PinRequest {
  uint32_t ttl_ms = 0;
  std::vector<Key> keys;
  void encode(Writer& out) const;
  static std::optional<PinRequest> decode(Meta meta);
};

struct WaitRequest {
  uint32_t timeout_ms = 0;
  uint32_t news_ms = 0;  // at least so long between two frames of news; 0: only the last frame
  std::vector<Key> keys;
  // A connection that has said nothing for so long gets a frame of this WAIT without news; 0: never. It is in
  // the message only if it is not 0, and then the header has kFlagHeartbeats.
  uint32_t heartbeat_ms = 0;
  void encode(Writer& out) const;
  static std::optional<WaitRequest> decode(Meta meta, bool heartbeats);
};

struct PrefetchRequest {
  uint32_t timeout_ms = 0;  // what has not begun to come up by then is given up
  uint64_t max_bytes = 0;
  std::vector<Key> keys;
  void encode(Writer& out) const;
  static std::optional<PrefetchRequest> decode(Meta meta);
};

struct ReadRequest {
  uint64_t grant = 0;
  uint64_t offset = 0;
  uint64_t length = 0;
  void encode(Writer& out) const;
  static std::optional<ReadRequest> decode(Meta meta);
};

struct ListRequest {
  uint64_t cursor = 0;
  uint32_t limit = 1000;
  void encode(Writer& out) const;
  static std::optional<ListRequest> decode(Meta meta);
};

// ---- responses with more than items (after the Status)

struct MatchResponse {
  uint32_t leading_run = 0;
  uint32_t present = 0;
  std::vector<std::byte> bitmap;  // bit i of byte i / 8: key i is here; ceil(n / 8) bytes
  // With kFlagTiers, the same: key i is here, but not in memory. Empty: all are in memory, or an older node.
  std::vector<std::byte> on_disk;
  // With kFlagShared, the same: key i is in the shared directory. Empty: none is, or an older node.
  std::vector<std::byte> shared;
  void encode(Writer& out) const;
  static std::optional<MatchResponse> decode(Reader& in, uint32_t key_count);
};

enum class WaitState : uint8_t {
  kMore = 0,  // not the last frame of this WAIT
  kAll = 1,   // every key was readable at some moment since the WAIT began
  kGivenUp = 2,
  kTimeout = 3,
  kWithdrawn = 4,
};

// One of the frames that answer a WAIT. `positions` of keys that became readable and were in no frame before.
struct WaitNews {
  WaitState state = WaitState::kMore;
  std::vector<uint32_t> positions;
  void encode(Writer& out) const;
  static std::optional<WaitNews> decode(Reader& in, uint32_t key_count);
};

struct PrefetchResponse {
  uint32_t blocks = 0;  // that are on their way up now
  uint64_t bytes = 0;
  void encode(Writer& out) const;
  static std::optional<PrefetchResponse> decode(Reader& in);
};

struct ListResponse {
  uint64_t next_cursor = 0;  // 0: that was the last page
  std::vector<ListItem> items;
  void encode(Writer& out) const;
  static std::optional<ListResponse> decode(Reader& in);
};

struct NodeStatResponse {
  std::vector<std::pair<std::string, uint64_t>> values;
  void encode(Writer& out) const;
  static std::optional<NodeStatResponse> decode(Reader& in);
};

void encode_status(Writer& out, const Status& status);
// nullopt: the bytes are not a response.
std::optional<Status> decode_status(Reader& in);

// Sum of the payload bytes that a PUT or WRITE announces; nullopt when it overflows or passes the limit.
std::optional<uint64_t> payload_bytes(std::span<const PutItem> items);
std::optional<uint64_t> payload_bytes(std::span<const ReservedRange> ranges);
std::optional<uint64_t> payload_bytes(std::span<const GetResult> results);

}  // namespace mooncache::wire
