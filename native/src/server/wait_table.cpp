#include "server/wait_table.h"

#include <sys/random.h>

#include <algorithm>

namespace mooncache::server {

using wire::WaitState;

namespace {

uint64_t fold(uint64_t a, uint64_t b) {
  const auto product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

}  // namespace

struct WaitTable::Wait {
  Group& group;
  Owner& owner;
  const uint64_t request_id;
  const TenantId tenant;
  const std::vector<Key> keys;
  const uint32_t news_ms;
  const uint64_t heartbeat_ms;  // 0: none are wanted
  const uint64_t deadline_ms;
  std::vector<Place> places{};  // one for each key; those without a wait are in no list: the key is present
  size_t missing = 0;
  std::vector<uint32_t> fresh{};  // present, and in no frame so far
  uint64_t news_after_ms = 0;
  std::optional<WaitState> last{};  // the state that it ends with
  uint64_t due_ms = kNever;         // as it is in the group's list; kNever: it is not in it
};

size_t WaitTable::Hash::operator()(const Name& name) const {
  return fold(fold(name.key.word(0) ^ seeds[0], name.key.word(1) ^ seeds[1]) ^ name.tenant,
              fold(name.key.word(2) ^ seeds[1], name.key.word(3) ^ seeds[0]) ^ seeds[1]);
}

WaitTable::WaitTable(Limits limits)
    : limits_(limits),
      hash_([] {
        Hash hash;
        (void)!::getrandom(hash.seeds, sizeof hash.seeds, 0);
        for (uint64_t& seed : hash.seeds) seed |= 1;
        return hash;
      }()),
      places_(0, hash_),
      given_up_(0, hash_) {}

WaitTable::~WaitTable() = default;

// Waits -------------------------------------------------------------------------------------------------

Status WaitTable::add(Group& group, Owner& owner, uint64_t request_id, TenantId tenant,
                      const wire::WaitRequest& request, uint64_t now_ms) {
  if (owner.open_waits_ >= limits_.waits_per_owner) {
    return {Code::kLimitExceeded,
            "a connection has at most " + std::to_string(limits_.waits_per_owner) + " waits at a time"};
  }
  const uint64_t timeout_ms = std::min(request.timeout_ms, wire::kMaxKeyWaitMs);
  const uint64_t heartbeat_ms =
      request.heartbeat_ms == 0 ? 0 : std::max<uint64_t>(request.heartbeat_ms, kHeartbeatMinMs);
  std::unique_ptr<Wait> made(new Wait{group, owner, request_id, tenant, request.keys, request.news_ms,
                                      heartbeat_ms, now_ms + timeout_ms});
  Wait& wait = *made;
  Woken woken;
  {
    const std::lock_guard lock(mutex_);
    if (keys_ + wait.keys.size() > limits_.keys) {
      return {Code::kLimitExceeded,
              "at most " + std::to_string(limits_.keys) + " keys are waited for at a node at a time"};
    }
    if (!waits_.emplace(std::pair(&owner, request_id), std::move(made)).second)
      return {Code::kInvalidArgument, "a WAIT with this request id is open already"};
    ++owner.open_waits_;
    keys_ += wait.keys.size();
    wait.places.resize(wait.keys.size());
    wait.missing = wait.keys.size();
    for (uint32_t position = 0; position < wait.keys.size(); ++position) link(wait, position);
    schedule(wait, woken);
    count();
  }
  wake(woken);
  return Status::ok();
}

void WaitTable::report_present(Owner& owner, uint64_t request_id, std::span<const uint32_t> positions,
                               uint64_t now_ms) {
  Woken woken;
  {
    const std::lock_guard lock(mutex_);
    Wait* const wait = find(owner, request_id);
    if (wait == nullptr) return;
    for (const uint32_t position : positions) mark_present(*wait, position);
    const auto is_given_up = [&](const Place& place) {
      if (place.wait == nullptr) return false;
      const auto found = given_up_.find({wait->tenant, wait->keys[place.position]});
      return found != given_up_.end() && now_ms < found->second;
    };
    if (!given_up_.empty() && std::any_of(wait->places.begin(), wait->places.end(), is_given_up))
      end(*wait, WaitState::kGivenUp, woken);
    else
      schedule(*wait, woken);
  }
  wake(woken);
}

void WaitTable::withdraw(Owner& owner, uint64_t request_id) {
  Woken woken;
  {
    const std::lock_guard lock(mutex_);
    if (Wait* const wait = find(owner, request_id)) end(*wait, WaitState::kWithdrawn, woken);
  }
  wake(woken);
}

uint32_t WaitTable::forget(Owner& owner) {
  if (owner.open_waits_ == 0) return 0;
  Woken woken;
  const std::lock_guard lock(mutex_);
  uint32_t forgotten = 0;
  for (auto at = waits_.lower_bound({&owner, 0}); at != waits_.end() && at->first.first == &owner;) {
    Wait& wait = *at->second;
    ++at;
    remove(wait);
    ++forgotten;
  }
  count();
  return forgotten;
}

void WaitTable::send_due(Group& group, uint64_t now_ms) {
  std::vector<std::pair<Owner*, News>> due;
  {
    Woken ignored;
    const std::lock_guard lock(mutex_);
    while (!group.due_.empty() && group.due_.begin()->first <= now_ms) {
      Wait& wait = *group.due_.begin()->second;
      if (std::optional<News> news = news_of(wait, now_ms)) {
        wait.owner.spoken_ms_ = now_ms;
        due.emplace_back(&wait.owner, std::move(*news));
        if (due.back().second.state != WaitState::kMore) {
          remove(wait);
          continue;
        }
      }
      schedule(wait, ignored);
    }
    publish_due(group, ignored);
    count();
  }
  // An owner that ends meanwhile lives on until the thread's turn is over.
  for (const auto& [owner, news] : due) owner->send_news(news);
}

// Nothing: the owner has heard of another wait meanwhile, and that was a sign of life.
std::optional<WaitTable::News> WaitTable::news_of(Wait& wait, uint64_t now_ms) {
  const bool over = wait.last || now_ms >= wait.deadline_ms;
  const bool fresh = wait.news_ms != 0 && !wait.fresh.empty() && now_ms >= wait.news_after_ms;
  if (!over && !fresh) {
    if (wait.heartbeat_ms == 0 || now_ms < wait.owner.spoken_ms_ + wait.heartbeat_ms) return std::nullopt;
    return News{wait.request_id, WaitState::kMore, {}, true};
  }
  wait.news_after_ms = now_ms + wait.news_ms;
  const WaitState state = over ? wait.last.value_or(WaitState::kTimeout) : WaitState::kMore;
  return News{wait.request_id, state, std::exchange(wait.fresh, {}), false};
}

// What happens to keys ----------------------------------------------------------------------------------

void WaitTable::mark_committed(TenantId tenant, const Key& key) {
  Woken woken;
  {
    const std::lock_guard lock(mutex_);
    const Name name{tenant, key};
    forget_given_up(name);
    const auto found = places_.find(name);
    Place* place = found == places_.end() ? nullptr : found->second;
    while (place != nullptr) {
      Place& marked = *std::exchange(place, place->next);
      Wait& wait = *marked.wait;
      mark_present(wait, marked.position);
      schedule(wait, woken);
    }
    count();
  }
  wake(woken);
}

uint32_t WaitTable::give_up(TenantId tenant, std::span<const Key> keys, uint64_t now_ms) {
  Woken woken;
  uint32_t ended = 0;
  {
    const std::lock_guard lock(mutex_);
    for (const Key& key : keys) {
      const Name name{tenant, key};
      const auto found = places_.find(name);
      for (Place* place = found == places_.end() ? nullptr : found->second; place != nullptr;
           place = place->next) {
        ended += place->wait->last ? 0 : 1;
        end(*place->wait, WaitState::kGivenUp, woken);
      }
      given_up_[name] = now_ms + kGivenUpMs;
      given_up_order_.emplace_back(now_ms + kGivenUpMs, name);
      while (given_up_order_.size() > kGivenUpKeys) {
        const auto [until_ms, oldest] = given_up_order_.front();
        given_up_order_.pop_front();
        const auto known = given_up_.find(oldest);
        if (known != given_up_.end() && known->second == until_ms) given_up_.erase(known);
      }
    }
    count();
  }
  wake(woken);
  return ended;
}

void WaitTable::expire_given_up(uint64_t now_ms) {
  const std::lock_guard lock(mutex_);
  while (!given_up_order_.empty() && given_up_order_.front().first <= now_ms) {
    const auto [until_ms, oldest] = given_up_order_.front();
    given_up_order_.pop_front();
    const auto known = given_up_.find(oldest);
    if (known != given_up_.end() && known->second <= now_ms) given_up_.erase(known);
  }
  count();
}

void WaitTable::forget_given_up(const Name& name) {
  if (!given_up_.empty()) given_up_.erase(name);
}

// The lock is held ----------------------------------------------------------------------------------------

WaitTable::Wait* WaitTable::find(Owner& owner, uint64_t request_id) {
  const auto found = waits_.find({&owner, request_id});
  return found == waits_.end() ? nullptr : found->second.get();
}

void WaitTable::link(Wait& wait, uint32_t position) {
  Place& place = wait.places[position];
  place.wait = &wait;
  place.position = position;
  Place*& first = places_[{wait.tenant, wait.keys[position]}];
  place.next = first;
  if (first != nullptr) first->previous = &place;
  first = &place;
}

void WaitTable::unlink(Place& place) {
  if (place.next != nullptr) place.next->previous = place.previous;
  if (place.previous != nullptr) {
    place.previous->next = place.next;
  } else {
    const auto found = places_.find({place.wait->tenant, place.wait->keys[place.position]});
    if (place.next != nullptr)
      found->second = place.next;
    else
      places_.erase(found);
  }
  place.wait = nullptr;
  place.previous = place.next = nullptr;
}

void WaitTable::mark_present(Wait& wait, uint32_t position) {
  Place& place = wait.places[position];
  if (place.wait == nullptr) return;
  unlink(place);
  wait.fresh.push_back(position);
  if (--wait.missing == 0 && !wait.last) wait.last = WaitState::kAll;
}

void WaitTable::end(Wait& wait, WaitState state, Woken& woken) {
  if (!wait.last) wait.last = state;
  schedule(wait, woken);
}

void WaitTable::schedule(Wait& wait, Woken& woken) {
  uint64_t due_ms = wait.deadline_ms;
  if (wait.news_ms != 0 && !wait.fresh.empty()) due_ms = std::min(due_ms, wait.news_after_ms);
  if (wait.heartbeat_ms != 0) due_ms = std::min(due_ms, wait.owner.spoken_ms_ + wait.heartbeat_ms);
  if (wait.last) due_ms = 0;
  if (due_ms == wait.due_ms) return;
  if (wait.due_ms != kNever) wait.group.due_.erase({wait.due_ms, &wait});
  wait.due_ms = due_ms;
  wait.group.due_.emplace(due_ms, &wait);
  publish_due(wait.group, woken);
}

void WaitTable::publish_due(Group& group, Woken& woken) {
  const uint64_t due_ms = group.due_.empty() ? kNever : group.due_.begin()->first;
  const uint64_t before_ms = group.next_due_ms_.exchange(due_ms);
  if (due_ms < before_ms && std::find(woken.begin(), woken.end(), &group) == woken.end())
    woken.push_back(&group);
}

void WaitTable::remove(Wait& wait) {
  for (Place& place : wait.places) {
    if (place.wait != nullptr) unlink(place);
  }
  Group& group = wait.group;
  group.due_.erase({wait.due_ms, &wait});
  keys_ -= wait.keys.size();
  --wait.owner.open_waits_;
  waits_.erase({&wait.owner, wait.request_id});
}

void WaitTable::count() {
  open_waits_.store(waits_.size());
  open_keys_.store(keys_);
  active_.store(waits_.size() + given_up_order_.size());
}

void WaitTable::wake(const Woken& woken) {
  for (Group* group : woken) group->wake_();
}

}  // namespace mooncache::server
