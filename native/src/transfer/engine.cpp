#include <sys/random.h>

#include <algorithm>

#include "mooncache/server.h"
#include "mooncache/transfer_engine.h"
#include "server/range_table.h"
#include "transfer/peer.h"

namespace mooncache {

namespace {

constexpr int kCloseMs = 500;

Result<uint64_t> random_number() {
  uint64_t number = 0;
  if (::getrandom(&number, sizeof number, 0) != sizeof number)
    return {Code::kInternal, "no randomness for the number of this start"};
  return number | 1;
}

server::RangeGrant grant_of(const EngineGrant& grant) {
  return {grant.peer, grant.offset, grant.length, grant.read, grant.write};
}

ServerConfig server_config(const EngineConfig& config, uint64_t incarnation) {
  ServerConfig server;
  server.node_id = config.credentials.tenant;
  server.host_id = config.host_id;
  server.secret = config.secret;
  server.incarnation = incarnation;
  server.tcp_host = config.tcp_host;
  server.tcp_port = config.tcp_port;
  server.unix_path = config.unix_path;
  server.tls_cert = config.tls_cert;
  server.tls_key = config.tls_key;
  server.tls_client_ca = config.tls_client_ca;
  server.io_threads = 1;
  server.max_connections = config.max_connections;
  server.progress_timeout_ms = config.progress_timeout_ms;
  server.rdma.enabled = false;
  // There are no blocks.
  server.store.capacity_bytes = 64 << 10;
  server.store.shards = 1;
  server.store.eviction = "lru";
  server.store.event_log_capacity = 16;
  return server;
}

}  // namespace

struct TransferEngine::Impl {
  transfer::PeerOptions peer_options(const wire::EngineDescriptor& descriptor) const {
    const bool same_host = !config.host_id.empty() && descriptor.host_id == config.host_id;
    return {config.credentials, config.peer_tls, config.use_shared_memory && same_host};
  }
  Result<uint64_t> add(std::unique_ptr<server::MemoryRegion> region, std::string label,
                       std::span<const EngineGrant> grants) {
    region->label = std::move(label);
    for (const EngineGrant& grant : grants) region->grants.push_back(grant_of(grant));
    return ranges->add(std::move(region));
  }

  EngineConfig config;
  std::shared_ptr<server::RangeTable> ranges = std::make_shared<server::RangeTable>();
  std::unique_ptr<StoreServer> server;  // null: it does not listen
};

TransferEngine::TransferEngine(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

TransferEngine::~TransferEngine() {
  close();
}

Result<std::unique_ptr<TransferEngine>> TransferEngine::open(EngineConfig config) {
  if (!wire::tenant_name_valid(config.credentials.tenant))
    return {Code::kConfigInvalid, "the engine's name is not valid: use [a-z0-9][a-z0-9_.-]{0,62}"};
  auto impl = std::make_unique<Impl>();
  impl->config = std::move(config);
  const EngineConfig& in_force = impl->config;
  if (in_force.listens) {
    const bool any = in_force.tcp_host == "0.0.0.0" || in_force.tcp_host == "::";
    if (any && in_force.advertised_host.empty())
      return {Code::kConfigInvalid,
              "it listens on every address: advertised_host has to say which one peers use"};
    const auto incarnation = random_number();
    if (!incarnation) return incarnation.status();
    ServerConfig wanted = server_config(in_force, *incarnation);
    wanted.ranges = impl->ranges;
    auto server = StoreServer::create(std::move(wanted));
    if (!server) return server.status();
    if (Status started = (*server)->start(); !started) return started;
    impl->server = std::move(*server);
    const Endpoints endpoints = impl->server->endpoints();
    wire::EngineDescriptor endpoint;
    endpoint.name = in_force.credentials.tenant;
    endpoint.host_id = in_force.host_id;
    endpoint.incarnation = *incarnation;
    endpoint.tcp_host = in_force.advertised_host.empty() ? in_force.tcp_host : in_force.advertised_host;
    endpoint.tcp_port = endpoints.tcp_port;
    endpoint.tls = endpoints.tls;
    endpoint.unix_path = endpoints.unix_path;
    impl->ranges->set_endpoint(std::move(endpoint));
  }
  return std::unique_ptr<TransferEngine>(new TransferEngine(std::move(impl)));
}

Result<uint64_t> TransferEngine::register_memory(Slice memory, std::string label,
                                                 std::span<const EngineGrant> grants, uint64_t base) {
  auto region = std::make_unique<server::MemoryRegion>();
  region->base = base;
  region->memory = memory;
  return impl_->add(std::move(region), std::move(label), grants);
}

Result<AllocatedMemory> TransferEngine::allocate(uint64_t size_bytes, std::string label,
                                                 std::span<const EngineGrant> grants) {
  if (size_bytes == 0) return {Code::kInvalidArgument, "memory has at least one byte"};
  auto memfd = store::Memfd::create("mooncache-engine", size_bytes, {});
  if (!memfd) return memfd.status();
  auto region = std::make_unique<server::MemoryRegion>();
  region->memory = {memfd->data(), static_cast<size_t>(size_bytes)};
  region->memfd = std::make_shared<store::Memfd>(std::move(*memfd));
  AllocatedMemory allocated{0, region->memory, region->memfd};
  const auto base = impl_->add(std::move(region), std::move(label), grants);
  if (!base) return base.status();
  allocated.base = *base;
  return allocated;
}

Status TransferEngine::unregister(uint64_t base, Deadline deadline) {
  return impl_->ranges->remove(base, deadline);
}

Status TransferEngine::grant(uint64_t base, EngineGrant grant) {
  return impl_->ranges->grant(base, grant_of(grant));
}

Status TransferEngine::revoke(uint64_t base, const std::string& peer, Deadline deadline) {
  return impl_->ranges->revoke(base, peer, deadline);
}

Result<std::vector<std::byte>> TransferEngine::describe(const std::string& peer) const {
  if (!impl_->server)
    return {Code::kClosed, "this engine does not listen, or was closed: peers cannot reach it"};
  return impl_->ranges->describe(peer);
}

Result<std::shared_ptr<EnginePeer>> TransferEngine::connect(std::span<const std::byte> descriptor,
                                                            Deadline deadline) {
  auto decoded = wire::EngineDescriptor::decode(descriptor);
  if (!decoded) return {Code::kInvalidArgument, "these bytes are not the descriptor of an engine"};
  const transfer::PeerOptions options = impl_->peer_options(*decoded);
  auto peer = std::make_shared<transfer::Peer>(std::move(*decoded), options);
  if (Status opened = peer->open(deadline); !opened) return opened;
  return std::static_pointer_cast<EnginePeer>(peer);
}

// It is asked over TCP; when it turns out to be on this host, a connection over its unix socket follows.
Result<std::shared_ptr<EnginePeer>> TransferEngine::connect(const std::string& tcp_host, uint16_t tcp_port,
                                                            Deadline deadline) {
  wire::EngineDescriptor descriptor;
  descriptor.tcp_host = tcp_host;
  descriptor.tcp_port = tcp_port;
  descriptor.tls = impl_->config.peer_tls.enabled;
  auto peer = std::make_shared<transfer::Peer>(descriptor, impl_->peer_options(descriptor));
  if (Status opened = peer->open(deadline); !opened) return opened;
  return std::static_pointer_cast<EnginePeer>(peer);
}

uint16_t TransferEngine::tcp_port() const {
  return impl_->server ? impl_->server->endpoints().tcp_port : uint16_t{0};
}

std::vector<EngineNotification> TransferEngine::notifications(size_t most, Deadline deadline) {
  std::vector<EngineNotification> all;
  for (auto& notice : impl_->ranges->take_notices(most, deadline))
    all.push_back({std::move(notice.peer), std::move(notice.bytes)});
  return all;
}

std::vector<std::pair<std::string, uint64_t>> TransferEngine::stats() const {
  std::vector<std::pair<std::string, uint64_t>> all;
  if (!impl_->server) return all;
  for (auto& [name, value] : impl_->server->stats())
    if (!name.starts_with("store_")) all.emplace_back(std::move(name), value);
  all.emplace_back("range_uses", impl_->ranges->uses());
  return all;
}

void TransferEngine::close() {
  impl_->ranges->close();
  if (impl_->server) impl_->server->stop(Deadline::after_ms(kCloseMs));
}

}  // namespace mooncache
