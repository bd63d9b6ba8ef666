// BlockWatch: the watches and the links that carry their WAITs, driven by the thread that is in next().
//
// A watch has one WAIT, or several: one for each node that may have its blocks, and for each 4,096 keys.
// What each of them says is added up here.
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <unordered_map>

#include "client/impl.h"
#include "client/watch_link.h"

namespace mooncache {

namespace {

constexpr size_t kKeysMax = 1 << 16;
constexpr size_t kWatchesMax = 4096;
// A watch of several WAITs has to know of each what it has so far.
constexpr uint32_t kPartNewsMs = 10;
// How much later than its deadline the last word of a node may come.
constexpr uint64_t kLateMs = 250;
// Between two looks whether the client was closed.
constexpr int kLookMs = 200;

class Watching final : public BlockWatch {
 public:
  explicit Watching(std::shared_ptr<Client::Impl> impl)
      : impl_(std::move(impl)), event_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}
  ~Watching() override {
    if (!impl_->in_child()) return;
    leak_in_child(std::move(impl_));
    leak_in_child(std::move(map_));
    (void)new auto(std::move(links_));
    (void)new auto(std::move(watches_));
    (void)new auto(std::move(added_));
  }

  Status add(std::string name, std::vector<Key> keys, Deadline deadline, std::optional<uint32_t> node,
             uint32_t news_ms) override;
  bool remove(const std::string& name) override;
  Result<std::vector<WatchNews>> next(const CallOptions& options) override;
  void wake() override;
  void close() override;

 private:
  // A WAIT of a watch.
  struct Part {
    std::shared_ptr<Node> node;
    uint32_t first = 0, count = 0;  // of the watch's keys
    uint64_t request_id = 0;
    bool open = true;  // its last frame has not come
  };
  struct Watch {
    uint64_t serial = 0;
    std::string name;
    std::vector<Key> keys;
    Deadline deadline;
    uint32_t news_ms = 0;
    std::vector<Part> parts;
    std::vector<bool> present;
    size_t missing = 0;
    std::vector<uint32_t> fresh;
    bool timed_out = false;  // a node said so
    Code failure = Code::kOk;
    WatchState state = WatchState::kMore;
  };
  struct PartId {
    uint64_t serial = 0;
    size_t part = 0;
  };

  Status usable() const;
  Status parts_for(Watch& watch, std::optional<uint32_t> node) const;
  void signal() const;
  void take_map();
  void take_commands();
  void begin(Watch& watch);
  void pump();
  Status on_answer(const WatchLink& link, uint64_t request_id, const Status& status, Reader& in);
  void on_news(Watch& watch, Part& part, const wire::WaitNews& news);
  void lose(WatchLink& link, const Status& why);
  void end_part(Watch& watch, Part& part);
  void end(Watch& watch, WatchState state);
  void expire();
  void withdraw_rest(Watch& watch);
  std::vector<WatchNews> take_news();
  void sleep(const CallOptions& options, InterruptLook& look);
  bool waits_at(const Node& node) const { return open_parts_.contains(&node); }
  void close_links();

  std::shared_ptr<Client::Impl> impl_;
  const net::UniqueFd event_;

  mutable std::mutex mutex_;
  std::unordered_map<std::string, uint64_t> open_;  // by name: the watch whose end was not taken
  std::vector<Watch> added_;
  std::vector<uint64_t> removed_;
  uint64_t next_serial_ = 1;
  bool woken_ = false;
  bool closed_ = false;

  // Of the thread in next().
  std::mutex in_next_;
  uint64_t now_ms_ = 0;
  uint64_t next_request_id_ = 1;
  std::unordered_map<uint64_t, Watch> watches_;
  std::unordered_map<uint64_t, PartId> parts_;  // by request id
  std::shared_ptr<const NodeMap> map_;
  std::unordered_map<const Node*, std::unique_ptr<WatchLink>> links_;
  std::unordered_map<const Node*, size_t> open_parts_;
  std::vector<uint64_t> touched_;  // watches that may have news
};

Status Watching::usable() const {
  if (Status status = impl_->usable(); !status) return status;
  const std::lock_guard lock(mutex_);
  return closed_ ? Status{Code::kClosed, "the watch is closed"} : Status::ok();
}

// For any thread ------------------------------------------------------------------------------------------

void Watching::signal() const {
  const uint64_t one = 1;
  if (event_.valid() && ::write(event_.get(), &one, sizeof one) < 0) return;  // it is readable already
}

Status Watching::parts_for(Watch& watch, std::optional<uint32_t> node) const {
  const auto map = impl_->map();
  if (map->nodes.empty()) return {Code::kNoNodes, "the cluster map has no node; is the master reachable?"};
  std::vector<uint32_t> positions;
  if (node) {
    positions.push_back(map->position(*node));
    if (positions[0] == kNoNode)
      return {Code::kUnknownNode, "no node with index " + std::to_string(*node) + " in the map"};
  } else if (map->nodes.size() > impl_->config.fanout_nodes_max) {
    return {Code::kLimitExceeded, "the cluster has " + std::to_string(map->nodes.size()) +
                                      " nodes, too many to wait at all of them: name the one"};
  } else {
    for (uint32_t position = 0; position < map->nodes.size(); ++position) positions.push_back(position);
  }
  const auto keys = static_cast<uint32_t>(watch.keys.size());
  for (const uint32_t position : positions) {
    const bool usable = impl_->may_use(*map, position);
    if (!usable) watch.failure = Code::kNodeUnavailable;
    for (uint32_t first = 0; usable && first < keys; first += wire::kMaxItems)
      watch.parts.push_back({map->nodes[position], first, std::min(wire::kMaxItems, keys - first)});
  }
  return Status::ok();
}

Status Watching::add(std::string name, std::vector<Key> keys, Deadline deadline, std::optional<uint32_t> node,
                     uint32_t news_ms) {
  if (Status status = usable(); !status) return status;
  if (keys.empty()) return {Code::kInvalidArgument, "a watch needs a key"};
  if (keys.size() > kKeysMax)
    return {Code::kLimitExceeded, "a watch has at most " + std::to_string(kKeysMax) + " keys"};
  if (deadline.remaining_ms() > static_cast<int>(wire::kMaxKeyWaitMs))
    return {Code::kInvalidArgument, "a watch lasts ten minutes at most"};
  Watch watch;
  watch.name = name;
  watch.keys = std::move(keys);
  watch.deadline = deadline;
  watch.news_ms = news_ms;
  watch.present.resize(watch.keys.size());
  watch.missing = watch.keys.size();
  if (Status status = parts_for(watch, node); !status) return status;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return {Code::kClosed, "the watch is closed"};
    if (open_.size() >= kWatchesMax)
      return {Code::kLimitExceeded, "at most " + std::to_string(kWatchesMax) + " watches are open at a time"};
    if (!open_.emplace(name, next_serial_).second)
      return {Code::kInvalidArgument, "a watch with the name \"" + name + "\" is open"};
    watch.serial = next_serial_++;
    added_.push_back(std::move(watch));
  }
  impl_->counters.add(Counter::kWatches);
  signal();
  return Status::ok();
}

bool Watching::remove(const std::string& name) {
  if (!usable()) return false;
  {
    const std::lock_guard lock(mutex_);
    const auto found = open_.find(name);
    if (found == open_.end()) return false;
    removed_.push_back(found->second);
    open_.erase(found);
  }
  signal();
  return true;
}

void Watching::wake() {
  if (impl_->in_child()) return;
  {
    const std::lock_guard lock(mutex_);
    woken_ = true;
  }
  signal();
}

void Watching::close() {
  if (impl_->in_child()) return;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    open_.clear();
    added_.clear();
    removed_.clear();
  }
  signal();
  const std::lock_guard in_next(in_next_);  // it ends soon: it looks at closed_ whenever it is signalled
  close_links();
}

// For the thread in next() --------------------------------------------------------------------------------

void Watching::close_links() {
  links_.clear();
  watches_.clear();
  parts_.clear();
  open_parts_.clear();
  touched_.clear();
}

// A node that left the map is gone, as far as the master knows: its host may not say so itself.
void Watching::take_map() {
  auto map = impl_->map();
  if (map == map_) return;
  map_ = std::move(map);
  std::vector<WatchLink*> left;
  for (const auto& entry : links_) {
    const auto same = [&](const auto& node) { return node.get() == entry.first; };
    if (std::none_of(map_->nodes.begin(), map_->nodes.end(), same)) left.push_back(entry.second.get());
  }
  for (WatchLink* link : left) lose(*link, {Code::kNodeUnavailable, "the node left the cluster map"});
}

void Watching::take_commands() {
  std::vector<Watch> added;
  std::vector<uint64_t> removed;
  {
    const std::lock_guard lock(mutex_);
    added.swap(added_);
    removed.swap(removed_);
  }
  for (Watch& watch : added) {
    const uint64_t serial = watch.serial;
    begin(watches_.emplace(serial, std::move(watch)).first->second);
  }
  for (const uint64_t serial : removed) {
    const auto found = watches_.find(serial);
    if (found == watches_.end()) continue;
    withdraw_rest(found->second);
    watches_.erase(found);
  }
}

void Watching::begin(Watch& watch) {
  if (watch.parts.empty()) end(watch, WatchState::kUnreachable);
  const auto left_ms = static_cast<uint32_t>(watch.deadline.remaining_ms());
  const uint32_t news_ms = watch.parts.size() > 1 ? std::max(watch.news_ms, kPartNewsMs) : watch.news_ms;
  for (size_t i = 0; i < watch.parts.size(); ++i) {
    Part& part = watch.parts[i];
    auto& link = links_[part.node.get()];
    if (!link || (link->outdated() && !waits_at(*part.node))) {
      link = std::make_unique<WatchLink>(
          part.node, WatchLink::Limits{impl_->config.connect_timeout_ms, impl_->config.ping_interval_ms},
          now_ms_);
    }
    part.request_id = next_request_id_++;
    parts_[part.request_id] = {watch.serial, i};
    ++open_parts_[part.node.get()];
    const auto first = watch.keys.begin() + part.first;
    link->wait(part.request_id, {left_ms, news_ms, std::vector<Key>(first, first + part.count)});
  }
}

void Watching::pump() {
  std::vector<std::pair<WatchLink*, Status>> lost;
  for (const auto& entry : links_) {
    WatchLink& link = *entry.second;
    const Status status = link.pump(
        now_ms_, waits_at(link.node()),
        [&](uint64_t id, const Status& answer, Reader& in) { return on_answer(link, id, answer, in); });
    if (!status) lost.emplace_back(&link, status);
  }
  for (auto& [link, why] : lost) lose(*link, why);
}

Status Watching::on_answer(const WatchLink& link, uint64_t request_id, const Status& status, Reader& in) {
  const auto found = parts_.find(request_id);
  if (found == parts_.end()) return Status::ok();  // withdrawn
  Watch& watch = watches_.at(found->second.serial);
  Part& part = watch.parts[found->second.part];
  if (links_.at(part.node.get()).get() != &link)
    return {Code::kProtocolError, "a node answered what another one was asked"};
  if (!status) {
    watch.failure = status.code;
    end_part(watch, part);
    return Status::ok();
  }
  const auto news = wire::WaitNews::decode(in, part.count);
  if (!news) return {Code::kProtocolError, "malformed WAIT answer"};
  on_news(watch, part, *news);
  return Status::ok();
}

void Watching::on_news(Watch& watch, Part& part, const wire::WaitNews& news) {
  touched_.push_back(watch.serial);
  for (const uint32_t position : news.positions) {
    const uint32_t at = part.first + position;
    if (watch.present[at]) continue;
    watch.present[at] = true;
    // Whoever asked for it before and was answered "not found" finds it from now on, wherever it lies.
    if (map_ && map_->nodes.size() > 1) impl_->locations.learn(watch.keys[at], part.node->info().index);
    watch.fresh.push_back(at);
    --watch.missing;
  }
  if (watch.missing == 0) end(watch, WatchState::kAll);
  if (news.state == wire::WaitState::kMore) return;
  if (news.state == wire::WaitState::kTimeout) watch.timed_out = true;
  if (news.state == wire::WaitState::kGivenUp) end(watch, WatchState::kGivenUp);
  if (news.state == wire::WaitState::kAll && watch.failure == Code::kOk)
    watch.failure = Code::kProtocolError;  // unless other WAITs have the missing keys
  end_part(watch, part);
}

// What was counted at a node that is gone now must be looked up again. One that could not be reached in the
// first place has no part in the watch.
void Watching::lose(WatchLink& link, const Status& why) {
  Node& node = link.node();
  const bool was_ready = link.ready();
  std::vector<std::pair<uint64_t, size_t>> lost;
  for (auto& [serial, watch] : watches_) {
    for (size_t i = 0; i < watch.parts.size(); ++i) {
      if (watch.parts[i].node.get() == &node && watch.parts[i].open) lost.emplace_back(serial, i);
    }
  }
  if (was_ready && !lost.empty()) node.failure(now_ms_, why, Breaker::kAtOnceMs);
  for (const auto& [serial, part] : lost) {
    Watch& watch = watches_.at(serial);
    watch.failure = why.code;
    if (watch.parts[part].open) end_part(watch, watch.parts[part]);
    if (was_ready) end(watch, WatchState::kUnreachable);
  }
  open_parts_.erase(&node);
  links_.erase(&node);
}

// The last frame of a WAIT has come, or never will. When it was the last one of its watch, that ends.
void Watching::end_part(Watch& watch, Part& part) {
  part.open = false;
  parts_.erase(part.request_id);
  if (const auto open = open_parts_.find(part.node.get()); open != open_parts_.end() && --open->second == 0)
    open_parts_.erase(open);
  const bool over =
      std::none_of(watch.parts.begin(), watch.parts.end(), [](const Part& p) { return p.open; });
  if (over) end(watch, watch.timed_out ? WatchState::kTimeout : WatchState::kUnreachable);
}

void Watching::end(Watch& watch, WatchState state) {
  if (watch.state != WatchState::kMore) return;
  watch.state = state;
  touched_.push_back(watch.serial);
}

void Watching::withdraw_rest(Watch& watch) {
  watch.state = watch.state == WatchState::kMore ? WatchState::kTimeout : watch.state;
  for (Part& part : watch.parts) {
    if (!part.open) continue;
    if (const auto link = links_.find(part.node.get()); link != links_.end())
      link->second->withdraw(part.request_id);
    end_part(watch, part);
  }
}

// The nodes say themselves that the time is over, and what there was until then; one that does not is late.
void Watching::expire() {
  for (auto& [serial, watch] : watches_) {
    if (watch.state != WatchState::kMore || !watch.deadline.expired()) continue;
    const bool asked = std::any_of(watch.parts.begin(), watch.parts.end(), [&](const Part& part) {
      return part.open && links_.at(part.node.get())->ready();
    });
    const auto late = Deadline::Clock::now() - watch.deadline.at;
    if (!asked || late > std::chrono::milliseconds(kLateMs)) end(watch, WatchState::kTimeout);
  }
}

std::vector<WatchNews> Watching::take_news() {
  std::vector<WatchNews> all;
  std::vector<uint64_t> touched = std::exchange(touched_, {});
  const std::lock_guard lock(mutex_);
  for (const uint64_t serial : touched) {
    const auto found = watches_.find(serial);
    if (found == watches_.end()) continue;  // touched twice
    Watch& watch = found->second;
    const bool over = watch.state != WatchState::kMore;
    if (!over && (watch.news_ms == 0 || watch.fresh.empty())) continue;
    WatchNews news{watch.name, std::exchange(watch.fresh, {}), watch.state, Code::kOk};
    if (watch.state == WatchState::kUnreachable) {
      news.code = watch.failure;
      impl_->counters.add(Counter::kWatchesUnreachable);
    }
    const auto open = open_.find(watch.name);
    const bool wanted = open != open_.end() && open->second == serial;  // not removed meanwhile
    if (over) {
      withdraw_rest(watch);
      if (wanted) open_.erase(open);
      watches_.erase(found);
    }
    if (wanted) all.push_back(std::move(news));
  }
  return all;
}

void Watching::sleep(const CallOptions& options, InterruptLook& look) {
  std::vector<pollfd> polled{{event_.get(), POLLIN, 0}};
  if (options.cancel != nullptr) polled.push_back({options.cancel->fd(), POLLIN, 0});
  int timeout_ms = std::min(options.deadline.remaining_ms(), kLookMs);
  for (const auto& [node, link] : links_) {
    const uint64_t due_ms = link->due_ms(waits_at(*node));
    const uint64_t left_ms = due_ms - std::min(due_ms, now_ms_);
    timeout_ms = static_cast<int>(std::min<uint64_t>(left_ms, static_cast<uint64_t>(timeout_ms)));
    if (link->fd() >= 0) polled.push_back({link->fd(), link->events(), 0});
  }
  for (const auto& [serial, watch] : watches_) {
    const int left_ms = watch.deadline.remaining_ms();
    timeout_ms = std::min(timeout_ms, left_ms > 0 ? left_ms : static_cast<int>(kLateMs / 10));
  }
  if (::poll(polled.data(), polled.size(), look.limit(timeout_ms)) < 0) look.soon();
  uint64_t ignored;
  if ((polled[0].revents & POLLIN) != 0) (void)!::read(event_.get(), &ignored, sizeof ignored);
}

Result<std::vector<WatchNews>> Watching::next(const CallOptions& options) {
  if (Status status = usable(); !status) return status;
  const std::unique_lock in_next(in_next_, std::try_to_lock);
  if (!in_next.owns_lock()) return {Code::kInvalidArgument, "another thread is in next()"};
  InterruptLook look(options.interrupted);
  for (;;) {
    if (Status status = usable(); !status) return status;
    now_ms_ = steady_ms();
    take_map();
    pump();  // before new WAITs: a connection that the node has closed meanwhile is not used for them
    take_commands();
    pump();
    expire();
    if (auto news = take_news(); !news.empty()) return news;
    {
      const std::lock_guard lock(mutex_);
      if (std::exchange(woken_, false)) return std::vector<WatchNews>{};
    }
    if (look.interrupted()) return InterruptLook::status();
    if (options.cancel != nullptr && options.cancel->cancelled())
      return Status{Code::kCancelled, "cancelled by the caller"};
    if (options.deadline.expired()) return std::vector<WatchNews>{};
    sleep(options, look);
  }
}

}  // namespace

std::unique_ptr<BlockWatch> Client::watch() {
  return std::make_unique<Watching>(impl_);
}

}  // namespace mooncache
