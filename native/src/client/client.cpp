// Client: construction, cluster map, and the calls that are one request to one or several nodes.
#include "mooncache/client.h"

#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <random>
#include <thread>

#include "client/impl.h"
#include "client/reservation_lane.h"

namespace mooncache {

namespace {

std::atomic<uint64_t> forks{0};

Status check_config(const ClientConfig& config) {
  const auto bad = [](const char* text) { return Status{Code::kConfigInvalid, text}; };
  if (Status rdma = rdma::check(config.rdma); !rdma) return rdma;
  if (!wire::tenant_name_valid(config.credentials.tenant))
    return bad("tenant must match [a-z0-9][a-z0-9_.-]{0,62}");
  if (config.lanes_per_node < 1 || config.lanes_per_node > 256) return bad("lanes_per_node must be 1 to 256");
  if (config.window_frames < 1 || config.window_frames > 64) return bad("window_frames must be 1 to 64");
  if (config.frame_items < 1 || config.frame_items > wire::kMaxItems)
    return bad("frame_items must be 1 to 4096");
  if (config.frame_bytes < 4096 || config.frame_bytes > (64 << 20))
    return bad("frame_bytes must be 4096 to 67108864");
  if (config.registered_buffers_max > 65'536) return bad("registered_buffers_max must be at most 65536");
  if (config.receive_pool_bytes > (1ull << 40)) return bad("receive_pool_bytes must be at most 1 TiB");
  if (config.survey_ms > 60'000) return bad("survey_ms must be at most 60000");
  if (config.connect_timeout_ms < 1) return bad("connect_timeout must be positive");
  if (config.breaker_failures < 1) return bad("breaker_failures must be at least 1");
  if (config.retries_per_call < 1) return bad("retries_per_call must be at least 1");
  if (config.hedge_percent > 100) return bad("hedge_percent must be at most 100");
  if (config.hedge_min_ms > config.hedge_max_ms || config.hedge_max_ms > 60'000)
    return bad("hedge_min must be at most hedge_max, and that at most 60 s");
  if (config.location_cache_keys > (1ull << 28)) return bad("location_cache_keys must be at most 268435456");
  return Status::ok();
}

uint64_t random_seed() {
  std::random_device source;
  return uint64_t{source()} << 32 | source();
}

}  // namespace

uint64_t fork_generation_now() {
  static const bool registered = [] { return pthread_atfork(nullptr, nullptr, [] { ++forks; }) == 0; }();
  (void)registered;
  return forks.load(std::memory_order_relaxed);
}

struct CancelToken::Flag {
  std::atomic<bool> cancelled{false};
};

CancelToken::CancelToken() : fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)), flag_(std::make_unique<Flag>()) {}
CancelToken::~CancelToken() {
  if (fd_ >= 0) ::close(fd_);
}
void CancelToken::cancel() {
  flag_->cancelled.store(true);
  const uint64_t one = 1;
  // without a descriptor the flag alone is seen at the next turn of the loop
  if (fd_ >= 0 && write(fd_, &one, sizeof one) < 0) return;
}
bool CancelToken::cancelled() const {
  return flag_->cancelled.load(std::memory_order_relaxed);
}

Client::Impl::Impl(ClientConfig config_in)
    : config(std::move(config_in)),
      locations(config.location_cache_keys),
      rdma(std::make_shared<RdmaAccess>(config.rdma, config.rdma_staging_bytes)),
      buffers(std::make_shared<BufferBook>(
          rdma, BufferBook::Limits{config.registered_bytes_max, config.registered_buffers_max}, counters)),
      receive_pool(std::make_shared<ReceivePool>(buffers, config.receive_pool_bytes)),
      keeper(std::make_unique<LaneKeeper>(config.ping_interval_ms)),
      fork_generation(fork_generation_now()),
      spread_seed(random_seed()),
      hedge_times({config.hedge_min_ms * 1000, config.hedge_max_ms * 1000}),
      current(std::make_shared<NodeMap>()),
      retries(config.retry_percent, config.retry_burst),
      hedge_budget(config.hedge_percent, config.hedge_percent > 0 ? config.hedge_burst : 0) {
  limits.connect_timeout_ms = config.connect_timeout_ms;
  limits.stall_timeout_ms = config.stall_timeout_ms;
  limits.spin_us = std::thread::hardware_concurrency() > 1 ? config.spin_us : 0;
}

bool Client::Impl::in_child() const {
  return fork_generation != fork_generation_now();
}

Status Client::Impl::usable() const {
  if (in_child()) {
    return {
        Code::kClosed,
        "this client was made before fork(), and a child process cannot use the connections of its parent; "
        "make a client in the process that uses it"};
  }
  if (closed.load(std::memory_order_relaxed)) return {Code::kClosed, "the client is closed"};
  return Status::ok();
}

Status Client::Impl::check_call(size_t items, const CallOptions& options) const {
  if (Status status = usable(); !status) return status;
  if (items > config.max_batch_items) {
    return {Code::kLimitExceeded, "a batch has at most " + std::to_string(config.max_batch_items) + " items"};
  }
  if (options.cancel != nullptr && options.cancel->cancelled())
    return {Code::kCancelled, "cancelled by the caller"};
  return Status::ok();
}

std::shared_ptr<const NodeMap> Client::Impl::map() {
  if (in_child()) return std::make_shared<NodeMap>();
  const std::lock_guard lock(mutex);
  return current;
}

bool Client::Impl::may_use(const NodeMap& map, uint32_t position) {
  if (map.infos[position].state == NodeHealth::kDead) return false;
  if (map.nodes[position]->allow(steady_ms())) return true;
  counters.add(Counter::kBreakerSkips);
  return false;
}

uint64_t Client::Impl::take_retries(uint64_t wanted) {
  const std::lock_guard lock(mutex);
  const uint64_t granted = retries.spend(wanted);
  counters.add(Counter::kRetries, granted);
  counters.add(Counter::kRetriesRefused, wanted - granted);
  return granted;
}

void Client::Impl::ran_operations(uint64_t count) {
  const std::lock_guard lock(mutex);
  retries.operations(count);
}

bool Client::Impl::take_hedges(uint64_t wanted) {
  const std::lock_guard lock(mutex);
  const bool granted = hedge_budget.spend_all(wanted);
  counters.add(granted ? Counter::kHedges : Counter::kHedgesRefused, wanted);
  return granted;
}

void Client::Impl::ran_reads(uint64_t count) {
  const std::lock_guard lock(mutex);
  hedge_budget.operations(count);
}

uint32_t Client::Impl::hedge_after_us(const NodeMap& map, size_t size_class) {
  if (hedge_times.due(steady_ms())) {
    std::vector<uint64_t> p99s_us;
    for (size_t i = 0; i < kHedgeClassBytes.size(); ++i) {
      p99s_us.clear();
      for (const auto& node : map.nodes) {
        if (const auto p99_us = node->read_p99_us(i)) p99s_us.push_back(*p99_us);
      }
      hedge_times.learn(i, p99s_us);
    }
  }
  return hedge_times.after_us(size_class);
}

void Client::Impl::run(std::span<LaneTask> tasks, const CallOptions& options, bool small, Hedges* hedges) {
  LoopLimits chosen = limits;
  if (!small) chosen.spin_us = 0;
  run_tasks(tasks, options, closed, chosen, counters, hedges);
  close_unused();
}

// Calls to other nodes are what brings this about: there is no thread for it.
void Client::Impl::close_unused() {
  if (config.idle_timeout_ms == 0) return;
  const uint64_t now_ms = steady_ms();
  uint64_t due_ms = next_look_ms.load(std::memory_order_relaxed);
  if (now_ms < due_ms ||
      !next_look_ms.compare_exchange_strong(due_ms, now_ms + config.idle_timeout_ms / 4 + 1))
    return;
  if (now_ms < config.idle_timeout_ms) return;
  const uint64_t before_ms = now_ms - config.idle_timeout_ms;
  for (const auto& node : map()->nodes) node->close_idle_since(before_ms);
  std::vector<std::shared_ptr<ReservationLane>> unused;  // closing takes time: without the lock
  const std::lock_guard lock(mutex);
  for (auto& [node, lanes] : reservation_lanes) {
    const auto first = std::stable_partition(lanes.begin(), lanes.end(), [&](const auto& lane) {
      return lane->count > 0 || lane->empty_since_ms > before_ms;
    });
    unused.insert(unused.end(), first, lanes.end());
    lanes.erase(first, lanes.end());
  }
}

uint32_t Client::Impl::rank(const NodeMap& map, uint32_t position) {
  const NodeInfo& node = map.infos[position];
  const bool alive = node.state == NodeHealth::kActive || node.state == NodeHealth::kDraining;
  // Whether RDMA works here is known once it was opened, which the first use does.
  const RdmaTransport* opened = rdma->opened();
  const bool rdma_here =
      config.rdma.enabled && !config.tls.enabled && (opened == nullptr || opened->availability().is_ok());
  const Reach reach = reach_of(node, {config.host_id, config.shm_enabled, rdma_here});
  return read_rank(alive && !map.nodes[position]->breaker_open(steady_ms()), reach, node.medium);
}

void Client::Impl::learn(const NodeMap& map, const Key& key, const Nearest& nearest, bool asked_all) {
  if (nearest.count == 0 || map.nodes.size() < 2) return;
  std::array<uint32_t, Nearest::kMax> indices{};
  for (size_t i = 0; i < nearest.count; ++i) indices[i] = map.infos[nearest.positions[i]].index;
  locations.learn(key, std::span(indices).first(nearest.count),
                  asked_all ? steady_seconds() : LocationCache::kNeverAsked, nearest.on_disk);
}

uint32_t Client::Impl::guess(const NodeMap& map, const Key& key, std::span<const uint32_t> tried) {
  const auto usable_position = [&](uint32_t position) {
    return position != kNoNode && std::find(tried.begin(), tried.end(), position) == tried.end();
  };
  Nearest nearest;
  const LocationCache::Places places = locations.find(key);
  for (size_t i = 0; i < places.nodes.size() && places.nodes[i] != LocationCache::kNowhere; ++i) {
    const uint32_t position = map.position(places.nodes[i]);
    if (!usable_position(position)) continue;
    nearest.offer(position, places.on_disk[i],
                  [&](uint32_t at, bool on_disk) { return rank(map, at) | (on_disk ? kDiskRank : 0u); });
  }
  return nearest.count > 0 ? nearest.first() : guess_unknown(map, key, tried);
}

uint32_t Client::Impl::guess_unknown(const NodeMap& map, const Key& key, std::span<const uint32_t> tried) {
  const auto usable_position = [&](uint32_t position) {
    return std::find(tried.begin(), tried.end(), position) == tried.end();
  };
  for (const uint32_t position : map.local) {
    if (usable_position(position)) return position;
  }
  if (map.nodes.size() == 1) return usable_position(0) ? 0 : kNoNode;
  for (const uint32_t position : place(key, map.infos, config.host_id, 2)) {
    if (usable_position(position)) return position;
  }
  return kNoNode;
}

Result<std::unique_ptr<Client>> Client::create(ClientConfig config) {
  if (Status status = check_config(config); !status) return status;
  auto impl = std::make_shared<Impl>(std::move(config));
  if (impl->config.tls.enabled) {
    const PeerTls& tls = impl->config.tls;
    auto context = net::make_tls_context({tls.cert_file, tls.key_file, tls.ca_file}, false);
    if (!context) return context.status();
    impl->tls = std::move(*context);
  }
  return std::unique_ptr<Client>(new Client(std::move(impl)));
}

Client::Client(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

Client::~Client() {
  if (impl_->in_child())
    leak_in_child(std::move(impl_));
  else
    close();
}

bool Client::set_map(uint64_t epoch, std::vector<NodeInfo> infos) {
  if (!impl_->usable()) return false;
  const std::lock_guard lock(impl_->mutex);
  const auto old = impl_->current;
  if (epoch < old->epoch) return false;
  auto next = std::make_shared<NodeMap>();
  next->epoch = epoch;
  std::vector<bool> kept(old->nodes.size(), false);
  for (NodeInfo& info : infos) {
    std::shared_ptr<Node> node;
    for (size_t i = 0; i < old->nodes.size(); ++i) {
      const NodeInfo& before = old->nodes[i]->info();
      if (before.index == info.index && before.node_id == info.node_id &&
          before.incarnation == info.incarnation && before.tcp_host == info.tcp_host &&
          before.tcp_port == info.tcp_port && before.host_id == info.host_id &&
          before.unix_path == info.unix_path) {
        node = old->nodes[i];
        kept[i] = true;
      }
    }
    if (!node) node = std::make_shared<Node>(info, impl_->config, impl_->tls, impl_->counters, impl_->rdma);
    const auto position = static_cast<uint32_t>(next->nodes.size());
    next->by_index[info.index] = position;
    if (takes_from_its_host(info, impl_->config.host_id)) next->local.push_back(position);
    next->nodes.push_back(std::move(node));
    next->infos.push_back(std::move(info));
  }
  for (size_t i = 0; i < kept.size(); ++i) {
    if (!kept[i]) {
      old->nodes[i]->retire();
      impl_->reservation_lanes.erase(std::weak_ptr<Node>(old->nodes[i]));
    }
  }
  impl_->current = std::move(next);
  return true;
}

// What reservations hold stays open on lanes that no new one comes to.
void Client::set_key(const std::array<std::byte, 32>& key) {
  if (!impl_->usable()) return;
  const std::lock_guard lock(impl_->mutex);
  impl_->config.credentials.key = key;
  for (const auto& node : impl_->current->nodes) node->set_key(key);
  impl_->reservation_lanes.clear();
}

uint64_t Client::map_epoch() const {
  return impl_->map()->epoch;
}

void Client::close() {
  if (impl_->in_child() || impl_->closed.exchange(true)) return;
  impl_->keeper->stop();
  for (const auto& node : impl_->map()->nodes) node->close_idle();
  const std::lock_guard lock(impl_->mutex);
  impl_->reservation_lanes.clear();
}

Status Client::register_buffer(Slice memory) {
  if (Status status = impl_->usable(); !status) return status;
  return impl_->buffers->add(memory);
}

Status Client::attach_buffer(Slice memory) {
  if (Status status = impl_->usable(); !status) return status;
  return impl_->buffers->attach(memory);
}

Status Client::register_device_buffer(std::shared_ptr<GpuDevice> gpu, DeviceSlice memory) {
  if (Status status = impl_->usable(); !status) return status;
  if (!gpu) return {Code::kInvalidArgument, "device memory is registered with its device"};
  return impl_->buffers->add({reinterpret_cast<std::byte*>(memory.address), static_cast<size_t>(memory.size)},
                             impl_->buffers->device(gpu));
}

std::string Client::gpu_direct(const std::shared_ptr<GpuDevice>& gpu) const {
  return gpu && !impl_->in_child() ? impl_->buffers->device(gpu)->route() : "";
}

Status Client::unregister_buffer(Slice memory) {
  if (impl_->in_child()) return Status::ok();  // it is the parent's
  return impl_->buffers->remove(memory);
}

std::unique_ptr<LentBuffer> Client::receive_buffer(uint64_t size) {
  if (!impl_->usable()) return nullptr;
  auto lent = impl_->receive_pool->acquire(size);
  impl_->counters.add(lent ? Counter::kReceivePoolBlocks : Counter::kReceivePoolMisses);
  return lent;
}

std::vector<uint32_t> Client::unlocated(std::span<const Key> keys) const {
  std::vector<uint32_t> positions;
  const auto map = impl_->map();
  if (map->nodes.size() <= impl_->config.fanout_nodes_max) return positions;
  for (uint32_t i = 0; i < keys.size(); ++i) {
    const auto nodes = impl_->locations.find(keys[i]).nodes;
    if (std::all_of(nodes.begin(), nodes.end(),
                    [&](uint32_t index) { return map->position(index) == kNoNode; }))
      positions.push_back(i);
  }
  return positions;
}

Status Client::learn_locations(std::span<const Key> keys, std::span<const std::byte> packed) {
  Reader in(packed);
  const auto map = impl_->map();
  ReadRanks ranks(*impl_, *map);
  for (const Key& key : keys) {
    const uint16_t count = in.u16();
    Nearest nearest;
    for (uint16_t i = 0; i < count && in.ok(); ++i) {
      const uint32_t position = map->position(in.u16());
      const auto tier = static_cast<Tier>(in.u8());
      const bool on_disk = tier == Tier::kSsd || tier == Tier::kShared;
      (void)in.u8();
      (void)in.u64();
      if (position != kNoNode) nearest.offer(position, on_disk, ranks.order_for(key));
    }
    if (in.ok()) impl_->learn(*map, key, nearest, true);
  }
  if (!in.done()) return {Code::kInvalidArgument, "the packed locations are not one record per key"};
  return Status::ok();
}

uint64_t Client::node_failures() const {
  return impl_->counters.get(Counter::kNodeFailures);
}

NamedValues Client::stats() const {
  NamedValues values;
  if (impl_->in_child()) return values;
  for (size_t i = 0; i < kCounterNames.size(); ++i) {
    values.emplace_back(kCounterNames[i], impl_->counters.get(static_cast<Counter>(i)));
  }
  const auto map = impl_->map();
  uint64_t open = 0;
  uint64_t slow = 0;
  for (const auto& node : map->nodes) {
    open += node->breaker_open(steady_ms()) ? 1 : 0;
    slow += node->slow(steady_ms()) ? 1 : 0;
  }
  values.emplace_back("breakers_open", open);
  values.emplace_back("nodes_slow", slow);
  // Rails that are in use here: "rdma_rail_mlx5_0:1_bytes" and so on.
  if (RdmaTransport* transport = impl_->rdma->opened(); transport != nullptr && transport->availability()) {
    for (const auto& rail : transport->shared()->rails) {
      const rdma::RailInfo& info = rail->rail->info();
      const std::string name = "rdma_rail_" + info.device + ":" + std::to_string(info.port);
      values.emplace_back(name + "_bytes", rail->bytes.load(std::memory_order_relaxed));
      values.emplace_back(name + "_failures", rail->failures.load(std::memory_order_relaxed));
      values.emplace_back(name + "_up", rail->rail->up() ? 1 : 0);
    }
  }
  for (const auto& node : map->nodes) {
    if (node->rdma_bytes() == 0 && node->rdma_failures() == 0) continue;
    const std::string name = "rdma_peer_" + node->info().node_id;
    values.emplace_back(name + "_bytes", node->rdma_bytes());
    values.emplace_back(name + "_failures", node->rdma_failures());
    values.emplace_back(name + "_fallbacks", node->rdma_fallbacks());
  }
  values.emplace_back("registered_buffers", impl_->buffers->buffers());
  values.emplace_back("registered_bytes", impl_->buffers->registered_bytes());
  values.emplace_back("receive_pool_mapped_bytes", impl_->receive_pool->mapped_bytes());
  values.emplace_back("receive_pool_lent_bytes", impl_->receive_pool->lent_bytes());
  values.emplace_back("nodes", map->nodes.size());
  values.emplace_back("map_epoch", map->epoch);
  return values;
}

Status Client::get(std::span<const GetBlock> blocks, const GetOptions& how, const CallOptions& options,
                   std::span<GetOutcome> outcomes) {
  const CallTimer timer(impl_->counters, Timed::kGet);
  return impl_->get(blocks, how, options, outcomes);
}

std::vector<ClientTransport> Client::transports() const {
  const ClientConfig& config = impl_->config;
  ClientTransport shm{"shm", "ready", ""};
  if (!config.shm_enabled) shm = {"shm", "off", "shared memory is switched off (client.shm_enabled)"};
  ClientTransport rdma{"rdma", "idle", "no node has offered RDMA for a transfer yet"};
  RdmaTransport* transport = impl_->rdma->opened();
  if (!config.rdma.enabled) {
    rdma = {"rdma", "off", "RDMA is switched off (rdma.enabled)"};
  } else if (impl_->tls != nullptr) {
    rdma = {"rdma", "off", "this client speaks TLS, and RDMA is not encrypted"};
  } else if (transport != nullptr) {
    const Status status = transport->availability();
    rdma = {"rdma", status ? "ready" : "unavailable", status.message};
  }
  return {shm, rdma, {"tcp", "ready", ""}};
}

std::vector<LatencyHistogram> Client::latencies() const {
  std::vector<LatencyHistogram> all;
  for (size_t i = 0; i < kTimedNames.size(); ++i)
    all.push_back(impl_->counters.latency(static_cast<Timed>(i)));
  return all;
}

}  // namespace mooncache
