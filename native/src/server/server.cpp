#include "mooncache/server.h"

#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <thread>

#include "net/stream.h"
#include "server/loop.h"
#include "server/shared.h"
#include "wire/messages.h"

namespace mooncache {

namespace {

using server::CloseReason;
using server::Listener;
using server::Loop;
using server::LoopCounter;
using server::LoopHistogram;
using server::LoopMetrics;

constexpr std::array<std::string_view, static_cast<size_t>(CloseReason::kCount)> kCloseReasons = {
    "peer", "protocol", "version", "auth",   "handshake_timeout", "idle",
    "slow", "capacity", "tls",     "memory", "revoked",           "stopped"};

constexpr uint64_t kTrialBytes = 2 << 20;  // of a GPU's memory
// Kept for everything but connections: arenas, listeners, devices, the service around the server.
constexpr uint64_t kOwnDescriptors = 256;

struct NamedCounter {
  const char* name;
  LoopCounter LoopMetrics::*counter;
};
constexpr NamedCounter kCounters[] = {
    {"bytes_in", &LoopMetrics::bytes_in},
    {"bytes_out", &LoopMetrics::bytes_out},
    {"read_bytes", &LoopMetrics::read_bytes},
    {"hits", &LoopMetrics::hits},
    {"misses_not_found", &LoopMetrics::miss_not_found},
    {"misses_checksum", &LoopMetrics::miss_checksum},
    {"misses_limit", &LoopMetrics::miss_limit},
    {"misses_other", &LoopMetrics::miss_other},
    {"put_blocks", &LoopMetrics::put_blocks},
    {"put_exists", &LoopMetrics::put_exists},
    {"put_no_space", &LoopMetrics::put_no_space},
    {"put_other", &LoopMetrics::put_other},
    {"crc_failures_in", &LoopMetrics::crc_failures_in},
    {"crc_failures_stored", &LoopMetrics::crc_failures_stored},
    {"blocks_unreadable", &LoopMetrics::blocks_unreadable},
    {"protocol_errors", &LoopMetrics::protocol_errors},
    {"auth_failures", &LoopMetrics::auth_failures},
    {"version_skews", &LoopMetrics::version_skews},
    {"connections_accepted", &LoopMetrics::connections_accepted},
    {"connections_open", &LoopMetrics::connections_open},
    {"connections_lingering", &LoopMetrics::connections_lingering},
    {"connections_unauthenticated", &LoopMetrics::unauthenticated_open},
    {"parked_total", &LoopMetrics::parked_total},
    {"parked_now", &LoopMetrics::parked_now},
    {"parked_expired", &LoopMetrics::parked_expired},
    {"parked_woken", &LoopMetrics::parked_woken},
    {"waits_answered", &LoopMetrics::waits_answered},
    {"waits_given_up", &LoopMetrics::waits_given_up},
    {"waits_timed_out", &LoopMetrics::waits_timed_out},
    {"waits_withdrawn", &LoopMetrics::waits_withdrawn},
    {"wait_heartbeats", &LoopMetrics::wait_heartbeats},
    {"waits_refused", &LoopMetrics::waits_refused},
    {"pins_held", &LoopMetrics::pins_held},
    {"reservations_held", &LoopMetrics::reservations_held},
    {"reserved_bytes", &LoopMetrics::reserved_bytes},
    {"read_calls", &LoopMetrics::read_calls},
    {"write_calls", &LoopMetrics::write_calls},
    {"rdma_exposed", &LoopMetrics::rdma_exposed},
};

std::string lower(std::string_view text) {
  std::string out(text);
  for (char& c : out) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  return out;
}

std::string opcode_text(size_t number) {
  return std::string(wire::opcode_name(static_cast<wire::Opcode>(number)));
}

// The folder of the unix socket: made private when it is new, refused when others could swap the socket.
Status prepare_folder(const std::string& path) {
  const std::filesystem::path folder = std::filesystem::absolute(path).parent_path();
  std::error_code error;
  std::filesystem::create_directories(folder.parent_path(), error);
  if (::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) {
    return {Code::kConfigInvalid,
            "cannot make the folder " + folder.string() + ": " + net::errno_text(errno)};
  }
  struct stat info {};
  if (::stat(folder.c_str(), &info) != 0 || !S_ISDIR(info.st_mode)) {
    return {Code::kConfigInvalid, folder.string() + " is not a folder"};
  }
  if ((info.st_mode & 0022) != 0 && (info.st_mode & S_ISVTX) == 0) {
    return {Code::kConfigInvalid, "others may write to " + folder.string() +
                                      " and could replace the socket there; use a folder with mode 0700"};
  }
  return Status::ok();
}

}  // namespace

struct StoreServer::Impl {
  explicit Impl(ServerConfig config) : shared(std::move(config)) {}
  // The disks' threads know the loops and the log.
  ~Impl() {
    if (shared.store) shared.store->close_disk();
  }

  Status listen_all(std::vector<std::unique_ptr<Listener>>& listeners);
  std::vector<std::pair<std::string, uint64_t>> stats() const;
  uint64_t sum(LoopCounter LoopMetrics::*counter) const {
    uint64_t total = 0;
    for (const auto& loop : loops) total += (loop->metrics.*counter).get();
    return total;
  }
  void unlink_socket();
  void fit_descriptors();
  void describe_arena();
  void open_fabric();
  bool open_arena_to_fabric();
  Result<std::string> try_arena() const;

  server::Shared shared;
  std::vector<std::unique_ptr<Loop>> loops;
  std::vector<std::thread> threads;
  Endpoints endpoints;
  uint64_t socket_device = 0, socket_inode = 0;
  bool started = false, stopped = false;
  std::mutex life_mutex;  // start and stop
};

StoreServer::StoreServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

StoreServer::~StoreServer() {
  stop(Deadline::after_ms(0));
}

uint64_t StoreServer::now_ms() {
  return Loop::now_ns() / 1'000'000;
}

Result<std::unique_ptr<StoreServer>> StoreServer::create(ServerConfig config) {
  if (config.tls_cert.empty() != config.tls_key.empty()) {
    return {Code::kConfigInvalid, "tls_cert and tls_key come together"};
  }
  if (config.tls_cert.empty() && !config.tls_client_ca.empty()) {
    return {Code::kConfigInvalid, "tls_client_ca needs tls_cert and tls_key"};
  }
  if (config.max_connections == 0 || config.max_unauthenticated == 0 || config.handshake_timeout_ms == 0 ||
      config.frame_timeout_ms == 0 || config.progress_timeout_ms == 0 || config.max_tenants == 0 ||
      config.max_waits_per_connection == 0 || config.max_waited_keys == 0) {
    return {Code::kConfigInvalid,
            "limits and time-outs of the data plane must not be 0 (only idle_timeout_ms may)"};
  }
  if (config.io_threads == 0) config.io_threads = std::thread::hardware_concurrency() <= 2 ? 1 : 2;
  if (config.io_threads > 64) return {Code::kConfigInvalid, "io_threads must be 64 at most"};
  if (Status rdma = rdma::check(config.rdma); !rdma) return rdma;
  auto impl = std::make_unique<Impl>(std::move(config));
  ServerConfig& in_force = impl->shared.config;
  in_force.store.disk.node_id = in_force.store.keep.node_id = in_force.node_id;
  in_force.store.disk.log = [log = &impl->shared.log](uint8_t level, const char* event, std::string message) {
    log->push(level, event, std::move(message));
  };
  auto store = Store::open(in_force.store);
  if (!store) return store.status();
  in_force.store = (*store)->config();
  if (in_force.max_reserved_bytes_per_connection == 0) {
    in_force.max_reserved_bytes_per_connection = in_force.store.capacity_bytes;
  }
  impl->shared.store = std::move(*store);
  impl->fit_descriptors();
  impl->describe_arena();
  impl->open_fabric();
  for (uint32_t i = 0; i < impl->shared.config.io_threads; ++i) {
    impl->loops.push_back(std::make_unique<Loop>(impl->shared));
    if (Status opened = impl->loops.back()->open(); !opened) return opened;
  }
  Impl* raw = impl.get();
  raw->shared.store->set_space_callback([raw] {
    raw->shared.space_releases.fetch_add(1);
    (void)raw->shared.wake_waiter(0, Loop::kNoWait);
  });
  raw->shared.wake_waiter = [raw](uint64_t after, uint64_t before) {
    Loop* next = nullptr;
    for (const auto& loop : raw->loops) {
      const uint64_t waits = loop->longest_wait();
      if (waits <= after || waits >= before) continue;
      before = waits;
      next = loop.get();
    }
    if (next != nullptr) next->space_freed();
    return next != nullptr;
  };
  raw->shared.store->set_commit_callback(
      [raw](TenantId tenant, const Key& key) { raw->shared.waits.committed(tenant, key); });
  raw->shared.node_stat = [raw] { return raw->stats(); };
  return std::unique_ptr<StoreServer>(new StoreServer(std::move(impl)));
}

// The soft limit of descriptors is for programs that use select(); a service takes what it may have. What
// still does not fit is said at the start, not found out by those who connect.
void StoreServer::Impl::fit_descriptors() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  if (limit.rlim_cur < limit.rlim_max) {
    const rlim_t before = std::exchange(limit.rlim_cur, limit.rlim_max);
    if (::setrlimit(RLIMIT_NOFILE, &limit) != 0) limit.rlim_cur = before;
  }
  const uint64_t allowed = limit.rlim_cur;
  const uint64_t fits = allowed - std::min(kOwnDescriptors, allowed / 2);
  if (shared.config.max_connections <= fits) return;
  shared.log.push(30, "connections_limited",
                  "max_connections is " + std::to_string(fits) + " instead of " +
                      std::to_string(shared.config.max_connections) + ": the process may have " +
                      std::to_string(allowed) + " descriptors (ulimit -n, LimitNOFILE)");
  shared.config.max_connections = static_cast<uint32_t>(std::max<uint64_t>(fits, 1));
}

// Said once, so that the arena is not taken for a place that keeps blocks.
void StoreServer::Impl::describe_arena() {
  const ArenaInfo arena = shared.store->arena();
  shared.shares_memory = arena.why_not_shared.empty();
  if (arena.kind == "memory") return;
  shared.memory_may_go = arena.addressable;
  shared.log.push(20, "arena_opened",
                  arena.kind + " " + arena.description + ", " + std::to_string(arena.size_bytes) +
                      " bytes; what it held before is not used, the node starts empty");
  if (!arena.warning.empty()) shared.log.push(30, "arena_slow", arena.description + ": " + arena.warning);
  if (!arena.why_not_shared.empty()) {
    shared.log.push(
        20, "arena_not_shared",
        "processes of this host reach the blocks over TCP or RDMA, because " + arena.why_not_shared);
  }
}

// File systems may refuse devices long-term access to their pages, and not every device reaches a GPU: better
// known at once than at every block. How it goes.
Result<std::string> StoreServer::Impl::try_arena() const {
  const Slice piece = shared.store->arena_view().sample();
  const DeviceArena& arena = shared.device_arena;
  const rdma::DeviceRange device{arena.address, std::min(kTrialBytes, shared.config.store.capacity_bytes),
                                 arena.dma_buf_fd, arena.dma_buf_offset, arena.no_dma_buf};
  Status last{Code::kTransportUnavailable, "it has no bytes"};
  for (const auto& rail : shared.fabric->rails()) {
    auto domain = rail->make_domain();
    if (!domain) continue;
    auto memory =
        arena.address != 0 ? (*domain)->expose_device(device, true) : (*domain)->expose(piece, true);
    if (memory) return (*memory)->how();
    last = memory.status();
  }
  return last;
}

bool StoreServer::Impl::open_arena_to_fabric() {
  const ArenaInfo arena = shared.store->arena();
  if (arena.kind == "memory") return true;
  shared.device_arena = shared.store->arena_view().device_arena();
  const auto how = try_arena();
  if (how) {
    shared.log.push(20, "rdma_arena", "RDMA devices reach " + arena.description + " by " + *how);
    return true;
  }
  shared.fabric.reset();
  shared.fabric_reason =
      "RDMA unavailable, because the devices refuse " + arena.description + ": " + how.status().message;
  shared.log.push(30, "rdma_unavailable", shared.fabric_reason);
  return false;
}

// Without RDMA the node is whole: peers use TCP, and the log says why.
void StoreServer::Impl::open_fabric() {
  if (!shared.config.rdma.enabled) {
    shared.fabric_reason = "RDMA unavailable, because the node's configuration switches it off";
    return;
  }
  auto fabric = rdma::open_fabric(shared.config.rdma);
  if (fabric) {
    shared.fabric = std::move(*fabric);
    if (!open_arena_to_fabric()) return;
    shared.rail_counters.resize(shared.fabric->rails().size());
    for (const auto& rail : shared.fabric->rails()) {
      const rdma::RailInfo& info = rail->info();
      shared.log.push(20, "rdma_rail",
                      info.device + ":" + std::to_string(info.port) + " answers as " +
                          rdma::gid_text(info.gid) + " (" + info.gid_reason + ")");
    }
  } else {
    shared.fabric_reason = fabric.status().message;
    shared.log.push(20, "rdma_unavailable", shared.fabric_reason);
  }
}

Status StoreServer::Impl::listen_all(std::vector<std::unique_ptr<Listener>>& listeners) {
  const ServerConfig& config = shared.config;
  if (!config.tcp_host.empty()) {
    auto listener = std::make_unique<Listener>();
    if (!config.tls_cert.empty()) {
      auto context = net::make_tls_context({config.tls_cert, config.tls_key, config.tls_client_ca}, true);
      if (!context) return context.status();
      listener->tls = std::move(*context);
    }
    auto fd = net::listen_tcp(config.tcp_host, config.tcp_port, 4096);
    if (!fd) return {Code::kConfigInvalid, fd.status().message};
    const auto port = net::local_port(fd->get());
    if (!port) return port.status();
    endpoints.tcp_host = config.tcp_host;
    endpoints.tcp_port = *port;
    endpoints.tls = listener->tls != nullptr;
    listener->fd = std::move(*fd);
    listeners.push_back(std::move(listener));
  }
  if (!config.unix_path.empty()) {
    if (Status folder = prepare_folder(config.unix_path); !folder) return folder;
    auto fd = net::listen_unix(config.unix_path, 4096);
    if (!fd) return {Code::kConfigInvalid, fd.status().message};
    struct stat info {};
    if (::stat(config.unix_path.c_str(), &info) == 0) {
      socket_device = info.st_dev;
      socket_inode = info.st_ino;
    }
    endpoints.unix_path = config.unix_path;
    auto listener = std::make_unique<Listener>();
    listener->fd = std::move(*fd);
    listener->is_unix = true;
    listeners.push_back(std::move(listener));
  }
  return Status::ok();
}

Status StoreServer::start() {
  const std::lock_guard lock(impl_->life_mutex);
  if (impl_->started) return {Code::kClosed, "a server starts once"};
  std::vector<std::unique_ptr<Listener>> listeners;
  if (Status bound = impl_->listen_all(listeners); !bound) {
    impl_->unlink_socket();
    return bound;
  }
  std::vector<Loop*> loops;
  for (const auto& loop : impl_->loops) loops.push_back(loop.get());
  impl_->loops.front()->listen(std::move(listeners), loops);
  impl_->started = true;
  for (Loop* loop : loops) impl_->threads.emplace_back([loop] { loop->run(); });
  return Status::ok();
}

void StoreServer::stop(Deadline deadline) {
  const std::lock_guard lock(impl_->life_mutex);
  if (!impl_->started || impl_->stopped) return;
  impl_->stopped = true;
  for (const auto& loop : impl_->loops) loop->stop(deadline);
  for (std::thread& thread : impl_->threads) thread.join();
  impl_->shared.store->close_disk();  // its threads know the loops
  impl_->unlink_socket();
}

// Only the socket that this server made: another node may have taken the path since.
void StoreServer::Impl::unlink_socket() {
  struct stat info {};
  if (endpoints.unix_path.empty() || ::stat(endpoints.unix_path.c_str(), &info) != 0) return;
  if (info.st_dev == socket_device && info.st_ino == socket_inode)
    (void)::unlink(endpoints.unix_path.c_str());
}

Endpoints StoreServer::endpoints() const {
  return impl_->endpoints;
}
Store& StoreServer::store() {
  return *impl_->shared.store;
}
std::map<TenantId, std::string> StoreServer::tenants() const {
  return impl_->shared.tenants.all();
}
std::vector<std::pair<std::string, uint64_t>> StoreServer::stats() const {
  return impl_->stats();
}

Status StoreServer::set_secrets(const std::vector<std::array<std::byte, 32>>& secrets) {
  return impl_->shared.secrets.replace(secrets);
}

std::vector<SecretUse> StoreServer::secret_uses() const {
  return impl_->shared.secrets.uses();
}

Status StoreServer::set_cluster_map(const ClusterMap& map) {
  if (impl_->shared.cluster_map.publish(map)) return Status::ok();
  return {Code::kInvalidArgument, "the cluster map is beyond the limits of the data plane"};
}

Status StoreServer::set_limits(const std::string& tenant, const TenantLimits& limits) {
  if (!wire::tenant_name_valid(tenant))
    return {Code::kInvalidArgument, "'" + tenant + "' is not a tenant name"};
  const TenantId id = wire::tenant_id(tenant);
  if (!impl_->shared.tenants.learn(id, tenant))
    return {Code::kLimitExceeded, "the node knows too many tenants already"};
  impl_->shared.store->set_limits(id, limits);
  return Status::ok();
}

Status StoreServer::set_keys(const std::string& tenant, const std::vector<DiskKey>& keys) {
  if (!wire::tenant_name_valid(tenant))
    return {Code::kInvalidArgument, "'" + tenant + "' is not a tenant name"};
  const TenantId id = wire::tenant_id(tenant);
  if (!impl_->shared.tenants.learn(id, tenant))
    return {Code::kLimitExceeded, "the node knows too many tenants already"};
  return impl_->shared.store->set_keys(id, keys);
}

std::vector<ServerLogEvent> StoreServer::drain_log(size_t max_events) {
  std::vector<ServerLogEvent> events;
  for (auto& event : impl_->shared.log.drain(max_events)) {
    events.push_back({event.level, std::move(event.event), std::move(event.message)});
  }
  return events;
}

std::vector<std::pair<std::string, uint64_t>> StoreServer::Impl::stats() const {
  std::vector<std::pair<std::string, uint64_t>> values;
  for (const NamedCounter& named : kCounters) values.emplace_back(named.name, sum(named.counter));
  for (size_t reason = 0; reason < kCloseReasons.size(); ++reason) {
    uint64_t total = 0;
    for (const auto& loop : loops) total += loop->metrics.closed[reason].get();
    values.emplace_back("connections_closed_" + std::string(kCloseReasons[reason]), total);
  }
  for (size_t opcode = 1; opcode <= wire::kMaxOpcode; ++opcode) {
    uint64_t total = 0;
    for (const auto& loop : loops) total += loop->metrics.requests[opcode].get();
    values.emplace_back("requests_" + lower(opcode_text(opcode)), total);
  }
  uint64_t turn_bytes_max = 0;
  for (const auto& loop : loops)
    turn_bytes_max = std::max(turn_bytes_max, loop->metrics.turn_bytes_max.get());
  values.emplace_back("turn_bytes_max", turn_bytes_max);
  values.emplace_back("buffered_bytes", shared.buffered_bytes.load(std::memory_order_relaxed));
  values.emplace_back("waits_open", shared.waits.open_waits());
  values.emplace_back("waited_keys", shared.waits.open_keys());
  values.emplace_back("arena_lost_bytes", shared.lost_bytes.load(std::memory_order_relaxed));
  const StoreStats store = shared.store->stats();
  for (const auto& [name, value] : store.named()) values.emplace_back("store_" + std::string(name), value);
  values.insert(values.end(), store.disk.begin(), store.disk.end());
  values.insert(values.end(), store.kept.begin(), store.kept.end());
  return values;
}

std::vector<RailView> StoreServer::rails() const {
  std::vector<RailView> views;
  const server::Shared& shared = impl_->shared;
  if (shared.fabric == nullptr) return views;
  for (size_t i = 0; i < shared.fabric->rails().size(); ++i) {
    const rdma::Rail& rail = *shared.fabric->rails()[i];
    const rdma::RailInfo& info = rail.info();
    const server::RailCounters& counters = shared.rail_counters[i];
    RailView view;
    view.device = info.device;
    view.port = info.port;
    view.address = rdma::gid_text(info.gid);
    view.link_layer = info.layer == rdma::LinkLayer::kInfiniband ? "InfiniBand" : "RoCE v2";
    view.mtu_bytes = 128u << info.mtu;
    view.numa_node = info.numa_node;
    view.megabits_per_s = info.megabits_per_s;
    view.up = rail.up();
    view.connections = counters.connections.load(std::memory_order_relaxed);
    view.grants = counters.grants.load(std::memory_order_relaxed);
    view.granted_bytes = counters.granted_bytes.load(std::memory_order_relaxed);
    view.failures = counters.failures.load(std::memory_order_relaxed);
    views.push_back(std::move(view));
  }
  return views;
}

LatencyHistograms StoreServer::latency_histograms() const {
  LatencyHistograms out;
  for (size_t i = 0; i < LoopHistogram::kBuckets; ++i) out.bounds_us.push_back(LoopHistogram::bound_us(i));
  for (size_t opcode = 1; opcode <= wire::kMaxOpcode; ++opcode) {
    OpcodeLatency latency;
    latency.opcode = opcode_text(opcode);
    latency.buckets.resize(LoopHistogram::kBuckets);
    for (const auto& loop : impl_->loops) {
      const LoopHistogram& histogram = loop->metrics.latency[opcode];
      latency.sum_us += histogram.sum_us();
      for (size_t i = 0; i < LoopHistogram::kBuckets; ++i) {
        latency.buckets[i] += histogram.bucket(i);
        latency.count += histogram.bucket(i);
      }
    }
    if (latency.count > 0) out.opcodes.push_back(std::move(latency));
  }
  return out;
}

}  // namespace mooncache
