#include "server/loop.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <thread>
#include <utility>

#include "base/short_slices.h"
#include "server/connection.h"

namespace mooncache::server {

namespace {

constexpr int kEventsPerTurn = 256;
constexpr int kAcceptsPerTurn = 64;
// Connections beyond max_connections that are kept until they have heard why they are refused.
constexpr uint32_t kMaxSurplus = 32;
// A request of few bytes that comes in the middle of a turn waits for the rest of it, so a turn is short:
// first all that is small, then the long transfers until this many bytes have moved. The others come first in
// the next turn.
constexpr uint64_t kTurnBytes = 1 << 20;
constexpr Visit kShortVisit{64 << 10, 32 << 10, 256 << 10};
constexpr Visit kLongVisit{256 << 10, 512 << 10, 1 << 20};
constexpr uint64_t kTickMs = 250;
constexpr uint64_t kIdleTickMs = 1000;
// Parked connections try again this often even if no wake-up came.
constexpr uint64_t kParkedRetryMs = 50;
constexpr uint64_t kListenRetryMs = 20;

}  // namespace

uint64_t Loop::now_ns() {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                   std::chrono::steady_clock::now().time_since_epoch())
                                   .count());
}

Loop::Loop(Shared& shared)
    : shared_(shared),
      visit_(&kLongVisit),
      waits_([this] { wake(); }),
      scratch_(kScratchBytes),
      discard_(kScratchBytes) {
  now_ms_ = StoreServer::now_ms();
}

Loop::~Loop() = default;

Status Loop::open() {
  epoll_ = net::UniqueFd(epoll_create1(EPOLL_CLOEXEC));
  wake_fd_ = net::UniqueFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!epoll_.valid() || !wake_fd_.valid()) {
    return {Code::kInternal, "cannot create an epoll loop: " + net::errno_text(errno)};
  }
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.ptr = &wake_watched_;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_fd_.get(), &event) != 0) {
    return {Code::kInternal, "epoll_ctl: " + net::errno_text(errno)};
  }
  keep_spare();
  return Status::ok();
}

void Loop::listen(std::vector<std::unique_ptr<Listener>> listeners, std::vector<Loop*> loops) {
  listeners_ = std::move(listeners);
  loops_ = std::move(loops);
  resume_listening();
}

// Small requests of others wait behind a disk's thread that copies, and behind whatever else the host runs.
void Loop::run() {
  ask_for_short_slices();
  std::array<epoll_event, kEventsPerTurn> events;
  for (;;) {
    const int count = epoll_wait(epoll_.get(), events.data(), kEventsPerTurn, wait_ms());
    now_ms_ = StoreServer::now_ms();
    turn_bytes_ = 0;
    visit_ = &kShortVisit;
    for (int i = 0; i < count; ++i) {
      auto* watched = static_cast<Watched*>(events[static_cast<size_t>(i)].data.ptr);
      if (watched->kind == Watched::Kind::kConnection) {
        ready(*static_cast<Connection*>(watched), events[static_cast<size_t>(i)].events);
      } else if (watched->kind == Watched::Kind::kListener) {
        accept_some(*static_cast<Listener*>(watched));
      } else {
        uint64_t ignored;
        (void)!::read(wake_fd_.get(), &ignored, sizeof ignored);
        woken_.store(false);
        take_newcomers();
        take_landed();
      }
    }
    visit_ = &kLongVisit;
    run_queue();
    retry_parked();
    if (now_ms_ >= waits_.next_due_ms()) shared_.waits.send_due(waits_, now_ms_);
    metrics.turn_bytes_max.raise(turn_bytes_);
    if (now_ms_ >= next_tick_ms_) tick();
    if (some_paused_ && now_ms_ >= listening_retry_ms_) resume_listening();
    close_largest();
    remove_dead();
    if (stopping_.load()) {
      advance_stop();
      if (connections_.empty()) return;
    }
  }
}

int Loop::wait_ms() const {
  if (!queue_.empty() || space_freed_.load()) return 0;
  if (stopping_.load()) return 5;
  uint64_t wait = connections_.empty() ? kIdleTickMs : kTickMs;
  if (!parked_.empty()) wait = kParkedRetryMs;
  for (const auto& [ticket, parked] : parked_) {
    const uint64_t until = parked->session().wait.deadline_ms;
    wait = std::min(wait, until > now_ms_ ? until - now_ms_ : 0);
  }
  if (const uint64_t due_ms = waits_.next_due_ms(); due_ms != WaitTable::kNever)
    wait = std::min(wait, due_ms > now_ms_ ? due_ms - now_ms_ : 0);
  if (some_paused_) wait = std::min(wait, kListenRetryMs);
  return static_cast<int>(wait);
}

void Loop::wake() {
  if (woken_.exchange(true)) return;
  const uint64_t one = 1;
  (void)!::write(wake_fd_.get(), &one, sizeof one);
}

void Loop::adopt(Newcomer newcomer) {
  load_.fetch_add(1, std::memory_order_relaxed);
  {
    const std::lock_guard lock(mutex_);
    newcomers_.push_back(std::move(newcomer));
  }
  wake();
}

void Loop::space_freed() {
  if (!space_freed_.exchange(true)) wake();
}

void Loop::stop(Deadline deadline) {
  {
    const std::lock_guard lock(mutex_);
    stop_deadline_ = deadline;
  }
  stopping_.store(true);
  wake();
}

// Accepting -------------------------------------------------------------------------------------------

void Loop::accept_some(Listener& listener) {
  for (int i = 0; i < kAcceptsPerTurn && !stopping_.load(); ++i) {
    if (shared_.too_many_unauthenticated(listener.is_unix)) {
      next_tick_ms_ = now_ms_;  // who was refused and lingers makes room at once
      return pause(listener);
    }
    int error = 0;
    const net::SocketOptions options{shared_.config.socket_buffer_bytes, shared_.config.socket_buffer_bytes,
                                     shared_.config.peer_timeout_ms};
    net::UniqueFd fd = net::accept_connection(listener.fd.get(), options, &error);
    if (!fd.valid()) {
      if (error != 0) accept_failed(listener, error);
      return;
    }
    accept_failing_ = false;
    // Those beyond the limit hear why, as long as they are not too many.
    const uint32_t limit = shared_.config.max_connections;
    const uint32_t open = shared_.connections.load();
    const bool surplus = open - std::min(open, shared_.surplus.load()) >= limit;
    if (surplus && !std::exchange(full_, true)) {
      shared_.log.push(30, "connection_refused", std::to_string(limit) + " connections are open, the limit");
    }
    full_ = surplus;
    if (surplus && shared_.surplus.load() >= kMaxSurplus) {
      metrics.closed[static_cast<size_t>(CloseReason::kCapacity)].add();
      continue;
    }
    if (surplus) shared_.surplus.fetch_add(1);
    metrics.connections_accepted.add();
    shared_.connections.fetch_add(1);
    shared_.strangers(listener.is_unix).fetch_add(1);
    Loop* least = *std::min_element(loops_.begin(), loops_.end(),
                                    [](const Loop* a, const Loop* b) { return a->load() < b->load(); });
    if (least == this) {
      load_.fetch_add(1, std::memory_order_relaxed);
      install({std::move(fd), listener.is_unix, surplus, listener.tls});
    } else {
      least->adopt({std::move(fd), listener.is_unix, surplus, listener.tls});
    }
  }
}

void Loop::keep_spare() {
  if (!spare_.valid()) spare_ = net::UniqueFd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
}

// Out of descriptors or memory. With the spare descriptor those who wait are taken and closed: they ask
// elsewhere at once instead of waiting for their time to end. The state is logged once.
void Loop::accept_failed(Listener& listener, int error) {
  if (!std::exchange(accept_failing_, true)) {
    shared_.log.push(40, "accept_failed",
                     net::errno_text(error) + "; new connections are closed until it ends");
  }
  if (error == EMFILE || error == ENFILE) {
    for (int i = 0; i < kAcceptsPerTurn; ++i) {
      spare_.reset();
      int ignored = 0;
      if (!net::accept_connection(listener.fd.get(), {}, &ignored).valid()) break;
      metrics.closed[static_cast<size_t>(CloseReason::kCapacity)].add();
    }
    keep_spare();
  }
  pause(listener);
}

void Loop::pause(Listener& listener) {
  if (listener.paused) return;
  (void)epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, listener.fd.get(), nullptr);
  listener.paused = true;
  some_paused_ = true;
  listening_retry_ms_ = now_ms_ + kListenRetryMs;
}

void Loop::resume_listening() {
  listening_retry_ms_ = now_ms_ + kListenRetryMs;
  some_paused_ = false;
  for (const auto& listener : listeners_) {
    if (!listener->paused) continue;
    if (shared_.too_many_unauthenticated(listener->is_unix)) {
      some_paused_ = true;
      continue;
    }
    listener->paused = false;
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.ptr = static_cast<Watched*>(listener.get());
    (void)epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, listener->fd.get(), &event);
  }
}

void Loop::take_newcomers() {
  std::vector<Newcomer> newcomers;
  {
    const std::lock_guard lock(mutex_);
    newcomers.swap(newcomers_);
  }
  for (Newcomer& newcomer : newcomers) install(std::move(newcomer));
}

void Loop::install(Newcomer newcomer) {
  std::unique_ptr<net::Stream> stream;
  if (newcomer.tls != nullptr) {
    auto wrapped = newcomer.tls->wrap(std::move(newcomer.fd), "");
    if (wrapped) stream = std::move(*wrapped);
  } else {
    stream = net::make_plain_stream(std::move(newcomer.fd));
  }
  if (stream == nullptr) {
    metrics.closed[static_cast<size_t>(CloseReason::kTls)].add();
    shared_.connections.fetch_sub(1);
    if (newcomer.surplus) shared_.surplus.fetch_sub(1);
    shared_.strangers(newcomer.is_unix).fetch_sub(1);
    load_.fetch_sub(1, std::memory_order_relaxed);
    return;
  }
  const int fd = stream->fd();
  connections_.push_back(std::make_unique<Connection>(*this, std::move(stream), newcomer.is_unix));
  Connection& connection = *connections_.back();
  connection.index = connections_.size() - 1;
  connection.session().serial = next_serial_++;
  if (newcomer.surplus) connection.session().surplus = true;
  metrics.connections_open.add();
  metrics.unauthenticated_open.add();
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.ptr = static_cast<Watched*>(&connection);
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) connection.destroy(CloseReason::kPeer);
}

// For connections ---------------------------------------------------------------------------------------

void Loop::watch(Connection& connection, uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.ptr = static_cast<Watched*>(&connection);
  (void)epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, connection.fd(), &event);
}

void Loop::run_again(Connection& connection) {
  connection.again = true;
  enqueue(connection);
}

void Loop::enqueue(Connection& connection) {
  if (!std::exchange(connection.queued, true)) queue_.push_back(&connection);
}

// The beginning or the end of a connection, and what is short, at once; a long transfer in its turn.
void Loop::ready(Connection& connection, uint32_t events) {
  if ((events & (EPOLLERR | EPOLLHUP)) != 0 || !connection.session().in_transfer()) {
    connection.on_event(events);
    return connection.account();
  }
  connection.ready_events = events;
  enqueue(connection);
}

void Loop::park(Connection& connection) {
  metrics.parked_now.add();
  if (parked_.empty()) parked_retry_ms_ = now_ms_ + kParkedRetryMs;
  parked_.emplace(connection.session().wait.ticket, &connection);
  publish_longest_wait();
  // What was freed since the attempt may have gone by: it was not known yet that this one waits.
  if (shared_.space_releases.load() != releases_seen_) space_freed_.store(true);
}

// Deregistered here, not by close(): a forked child may hold the socket open, and epoll would go on to report
// it.
void Loop::dead(Connection& connection) {
  (void)epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, connection.fd(), nullptr);
  dead_.push_back(&connection);
}

// One of them at least: what came first in this turn may have used up all of it. Between them others may have
// the processor: a loop that is always busy would be taken off it for whole slices of the scheduler.
void Loop::run_queue() {
  const size_t all = queue_.size();
  for (size_t left = all; left > 0 && (left == all || turn_bytes_ < kTurnBytes); --left) {
    Connection& connection = *queue_.front();
    queue_.pop_front();
    connection.queued = false;
    const uint32_t events = std::exchange(connection.ready_events, 0);
    const bool again = std::exchange(connection.again, false);
    if (events != 0) connection.on_event(events);
    if (again) connection.on_turn();
    connection.account();
    std::this_thread::yield();
  }
}

// In the order in which they came, those of the other loops included. Who waits longest gets what was freed,
// until there is no more: those behind one that got nothing would get nothing either. Only of another
// tenant, which has another quota, one more is tried.
void Loop::retry_parked() {
  bool freed = space_freed_.exchange(false);
  const bool all = !parked_.empty() && now_ms_ >= parked_retry_ms_;
  if (all) parked_retry_ms_ = now_ms_ + kParkedRetryMs;
  uint64_t tried = 0;
  std::vector<TenantId> refused;
  for (auto at = parked_.begin(); at != parked_.end();) {
    const uint64_t ticket = at->first;
    Connection& connection = *at->second;
    bool wakes =
        freed && std::find(refused.begin(), refused.end(), connection.session().who.tenant) == refused.end();
    // Another loop has one that comes first, and continues from there.
    if (wakes && tried != 0 && shared_.wake_waiter(tried, ticket)) wakes = freed = false;
    if (connection.parked() && !wakes && !all && now_ms_ < connection.session().wait.deadline_ms) {
      ++at;
      continue;
    }
    at = parked_.erase(at);
    metrics.parked_now.sub();
    if (connection.parked()) {
      if (wakes) {
        metrics.parked_woken.add();
        tried = ticket;
      }
      connection.retry_parked();  // it may park again, in its old place
      if (connection.parked()) refused.push_back(connection.session().who.tenant);
    }
    connection.account();
    publish_longest_wait();
  }
  if (freed) (void)shared_.wake_waiter(tried, kNoWait);
}

void Loop::publish_longest_wait() {
  longest_wait_.store(parked_.empty() ? kNoWait : parked_.begin()->first);
}

void Loop::tick() {
  next_tick_ms_ = now_ms_ + kTickMs;
  for (const auto& connection : connections_) connection->on_tick();
  std::vector<uint64_t> waiting;
  for (const auto& [serial, connection] : awaiting_disk_) waiting.push_back(serial);
  retry_disk(waiting);
  look_at_arena();
  shared_.waits.expire(now_ms_);
}

std::span<std::byte> Loop::look_at() {
  if (look_at_.empty()) look_at_.resize(RangeCheck::kStepBytes);
  return look_at_;
}

// One loop tells it, whichever sees it first. Only a device can come back.
void Loop::look_at_arena() {
  const uint64_t lost = shared_.store->lost_bytes();
  uint64_t logged = shared_.lost_bytes.load();
  if (lost == logged || (lost < logged && shared_.store->addressable())) return;
  if (!shared_.lost_bytes.compare_exchange_strong(logged, lost)) return;  // the next tick sees what is left
  if (lost < logged) {
    shared_.log.push(20, "arena_back",
                     shared_.store->arena().description + " answers again: new blocks are taken");
    return;
  }
  shared_.log.push(
      40, "arena_damaged",
      std::to_string(lost) + " bytes of " + shared_.store->arena().description +
          " are gone (truncated, or failed memory); their blocks become misses, " +
          (shared_.store->addressable() ? "anonymous memory takes their place until the node is started again"
                                        : "new ones are refused until it answers again"));
}

// Too much memory is in hand on this node: who holds most of it goes, as long as that is more than an equal
// share. Each loop looks at its own connections.
void Loop::close_largest() {
  const uint64_t limit = shared_.config.max_buffered_bytes;
  for (size_t left = connections_.size(); left > 0 && shared_.buffered_bytes.load() > limit; --left) {
    Connection& most = **std::max_element(
        connections_.begin(), connections_.end(),
        [](const auto& a, const auto& b) { return a->buffered_bytes() < b->buffered_bytes(); });
    if (most.buffered_bytes() <= limit / std::max<uint32_t>(shared_.connections.load(), 1)) return;
    shared_.log.push(40, "connection_closed",
                     "it held " + std::to_string(most.buffered_bytes()) +
                         " bytes of memory, the most, and all together "
                         "more than " +
                         std::to_string(limit));
    most.destroy(CloseReason::kMemory);
    most.account();
  }
}

void Loop::remove_dead() {
  if (dead_.empty()) return;
  const size_t left = std::erase_if(parked_, [](const auto& waiter) { return waiter.second->is_dead(); });
  metrics.parked_now.sub(static_cast<uint64_t>(left));
  publish_longest_wait();
  std::erase_if(queue_, [](const Connection* connection) { return connection->is_dead(); });
  std::erase_if(awaiting_disk_, [](const auto& waiter) { return waiter.second->is_dead(); });
  for (Connection* connection : dead_) {
    const size_t index = connection->index;
    if (connection->session().surplus) shared_.surplus.fetch_sub(1);
    connections_.back()->index = index;
    std::swap(connections_[index], connections_.back());
    connections_.pop_back();
    metrics.connections_open.sub();
    shared_.connections.fetch_sub(1);
    load_.fetch_sub(1, std::memory_order_relaxed);
  }
  dead_.clear();
}

void Loop::advance_stop() {
  take_newcomers();
  Deadline deadline;
  {
    const std::lock_guard lock(mutex_);
    deadline = stop_deadline_;
  }
  for (const auto& listener : listeners_) pause(*listener);
  some_paused_ = false;
  listeners_.clear();  // closed: connections in the backlog end at once
  const bool over = deadline.expired();
  for (const auto& connection : connections_) {
    if (!connection->is_dead() && (over || !connection->busy())) connection->destroy(CloseReason::kStopped);
  }
  remove_dead();
}

}  // namespace mooncache::server
