// A client of few words for tests: it sends bytes as told, right or wrong, and reads responses.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <optional>
#include <thread>

#include "mooncache/crc32c.h"
#include "mooncache/server.h"
#include "net/socket.h"
#include "wire/messages.h"

namespace mooncache::testing {

using wire::Opcode;
using Bytes = std::vector<std::byte>;

inline constexpr uint64_t kMiB = 1 << 20;
inline const TenantId kDefault = wire::tenant_id("default");
inline constexpr auto kPatience = std::chrono::seconds(20);

inline wire::Bytes32 secret() {
  wire::Bytes32 bytes;
  bytes.fill(std::byte{7});
  return bytes;
}

inline Key key_of(uint64_t number) {
  Key key;
  for (size_t i = 0; i < 4; ++i) {
    const uint64_t word = (number + 1) * (0x9e3779b97f4a7c15ull + 2 * i);
    std::memcpy(key.bytes.data() + 8 * i, &word, 8);
  }
  return key;
}

inline Bytes block_of(uint64_t seed, size_t size) {
  Bytes bytes(size);
  uint64_t state = seed * 0x9e3779b97f4a7c15ull + 1;
  for (std::byte& byte : bytes) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    byte = static_cast<std::byte>(state >> 56);
  }
  return bytes;
}

struct Reply {
  wire::FrameHeader header;
  Status status;
  Bytes body;  // meta after the status
  Bytes payload;
};

class Peer {
 public:
  explicit Peer(const StoreServer& server, bool unix_socket = false) {
    const Endpoints at = server.endpoints();
    const Deadline deadline = Deadline::after(kPatience);
    auto fd = unix_socket ? net::connect_unix(at.unix_path, deadline)
                          : net::connect_tcp(at.tcp_host, at.tcp_port, deadline);
    EXPECT_TRUE(fd) << fd.status().message;
    if (fd) fd_ = std::move(*fd);
  }

  int fd() const { return fd_.get(); }
  void close() { fd_.reset(); }

  static Bytes frame(Opcode opcode, std::span<const std::byte> meta = {},
                     std::span<const std::byte> payload = {}, uint16_t flags = 0, uint64_t id = 1) {
    wire::FrameHeader header;
    header.opcode = opcode;
    header.flags = flags;
    header.request_id = id;
    header.payload_bytes = payload.size();
    const auto head = wire::encode_header(header, meta);
    Bytes out(head.begin(), head.end());
    out.insert(out.end(), meta.begin(), meta.end());
    out.insert(out.end(), payload.begin(), payload.end());
    return out;
  }

  // False when the node has closed the connection.
  bool send(std::span<const std::byte> bytes) {
    const Deadline deadline = Deadline::after(kPatience);
    while (!bytes.empty()) {
      const ssize_t sent = ::send(fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent > 0) {
        bytes = bytes.subspan(static_cast<size_t>(sent));
      } else if (errno != EAGAIN || !net::wait_ready(fd(), POLLOUT, -1, deadline)) {
        return false;
      }
    }
    return true;
  }

  bool receive(std::span<std::byte> bytes) {
    const Deadline deadline = Deadline::after(kPatience);
    while (!bytes.empty()) {
      const ssize_t count = ::recv(fd(), bytes.data(), bytes.size(), MSG_DONTWAIT);
      if (count > 0) {
        bytes = bytes.subspan(static_cast<size_t>(count));
      } else if (count == 0 || errno != EAGAIN || !net::wait_ready(fd(), POLLIN, -1, deadline)) {
        return false;
      }
    }
    return true;
  }

  std::optional<Reply> reply() {
    wire::HeaderBytes head;
    if (!receive(head)) return std::nullopt;
    const auto header = wire::decode_header(head);
    if (!header || !header->response) return std::nullopt;
    Bytes meta(header->meta_bytes);
    if (!receive(meta) || !wire::verify_check(head, meta)) return std::nullopt;
    Reader reader(meta);
    auto status = wire::decode_status(reader);
    if (!status) return std::nullopt;
    Reply out{*header, *status, {}, Bytes(header->payload_bytes)};
    const auto rest = reader.take(reader.remaining());
    out.body.assign(rest.begin(), rest.end());
    if (!receive(out.payload)) return std::nullopt;
    return out;
  }

  std::optional<Reply> call(Opcode opcode, const Writer& meta = {}, std::span<const std::byte> payload = {},
                            uint16_t flags = 0) {
    if (!send(frame(opcode, meta.view(), payload, flags))) return std::nullopt;
    return reply();
  }

  // Reads until the node closes; false when it does not.
  bool closed_by_node() {
    std::byte sink[4096];
    const Deadline deadline = Deadline::after(kPatience);
    for (;;) {
      const ssize_t count = ::recv(fd(), sink, sizeof sink, MSG_DONTWAIT);
      if (count == 0 || (count < 0 && errno != EAGAIN)) return true;
      if (count < 0 && !net::wait_ready(fd(), POLLIN, -1, deadline)) return false;
    }
  }

  std::optional<wire::HelloResponse> hello(const std::string& tenant = "default", bool admin = false) {
    wire::HelloRequest request;
    request.flags = admin ? wire::HelloRequest::kFlagAdmin : 0;
    nonce.fill(std::byte{static_cast<unsigned char>(fd())});
    request.client_nonce = nonce;
    request.tenant = tenant;
    Writer meta;
    request.encode(meta);
    const auto answer = call(Opcode::kHello, meta);
    if (!answer || !answer->status) return std::nullopt;
    Reader reader(answer->body);
    return wire::HelloResponse::decode(reader);
  }

  static Writer proof(const wire::Bytes32& mac) {
    Writer meta;
    wire::AuthRequest{mac}.encode(meta);
    return meta;
  }

  bool login(const std::string& tenant = "default", bool admin = false) {
    const auto challenge = hello(tenant, admin);
    if (!challenge) return false;
    const auto key = admin ? secret() : wire::tenant_key(secret(), tenant);
    const auto answer =
        call(Opcode::kAuth, proof(wire::auth_mac(true, key, challenge->server_nonce, nonce, tenant)));
    if (!answer || !answer->status) return false;
    Reader reader(answer->body);
    const auto auth = wire::AuthResponse::decode(reader);
    return auth && auth->server_mac == wire::auth_mac(false, key, challenge->server_nonce, nonce, tenant);
  }

  static Bytes put_frame(const std::vector<std::pair<Key, Bytes>>& items, uint32_t wait_ms = 0,
                         uint64_t id = 1) {
    Writer meta;
    std::vector<wire::PutItem> wire_items;
    Bytes payload;
    for (const auto& [key, block] : items) {
      wire_items.push_back({key, block.size(), crc32c(block), wait_ms});
      payload.insert(payload.end(), block.begin(), block.end());
    }
    wire::encode_items<wire::PutItem>(meta, wire_items);
    return frame(Opcode::kPut, meta.view(), payload, 0, id);
  }
  static std::vector<Code> codes(const std::optional<Reply>& reply) {
    if (!reply || !reply->status) return {};
    Reader reader(reply->body);
    return wire::decode_codes(reader).value_or(std::vector<Code>{});
  }
  std::vector<Code> put(const std::vector<std::pair<Key, Bytes>>& items, uint32_t wait_ms = 0) {
    if (!send(put_frame(items, wait_ms))) return {};
    return codes(reply());
  }
  Code put(const Key& key, const Bytes& block, uint32_t wait_ms = 0) {
    const auto results = put({{key, block}}, wait_ms);
    return results.size() == 1 ? results[0] : Code::kConnectionLost;
  }

  static Writer get_meta(const std::vector<wire::GetItem>& items) {
    Writer meta;
    wire::encode_items<wire::GetItem>(meta, items);
    return meta;
  }
  static Writer keys_meta(const std::vector<Key>& keys) {
    Writer meta;
    wire::encode_keys(meta, keys);
    return meta;
  }
  static Writer grants_meta(const std::vector<uint64_t>& grants) {
    Writer meta;
    wire::encode_grants(meta, grants);
    return meta;
  }
  std::vector<wire::GetResult> get_results(const std::optional<Reply>& reply) {
    if (!reply || !reply->status) return {};
    Reader reader(reply->body);
    return wire::decode_items<wire::GetResult>(reader).value_or(std::vector<wire::GetResult>{});
  }
  std::pair<Code, Bytes> get(const Key& key) {
    const auto answer = call(Opcode::kGet, get_meta({{key, 0, UINT64_MAX}}));
    const auto results = get_results(answer);
    if (results.size() != 1) return {Code::kConnectionLost, {}};
    return {results[0].code, answer->payload};
  }
  std::optional<wire::LookupResult> lookup(const Key& key) {
    const auto answer = call(Opcode::kLookup, keys_meta({key}));
    if (!answer) return std::nullopt;
    Reader reader(answer->body);
    const auto results = wire::decode_items<wire::LookupResult>(reader);
    return results && results->size() == 1 ? std::optional((*results)[0]) : std::nullopt;
  }
  std::optional<wire::ReserveResult> reserve(const Key& key, uint64_t size, uint32_t wait_ms = 0) {
    Writer meta;
    wire::ReserveRequest{wait_ms, {{key, size}}}.encode(meta);
    const auto answer = call(Opcode::kReserve, meta);
    if (!answer) return std::nullopt;
    Reader reader(answer->body);
    const auto results = wire::decode_items<wire::ReserveResult>(reader);
    return results && results->size() == 1 ? std::optional((*results)[0]) : std::nullopt;
  }
  Code write(uint64_t grant, uint64_t offset, const Bytes& bytes,
             std::optional<uint32_t> crc = std::nullopt) {
    Writer meta;
    wire::WriteRequest{grant, {{offset, bytes.size(), crc.value_or(crc32c(bytes))}}}.encode(meta);
    const auto results = codes(call(Opcode::kWrite, meta, bytes));
    return results.size() == 1 ? results[0] : Code::kConnectionLost;
  }
  Code commit(uint64_t grant, uint32_t crc, uint32_t flags = 0) {
    Writer meta;
    const wire::CommitItem item{grant, crc, flags};
    wire::encode_items<wire::CommitItem>(meta, std::span(&item, 1));
    const auto results = codes(call(Opcode::kCommit, meta));
    return results.size() == 1 ? results[0] : Code::kConnectionLost;
  }

  wire::Bytes16 nonce{};

 private:
  net::UniqueFd fd_;
};

// A node for one test; its store is checked at the end.
class ServerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    config.node_id = "node-1";
    config.secret = secret();
    config.incarnation = 42;
    config.store.capacity_bytes = 16 << 20;
    config.io_threads = 1;
    folder = std::filesystem::temp_directory_path() / ("mooncache-server-test-" + std::to_string(getpid()));
    config.unix_path = folder / "node.sock";
  }
  void TearDown() override {
    if (server != nullptr) {
      server->stop(Deadline::after_ms(1000));
      std::string why;
      EXPECT_TRUE(server->store().check(&why)) << why;
      EXPECT_EQ(stat("pins_held"), 0u);
      EXPECT_EQ(stat("reservations_held"), 0u);
      EXPECT_EQ(stat("reserved_bytes"), 0u);
      EXPECT_EQ(stat("parked_now"), 0u);
      EXPECT_EQ(stat("connections_open"), 0u);
      EXPECT_EQ(stat("connections_unauthenticated"), 0u);
      EXPECT_EQ(stat("store_pins"), 0u);
      EXPECT_EQ(stat("store_reservations"), 0u);
    }
    std::error_code ignored;
    std::filesystem::remove_all(folder, ignored);
  }

  void start() {
    auto made = StoreServer::create(config);
    ASSERT_TRUE(made) << made.status().message;
    server = std::move(*made);
    const Status started = server->start();
    ASSERT_TRUE(started) << started.message;
  }
  uint64_t stat(std::string_view name) const {
    for (const auto& [key, value] : server->stats()) {
      if (key == name) return value;
    }
    ADD_FAILURE() << "no counter " << name;
    return 0;
  }
  // Waits until the counter has the value: what a closed connection held goes a moment later.
  bool eventually(std::string_view name, uint64_t value) const {
    const Deadline deadline = Deadline::after(kPatience);
    while (stat(name) != value) {
      if (deadline.expired()) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    return true;
  }

  ServerConfig config;
  std::filesystem::path folder;
  std::unique_ptr<StoreServer> server;
};

}  // namespace mooncache::testing
