#include "client/map_source.h"

#include <algorithm>
#include <charconv>
#include <utility>

#include "client/node.h"

namespace mooncache {

namespace {

constexpr uint32_t kAttemptMs = 1000;  // for one node's answer
constexpr uint32_t kRoundMs = 10'000;  // for a node that answers at all
constexpr size_t kNodesOfARound = 8;   // of the map; then the seeds
constexpr uint32_t kStaysMax = 4;  // questions to one node, then another one's turn: it may be cut off itself
constexpr uint64_t kGapMs = 100;   // between two rounds, however often calls fail
constexpr uint64_t kPauseMaxMs = 5000;  // between rounds that all failed
constexpr const char* kSeedHost = "seed";

}  // namespace

Result<NodeInfo> seed_of(const std::string& text, uint32_t index) {
  const Status wrong{Code::kInvalidArgument,
                     "\"" + text + "\" is no data port of a node; write host:port or unix:/absolute/path"};
  NodeInfo node;
  node.index = index;
  if (text.starts_with("unix:")) {
    node.unix_path = text.substr(5);
    node.host_id = kSeedHost;
    if (!node.unix_path.starts_with('/')) return wrong;
    return node;
  }
  const size_t colon = text.rfind(':');
  if (colon == std::string::npos || colon == 0) return wrong;
  node.tcp_host = text.substr(0, colon);
  if (node.tcp_host.front() == '[' && node.tcp_host.back() == ']')
    node.tcp_host = node.tcp_host.substr(1, node.tcp_host.size() - 2);
  const char* const end = text.data() + text.size();
  const auto [at, error] = std::from_chars(text.data() + colon + 1, end, node.tcp_port);
  if (error != std::errc() || at != end || node.tcp_port == 0 || node.tcp_host.empty()) return wrong;
  return node;
}

MapSource::MapSource(std::unique_ptr<Client> scout, uint32_t seeds, uint32_t refresh_ms)
    : scout_(std::move(scout)), seeds_(seeds), refresh_ms_(refresh_ms), random_(std::random_device{}()) {}

Status MapSource::first(Deadline deadline) {
  // A node that has just begun may hand out a map from before it was in it: nothing can be stored by one
  // without nodes.
  const auto ask_for_nodes = [&]() -> Status {
    if (Status asked = ask_any(deadline); !asked) return asked;
    return nodes().empty() ? Status{Code::kNoNodes, "the nodes that were asked know of no node yet"}
                           : Status::ok();
  };
  Status last = ask_for_nodes();
  for (uint64_t pause_ms = kGapMs; !last && !deadline.expired();
       pause_ms = std::min(2 * pause_ms, kPauseMaxMs)) {
    if (last.code == Code::kUnauthenticated || last.code == Code::kTlsError) return last;
    std::this_thread::sleep_for(std::chrono::milliseconds(
        deadline.remaining_ms(static_cast<int>(std::min<uint64_t>(pause_ms, 1000)))));
    if (!deadline.expired()) last = ask_for_nodes();
  }
  return last;
}

std::vector<NodeInfo> MapSource::nodes() const {
  const std::lock_guard lock(mutex_);
  return follower_.nodes();
}

void MapSource::follow(Client& client) {
  {
    const std::lock_guard lock(mutex_);
    client_ = &client;
    publish();
  }
  thread_ = std::thread([this] { run(); });
}

void MapSource::wake() {
  {
    const std::lock_guard lock(mutex_);
    woken_ = true;
  }
  changed_.notify_all();
}

void MapSource::stop() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  cancel_.cancel();
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
  scout_->close();
}

ClusterState MapSource::state() const {
  const std::lock_guard lock(mutex_);
  ClusterState state = counts_;
  state.term = follower_.term();
  state.epoch = follower_.epoch();
  state.nodes = follower_.nodes().size();
  state.confirmed_ms_ago = steady_ms() - confirmed_ms_;
  return state;
}

void MapSource::run() {
  uint64_t pause_ms = refresh_ms_;
  for (;;) {
    // a little less at random, so that clients do not march in step
    const uint64_t shortened_ms =
        pause_ms - std::uniform_int_distribution<uint64_t>(0, pause_ms / 5)(random_);
    if (!wait(shortened_ms)) return;
    const Status asked = ask_any(Deadline::after_ms(kRoundMs));
    pause_ms = asked ? refresh_ms_ : std::max<uint64_t>(refresh_ms_, std::min(2 * pause_ms, kPauseMaxMs));
    const std::lock_guard lock(mutex_);
    if (follower_.expire(steady_ms())) publish();
  }
}

bool MapSource::wait(uint64_t pause_ms) {
  std::unique_lock lock(mutex_);
  const uint64_t gap_ms = std::min(pause_ms, kGapMs);
  changed_.wait_for(lock, std::chrono::milliseconds(gap_ms), [this] { return stop_; });
  changed_.wait_for(lock, std::chrono::milliseconds(pause_ms - gap_ms), [this] { return stop_ || woken_; });
  if (std::exchange(woken_, false))
    stays_ = kStaysMax;  // a node is not as the last answer says: ask another one
  return !stop_;
}

std::vector<MapSource::Place> MapSource::places() {
  std::vector<NodeInfo> infos;
  Client* client = nullptr;
  {
    const std::lock_guard lock(mutex_);
    client = client_;
    if (client != nullptr) infos = follower_.nodes();
  }
  std::shuffle(infos.begin(), infos.end(), random_);
  // suspects last, the favourite first unless it had its turns
  const auto order = [this](const NodeInfo& node) {
    if (node.index == favourite_) return stays_ < kStaysMax ? 0 : 2;
    return node.state == NodeHealth::kSuspect ? 3 : 1;
  };
  std::stable_sort(infos.begin(), infos.end(),
                   [&](const NodeInfo& a, const NodeInfo& b) { return order(a) < order(b); });
  if (infos.size() > kNodesOfARound) infos.resize(kNodesOfARound);
  std::vector<Place> all;
  for (const NodeInfo& node : infos) all.push_back({client, node.index});
  for (uint32_t i = 0; i < seeds_; ++i) all.push_back({scout_.get(), i});
  std::shuffle(all.end() - seeds_, all.end(), random_);
  return all;
}

Status MapSource::ask_any(Deadline deadline) {
  Status last{Code::kNoNodes, "no seed and no node"};
  Status refused;  // says more than that another one did not answer
  for (const Place& place : places()) {
    if (deadline.expired() || cancel_.cancelled()) break;
    last = ask(place, Deadline::after_ms(deadline.remaining_ms(kAttemptMs)));
    const bool of_map = place.client != scout_.get();
    if (last) {
      if (of_map) stays_ = place.node == favourite_ ? stays_ + 1 : 1;
      favourite_ = of_map ? place.node : kNoNode;
      break;
    }
    if (last.code == Code::kUnauthenticated || last.code == Code::kUnsupported ||
        last.code == Code::kMasterUnavailable || last.code == Code::kTlsError)
      refused = last;
  }
  if (!last && !refused) last = refused;
  const std::lock_guard lock(mutex_);
  counts_.last_failure = last;
  return last;
}

Status MapSource::ask(const Place& place, Deadline deadline) {
  uint64_t term = 0, epoch = 0;
  {
    const std::lock_guard lock(mutex_);
    term = follower_.term();
    epoch = follower_.epoch();
  }
  CallOptions options;
  options.deadline = deadline;
  options.cancel = &cancel_;
  Result<std::optional<ClusterMap>> answer = place.client->cluster_map(place.node, term, epoch, options);
  const std::lock_guard lock(mutex_);
  if (!answer) {
    ++counts_.failures;
    return answer.status();
  }
  const uint64_t now_ms = steady_ms();
  if (!*answer) {
    follower_.confirm();
  } else if (follower_.hear(std::move(**answer), now_ms)) {
    publish();
  } else {
    ++counts_.failures;  // another node may be better off
    return {Code::kMasterUnavailable, "the node has an older cluster map"};
  }
  ++counts_.refreshes;
  confirmed_ms_ = now_ms;
  return Status::ok();
}

void MapSource::publish() {
  if (client_ != nullptr) (void)client_->set_map(++version_, follower_.nodes());
}

}  // namespace mooncache
