#include "client/node.h"

#include <algorithm>

namespace mooncache {

namespace {

constexpr uint64_t kUnixPauseMs = 5000;

PeerDescription describe(const NodeInfo& info, const ClientConfig& config) {
  PeerDescription peer;
  peer.node_id = info.node_id;
  peer.host_id = info.host_id;
  peer.tcp_host = info.tcp_host;
  peer.tcp_port = info.tcp_port;
  peer.unix_path = info.unix_path;
  peer.credentials = config.credentials;
  peer.tls = config.tls;
  return peer;
}

// More rails could be used than are, and nothing is under way.
bool wants_rails(Lane& lane, uint64_t now_ms) {
  const auto* link = static_cast<const RdmaLink*>(lane.session->rdma_link().get());  // no other kind is kept
  return link != nullptr && lane.renewal.due(now_ms) && link->wants_rails();
}

}  // namespace

uint64_t steady_ms() {
  return static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::milliseconds>(Deadline::Clock::now().time_since_epoch())
          .count());
}

Node::Node(NodeInfo info, const ClientConfig& config, std::shared_ptr<net::TlsContext> tls,
           Counters& counters, std::shared_ptr<RdmaAccess> rdma)
    : info_(std::move(info)),
      peer_(describe(info_, config)),
      shm_possible_(config.shm_enabled && !config.host_id.empty() && config.host_id == info_.host_id &&
                    !info_.unix_path.empty()),
      tls_(std::move(tls)),
      counters_(counters),
      rdma_(std::move(rdma)),
      queue_(config.lanes_per_node),
      breaker_(config.breaker_failures, config.breaker_min_ms, config.breaker_max_ms, config.slow_start_ms),
      slowness_(config.breaker_failures, config.breaker_min_ms, config.breaker_max_ms, config.slow_start_ms) {
  limits_.window_frames = config.window_frames;
}

Route Node::preferred_route(uint64_t now_ms) const {
  return shm_possible_ && now_ms >= unix_again_ms_.load(std::memory_order_relaxed) ? Route::kUnix
                                                                                   : Route::kTcp;
}

void Node::unix_failed(uint64_t now_ms) {
  counters_.add(Counter::kShmFallbacks);
  unix_again_ms_ = now_ms + kUnixPauseMs;
}

RdmaTransport* Node::rdma_for(const Session& session, uint64_t now_ms) {
  if (!session.offers_rdma() || session.route() != Route::kTcp) return nullptr;
  if (rdma_failed_lately_.load(std::memory_order_relaxed)) {
    const std::lock_guard lock(mutex_);
    if (rdma_detour_.taken(now_ms)) return nullptr;
  }
  return rdma_->get();
}

void Node::rdma_failed(uint64_t now_ms) {
  const std::lock_guard lock(mutex_);
  rdma_failures_.fetch_add(1, std::memory_order_relaxed);
  rdma_failed_lately_ = true;
  if (!rdma_detour_.failed(now_ms)) return;
  rdma_fallbacks_.fetch_add(1, std::memory_order_relaxed);
  counters_.add(Counter::kRdmaFallbacks);
}

uint32_t Node::rdma_gathers() const {
  const RdmaTransport* transport = rdma_->opened();
  return transport != nullptr && transport->availability() ? transport->shared()->max_gather : 1;
}

void Node::rdma_moved(uint64_t bytes) {
  rdma_bytes_.fetch_add(bytes, std::memory_order_relaxed);
  if (!rdma_failed_lately_.load(std::memory_order_relaxed)) return;
  const std::lock_guard lock(mutex_);
  rdma_detour_.worked(steady_ms());
  rdma_failed_lately_ = rdma_detour_.failed_lately();
}

Lane Node::take_idle(Route route, std::vector<Lane>& ended) {
  for (size_t i = idle_.size(); i-- > 0;) {
    if (idle_[i].session->route() != route) continue;
    Lane lane = std::move(idle_[i]);
    idle_.erase(idle_.begin() + static_cast<ptrdiff_t>(i));
    return lane;
  }
  while (!idle_.empty() && queue_.turns() + idle_.size() > queue_.turns_max()) {
    ended.push_back(std::move(idle_.back()));  // of the other route
    idle_.pop_back();
  }
  return {};
}

Result<Lane> Node::acquire(Route route, LaneUse use, std::unique_ptr<LaneTicket>& ticket) {
  if (!queue_.acquire(use, ticket)) {
    const std::lock_guard lock(mutex_);
    if (closed_) return {Code::kClosed, "the client is closed"};
    return Lane{};
  }
  Lane lane;                // may lose its place to a new one, which has more rails
  std::vector<Lane> ended;  // closing takes time: without the lock
  {
    const std::lock_guard lock(mutex_);
    if (closed_) {
      queue_.release(use);
      return {Code::kClosed, "the client is closed"};
    }
    lane = take_idle(route, ended);
  }
  lane.use = use;
  if (lane.session && !wants_rails(lane, steady_ms())) {
    lane.reused = true;
    lane.session->begin_use();
    return lane;
  }
  if (lane.session) counters_.add(Counter::kLanesClosed);
  counters_.add(Counter::kConnects);
  lane.key_generation = key_generation();
  auto session = start_session(route);
  if (!session) {
    counters_.add(Counter::kConnectFailures);
    queue_.release(use);
    return session.status();
  }
  lane.session = std::move(*session);
  lane.reused = false;
  lane.renewal.made(steady_ms());
  return lane;
}

void Node::count_bytes(Lane& lane) {
  counters_.add(lane.session->route() == Route::kTcp ? Counter::kTcpBytes : Counter::kUnixBytes,
                lane.session->take_bytes_moved());
}

void Node::release(Lane lane) {
  if (!lane.session) return;
  count_bytes(lane);
  if (!lane.session->idle() || lane.session->broken()) return drop(std::move(lane));
  lane.idle_since_ms = steady_ms();
  const LaneUse use = lane.use;
  {
    const std::lock_guard lock(mutex_);
    const bool has_our_key = lane.key_generation == key_generation();
    if (!closed_ && !retired_ && has_our_key) idle_.push_back(std::move(lane));
  }
  queue_.release(use);
}

void Node::drop(Lane lane) {
  if (!lane.session) return;
  count_bytes(lane);
  counters_.add(Counter::kLanesClosed);
  lane.session.reset();
  queue_.release(lane.use);
}

void Node::close_idle() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  idle_.clear();
  queue_.wake_all();
}

void Node::retire() {
  std::vector<Lane> ended;  // closing takes time: without the lock
  const std::lock_guard lock(mutex_);
  retired_ = true;
  ended.swap(idle_);
}

void Node::set_key(const std::array<std::byte, 32>& key) {
  std::vector<Lane> ended;  // closing takes time: without the lock
  const std::lock_guard lock(mutex_);
  peer_.credentials.key = key;
  key_generation_.fetch_add(1, std::memory_order_relaxed);
  ended.swap(idle_);
}

void Node::close_idle_since(uint64_t before_ms) {
  std::vector<Lane> late;  // closing queue pairs takes time: without the lock
  {
    const std::lock_guard lock(mutex_);
    for (Lane& lane : idle_) {
      if (lane.idle_since_ms <= before_ms) late.push_back(std::move(lane));
    }
    std::erase_if(idle_, [](const Lane& lane) { return lane.session == nullptr; });
  }
  counters_.add(Counter::kLanesClosed, late.size());
}

bool Node::allow(uint64_t now_ms) {
  const std::lock_guard lock(mutex_);
  return breaker_.allow(now_ms);
}

bool Node::breaker_open(uint64_t now_ms) {
  const std::lock_guard lock(mutex_);
  return breaker_.is_open(now_ms);
}

void Node::success(uint64_t now_ms) {
  if (at_rest_.load(std::memory_order_relaxed)) return;
  const std::lock_guard lock(mutex_);
  breaker_.success(now_ms);
  at_rest_ = breaker_.at_rest() && slowness_.at_rest();
}

void Node::read_took(size_t size_class, uint64_t took_us, bool late, uint64_t now_ms) {
  tails_[size_class].add(took_us);
  if (!late && at_rest_.load(std::memory_order_relaxed)) return;
  const std::lock_guard lock(mutex_);
  if (!late) {
    slowness_.success(now_ms);
  } else if (slow_probe_ || !slowness_.is_open(now_ms)) {  // other reads of a slow node say nothing new
    if (slowness_.failure(now_ms)) counters_.add(Counter::kSlowNodes);
  }
  slow_probe_ = false;
  at_rest_ = breaker_.at_rest() && slowness_.at_rest();
}

bool Node::slow(uint64_t now_ms) {
  if (at_rest_.load(std::memory_order_relaxed)) return false;
  const std::lock_guard lock(mutex_);
  return slowness_.is_open(now_ms);
}

bool Node::prefers(uint64_t now_ms, uint64_t roll) {
  if (at_rest_.load(std::memory_order_relaxed)) return true;
  const std::lock_guard lock(mutex_);
  if (breaker_.percent(now_ms) > 0 && !breaker_.prefers(now_ms, roll)) return false;
  const bool was_slow = slowness_.percent(now_ms) == 0;
  const bool preferred = slowness_.prefers(now_ms, roll);
  slow_probe_ = slow_probe_ || (was_slow && preferred);
  return preferred;
}

Status Node::last_failure() {
  const std::lock_guard lock(mutex_);
  return last_failure_;
}

void Node::failure(uint64_t now_ms, const Status& status, uint64_t took_ms) {
  const bool refused = status.code == Code::kNodeUnavailable && took_ms < Breaker::kAtOnceMs;
  counters_.add(Counter::kNodeFailures);
  const std::lock_guard lock(mutex_);
  last_failure_ = status;
  at_rest_ = false;
  if (breaker_.failure(now_ms, refused)) counters_.add(Counter::kBreakerOpens);
}

std::shared_ptr<ShmSegments> Node::segments(uint64_t incarnation) {
  const std::lock_guard lock(mutex_);
  return segments_incarnation_ == incarnation ? segments_ : nullptr;
}

void Node::set_segments(std::shared_ptr<ShmSegments> segments, uint64_t incarnation) {
  const std::lock_guard lock(mutex_);
  segments_incarnation_ = incarnation;
  segments_ = std::move(segments);
}

}  // namespace mooncache
