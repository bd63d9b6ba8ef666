// reserve: every block gets a node by placement, as for put; all nodes are asked in parallel. What one
// refuses goes to the next node in the block's order, within the retry budget.
#include <poll.h>

#include <algorithm>
#include <map>

#include "client/reservations.h"

namespace mooncache {

namespace {

// Between two requests for space.
constexpr int kRetryMs = 20;
// How long the node may hold a request for space on a lane that no other caller uses: who joins it waits so
// long.
constexpr int kHoldMs = 100;
// Of one request; what a node is asked for beyond it goes to another lane.
constexpr size_t kRequestItems = 1024;
constexpr size_t kPlaces = 4;

// Another node would say the same, or there is no time to ask it.
bool is_final(Code code) {
  return code == Code::kAlreadyExists || code == Code::kTooLarge || code == Code::kCancelled ||
         code == Code::kDeadlineExceeded || code == Code::kQuotaExceeded || code == Code::kClosed;
}

class ReserveCall {
 public:
  ReserveCall(Client::Impl& impl, std::span<const Key> keys, uint64_t size, const CallOptions& options,
              Reservations& into)
      : impl_(impl), keys_(keys), size_(size), options_(options), into_(into), map_(impl.map()) {}

  Status run() {
    if (map_->nodes.empty()) return {Code::kNoNodes, "the cluster map has no node; is the master reachable?"};
    if (Status status = find_places(); !status) return status;
    for (size_t round = 0; round <= kPlaces; ++round) {
      assign();
      if (asked_.empty()) break;
      ask();
      if (failures_ == 0 || impl_.take_retries(failures_) != failures_) break;
    }
    for (uint32_t i = 0; i < items_.size(); ++i) {
      if (!items_[i].reserved) into_.refuse(i, items_[i].last);
    }
    return Status::ok();
  }

 private:
  struct Item {
    std::vector<uint32_t> places;  // positions, best first
    size_t next = 0;               // of the places
    uint32_t place() const { return places[next]; }
    Status last{Code::kNodeUnavailable, "no node takes new blocks now"};
    bool lost_once = false;
    bool reserved = false;
    bool given_up = false;
  };
  // One request.
  struct Asking {
    Asking(Client::Impl& impl, std::shared_ptr<Node> node_in, std::vector<uint32_t> items_in)
        : node(std::move(node_in)),
          items(std::move(items_in)),
          lane(impl, node, static_cast<uint32_t>(items.size())) {}
    std::shared_ptr<Node> node;
    std::vector<uint32_t> items;
    RoomyLane lane;
    std::vector<Granted<wire::ReserveResult>> answer;  // empty: none came
  };

  Status find_places() {
    items_.resize(keys_.size());
    if (options_.node) {
      const uint32_t position = map_->position(*options_.node);
      if (position == kNoNode)
        return {Code::kUnknownNode, "no node with index " + std::to_string(*options_.node)};
      for (Item& item : items_) item.places.push_back(position);
      return Status::ok();
    }
    const uint32_t preferred = options_.prefer_node ? map_->position(*options_.prefer_node) : kNoNode;
    const bool first = preferred != kNoNode && takes_new_blocks(map_->infos[preferred]);
    for (size_t i = 0; i < items_.size(); ++i) {
      std::vector<uint32_t>& places = items_[i].places;
      if (first) places.push_back(preferred);
      for (const uint32_t position : place(keys_[i], map_->infos, impl_.config.host_id, kPlaces)) {
        if (places.empty() || position != places.front()) places.push_back(position);
      }
    }
    return Status::ok();
  }

  void assign() {
    asked_.clear();
    std::map<uint32_t, bool> usable;
    for (uint32_t i = 0; i < items_.size(); ++i) {
      Item& item = items_[i];
      if (item.reserved || item.given_up) continue;
      for (; item.next < item.places.size(); ++item.next) {
        const uint32_t position = item.place();
        const auto known = usable.find(position);
        const bool use = known != usable.end() ? known->second : impl_.may_use(*map_, position);
        usable[position] = use;
        if (!use) continue;
        asked_[position].push_back(i);
        break;
      }
    }
  }

  // Asks all nodes of this round, again and again where there is no space, until there is some, the wait for
  // it is over, or the caller's patience ends.
  void ask() {
    const auto patience_ms =
        std::min(impl_.config.put_wait_ms, static_cast<uint32_t>(options_.deadline.remaining_ms(60'000)) / 2);
    const Deadline until = Deadline::after_ms(static_cast<int>(patience_ms));
    failures_ = 0;
    while (!asked_.empty()) {
      std::vector<std::unique_ptr<Asking>> askings;
      for (const auto& [position, items] : asked_) {
        for (size_t at = 0; at < items.size(); at += kRequestItems) {
          const auto first = items.begin() + static_cast<ptrdiff_t>(at);
          const auto last =
              items.begin() + static_cast<ptrdiff_t>(std::min(at + kRequestItems, items.size()));
          askings.push_back(
              std::make_unique<Asking>(impl_, map_->nodes[position], std::vector<uint32_t>(first, last)));
        }
      }
      send(askings, until);
      const bool over = until.expired();
      std::map<uint32_t, std::vector<uint32_t>> again;
      for (const auto& asking : askings) {
        for (const uint32_t i : settle(*asking, over)) again[items_[i].place()].push_back(i);
      }
      asked_ = std::move(again);
      if (asked_.empty()) return;
      if (Status status = pause(until); !status) return give_up(status);
    }
  }

  void send(std::span<const std::unique_ptr<Asking>> askings, Deadline until) {
    std::vector<LaneTask> tasks(askings.size());
    for (size_t i = 0; i < askings.size(); ++i) {
      Asking& asking = *askings[i];
      tasks[i].node = asking.node;
      tasks[i].lanes = &asking.lane;
      tasks[i].has_alternative = !options_.node && map_->nodes.size() > 1;
      tasks[i].may_hold_ms = kHoldMs;
      tasks[i].make_program = [this, &asking, until](Session& session) {
        return make(asking, session, until);
      };
    }
    impl_.run(tasks, options_, true);
    for (size_t i = 0; i < askings.size(); ++i) note(*askings[i], tasks[i].status);
  }

  std::unique_ptr<Program> make(Asking& asking, Session& session, Deadline until) {
    wire::ReserveRequest wanted;
    if (asking.lane.alone()) wanted.wait_ms = static_cast<uint32_t>(until.remaining_ms(kHoldMs));
    for (const uint32_t i : asking.items) wanted.items.push_back({keys_[i], size_});
    const bool worth_link = session.route() == Route::kUnix ||
                            worth_rdma(impl_.config, size_ * asking.items.size(), asking.items.size());
    std::unique_ptr<LinkOpener> opener;
    if (worth_link && asking.lane.lane()->may_have_link(*asking.node, session))
      opener = std::make_unique<LinkOpener>(*asking.node, session);
    const LinkOpener* opened = opener.get();
    return std::make_unique<ReserveProgram>(
        std::move(wanted), std::move(opener), [&asking, opened](auto granted) {
          if (opened != nullptr && opened->unavailable() && !opened->rdma())
            asking.lane.lane()->link_refused();
          asking.answer = std::move(granted);
        });
  }

  // A request that was not answered.
  void note(Asking& asking, const Status& status) {
    if (!asking.answer.empty()) return;
    const bool full = asking.lane.full() && status.code == Code::kClosed;
    for (const uint32_t i : asking.items) {
      items_[i].last = full ? Status{Code::kLimitExceeded,
                                     "too many open reservations on node " + asking.node->info().node_id}
                            : status;
    }
  }

  // Books an answer. Returns what is to be asked again at this node.
  std::vector<uint32_t> settle(Asking& asking, bool over) {
    std::vector<uint32_t> again;
    std::vector<Reservations::Granted> granted;
    bool failed = false;
    for (size_t k = 0; k < asking.items.size(); ++k) {
      const uint32_t i = asking.items[k];
      Item& item = items_[i];
      if (!asking.answer.empty()) {
        const Code code = asking.answer[k].result.code;
        if (code == Code::kOk) {
          granted.push_back({i, asking.answer[k].extent});
          item.reserved = true;
          continue;
        }
        item.last = {code,
                     "node " + asking.node->info().node_id + " answered " + std::string(code_name(code))};
        if (code == Code::kNoSpace && !over) {
          again.push_back(i);
          continue;
        }
      }
      failed = move_on(item) || failed;
    }
    auto lane = asking.lane.keep(static_cast<uint32_t>(granted.size()));
    if (!granted.empty()) into_.take(asking.node, std::move(lane), granted);
    failures_ += failed ? 1 : 0;
    return again;
  }

  // To the next place; false: there is none that would take it.
  bool move_on(Item& item) {
    const Code code = item.last.code;
    if (code == Code::kConnectionLost && !item.lost_once)
      item.lost_once = true;  // says nothing about the node: once more there
    else
      ++item.next;
    item.given_up = is_final(code) || item.next >= item.places.size();
    return !item.given_up;
  }

  Status pause(Deadline until) {
    InterruptLook look(options_.interrupted);
    pollfd cancel{options_.cancel ? options_.cancel->fd() : -1, POLLIN, 0};
    if (poll(&cancel, 1, until.remaining_ms(kRetryMs)) < 0) look.soon();
    if (look.interrupted()) return InterruptLook::status();
    return impl_.check_call(1, options_);
  }

  void give_up(const Status& status) {
    for (const auto& [position, items] : asked_) {
      for (const uint32_t i : items) items_[i].last = status;
    }
    failures_ = 0;
  }

  Client::Impl& impl_;
  const std::span<const Key> keys_;
  const uint64_t size_;
  const CallOptions& options_;
  Reservations& into_;
  const std::shared_ptr<const NodeMap> map_;
  std::vector<Item> items_;
  std::map<uint32_t, std::vector<uint32_t>> asked_;  // by position; of this round
  uint64_t failures_ = 0;  // requests of this round that left blocks for another node
};

}  // namespace

Result<std::unique_ptr<Reservations>> Client::Impl::reserve(std::span<const Key> keys, uint64_t size_bytes,
                                                            const CallOptions& options) {
  if (Status status = check_call(keys.size(), options); !status) return status;
  if (size_bytes == 0 || size_bytes > wire::kMaxPayloadBytes) {
    return {size_bytes == 0 ? Code::kInvalidArgument : Code::kTooLarge, "a block has 1 byte to 1 GiB"};
  }
  auto made = std::make_unique<Reservations>(shared_from_this(), keys.size(), size_bytes);
  if (keys.empty()) return made;
  ran_operations(keys.size());
  Status status = ReserveCall(*this, keys, size_bytes, options, *made).run();
  if (!status) return status;
  return made;
}

}  // namespace mooncache
