// Real nodes in this process, and clients for them.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <random>
#include <thread>

#include "mooncache/client.h"
#include "mooncache/server.h"
#include "wire/messages.h"

namespace mooncache::testing {

inline std::array<std::byte, 32> secret() {
  std::array<std::byte, 32> bytes;
  bytes.fill(std::byte{7});
  return bytes;
}

inline Key key_of(uint64_t number) {
  Key key;
  std::mt19937_64 random(number * 2 + 1);
  for (size_t i = 0; i < 4; ++i) {
    const uint64_t word = random();
    std::memcpy(key.bytes.data() + 8 * i, &word, 8);
  }
  return key;
}

inline std::vector<std::byte> bytes_of(uint64_t number, size_t size) {
  std::vector<std::byte> bytes(size);
  uint64_t state = number * 0x9e3779b97f4a7c15ull + 1;
  for (size_t i = 0; i < size; i += 8) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    std::memcpy(bytes.data() + i, &state, std::min<size_t>(8, size - i));
  }
  return bytes;
}

// Where RDMA is tested: on real devices when MOONCACHE_TEST_RDMA=real (in the test machine), else on the
// fake library. MOONCACHE_TEST_RDMA_CLIENT and _NODE name the devices of each side.
inline bool rdma_is_real() {
  const char* which = std::getenv("MOONCACHE_TEST_RDMA");
  return which != nullptr && std::string(which) == "real";
}
inline RdmaConfig test_rdma(bool client) {
  RdmaConfig config;
  if (!rdma_is_real()) config.library = MOONCACHE_FAKE_VERBS;
  if (!rdma_is_real()) return config;
  config.ack_timeout = 15;  // emulated processors are slow: 0.13 s
  const char* names = std::getenv(client ? "MOONCACHE_TEST_RDMA_CLIENT" : "MOONCACHE_TEST_RDMA_NODE");
  for (std::string rest = names != nullptr ? names : ""; !rest.empty();) {
    const size_t comma = std::min(rest.find(','), rest.size());
    config.devices.push_back(rest.substr(0, comma));
    rest.erase(0, comma + 1);
  }
  return config;
}

inline RdmaConfig no_rdma() {
  RdmaConfig config;
  config.enabled = false;
  return config;
}

struct TestNode {
  ServerConfig config;
  std::unique_ptr<StoreServer> server;
  NodeInfo info;

  explicit TestNode(uint32_t index, uint64_t capacity = 256 << 20, std::string host = "host-a",
                    bool unix_socket = true, RdmaConfig rdma = no_rdma()) {
    config.rdma = std::move(rdma);
    config.node_id = "node-" + std::to_string(index);
    config.host_id = host;
    config.secret = secret();
    config.incarnation = index + 1;
    if (unix_socket) {
      const auto folder = std::filesystem::temp_directory_path() / ("mc-" + std::to_string(getpid()));
      config.unix_path = folder / ("n" + std::to_string(index) + "-" + std::to_string(counter()++) + ".sock");
    }
    config.store.capacity_bytes = capacity;
    info.index = index;
    start();
  }
  void start() {
    auto made = StoreServer::create(config);
    ASSERT_TRUE(made) << made.status().message;
    server = std::move(*made);
    const Status started = server->start();
    ASSERT_TRUE(started) << started.message;
    const Endpoints endpoints = server->endpoints();
    info.node_id = config.node_id;
    info.host_id = config.host_id;
    info.incarnation = config.incarnation;
    info.tcp_host = endpoints.tcp_host;
    info.tcp_port = endpoints.tcp_port;
    info.unix_path = endpoints.unix_path;
    info.weight = 1.0;
  }
  void stop() {
    if (server) server->stop(Deadline::after_ms(1000));
    server.reset();
  }
  TenantId tenant() const { return wire::tenant_id("default"); }
  static int& counter() {
    static int value = 0;
    return value;
  }
};

inline CallOptions within_ms(int span_ms) {
  CallOptions options;
  options.deadline = Deadline::after_ms(span_ms);
  return options;
}

// A counter of the node.
inline uint64_t server_stat(const TestNode& node, const std::string& name) {
  for (const auto& [known, value] : node.server->stats()) {
    if (known == name) return value;
  }
  ADD_FAILURE() << "no counter " << name;
  return 0;
}

inline void sleep_ms(int span_ms) {
  std::this_thread::sleep_for(std::chrono::milliseconds(span_ms));
}

// True once `done` is; asks for ten seconds at most.
template <typename Done>
bool eventually(Done done) {
  const Deadline until = Deadline::after_ms(10'000);
  while (!until.expired()) {
    if (done()) return true;
    sleep_ms(5);
  }
  return done();
}

inline ClientConfig client_config(bool shm) {
  ClientConfig config;
  config.credentials.key = wire::tenant_key(secret(), "default");
  config.host_id = shm ? "host-a" : "elsewhere";
  config.shm_enabled = shm;
  config.spin_us = 0;
  config.stall_timeout_ms = 20'000;  // a busy machine is no sick node
  config.hedge_percent = 0;          // nor a slow one
  return config;
}

inline std::unique_ptr<Client> client_for(std::vector<NodeInfo> nodes, ClientConfig config) {
  auto made = Client::create(std::move(config));
  EXPECT_TRUE(made) << made.status().message;
  (*made)->set_map(1, std::move(nodes));
  return std::move(*made);
}

inline PutOutcome put_one(Client& client, const Key& key, std::span<const std::byte> bytes,
                          uint32_t replicas = 1, CallOptions options = {}) {
  const ConstSlice slice(bytes.data(), bytes.size());
  const PutBlock block{key, std::span(&slice, 1)};
  PutOutcome outcome;
  const Status status = client.put(std::span(&block, 1), replicas, options, std::span(&outcome, 1));
  if (!status) outcome.code = status.code;
  return outcome;
}

inline GetOutcome get_one(Client& client, const Key& key, std::span<std::byte> bytes,
                          CallOptions options = {}, GetOptions how = {}, uint64_t offset = 0) {
  const Slice slice{bytes.data(), bytes.size()};
  const GetBlock block{key, std::span(&slice, 1), offset};
  GetOutcome outcome;
  const Status status = client.get(std::span(&block, 1), how, options, std::span(&outcome, 1));
  if (!status) outcome.code = status.code;
  return outcome;
}

inline uint64_t stat_of(const Client& client, const std::string& name) {
  for (const auto& [known, value] : client.stats()) {
    if (known == name) return value;
  }
  ADD_FAILURE() << "no counter " << name;
  return 0;
}

}  // namespace mooncache::testing
