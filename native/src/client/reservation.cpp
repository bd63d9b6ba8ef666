// Reservations: space on a node, filled range by range, visible at commit. Each is bound to a connection,
// because the node forgets it with the connection. A few dozen reservations share one lane, apart from the
// lanes of get and put, so that a layer-wise writer can hold hundreds of blocks open without hundreds of
// sockets.
#include <poll.h>

#include <algorithm>
#include <condition_variable>

#include "client/impl.h"
#include "mooncache/crc32c.h"
#include "transport/ask.h"

namespace mooncache {

// Used by one thread at a time (acquire, release). A call that was cut in the middle costs its own
// reservation only: its answer is swallowed when it comes. No thread waits for space while it has the lane:
// that may take as long as other reservations of the same lane need it.
struct ReservationLane {
  // Waits for the lane, no longer than the caller's patience lasts.
  Status acquire(const CallOptions& options);
  // Hands the lane on, after telling the node which grants are not wanted any more.
  void release();
  // A PING, unless the lane is in use, which says the same to the node.
  void ping(int cancel_fd);
  // Never waits: the node hears at once when the lane is free, else from its present user.
  void forget(uint64_t grant);
  // The last reservation has left: what the node could not hear by then ends with the connection.
  void last_left();
  // By who has the lane: its reservations are void.
  void close();
  // A session of this lane's own, with the late answers of cut calls going to it.
  void adopt(std::unique_ptr<Session> made);

  std::mutex mutex;
  std::condition_variable given;
  bool taken = false;  // guarded by mutex; session and link belong to the thread that set it
  std::unique_ptr<Session> session;
  std::unique_ptr<Link> link;      // one-sided, or null
  std::atomic<uint32_t> count{0};  // written under Impl::mutex
  std::atomic<bool> broken{false};

 private:
  void send_aborts();

  std::vector<uint64_t> unwanted_;  // guarded by mutex
};

namespace {

constexpr uint64_t kWriteFrameBytes = 1 << 20;
// A node that is slow keeps its reservations: only the end of the connection ends them.
constexpr int kPingPatienceMs = 10'000;
constexpr auto kCancelLook = std::chrono::milliseconds(5);
// Between two questions for space on a lane that others use.
constexpr int kAskAgainMs = 20;
// How long the node may hold a question for space on a lane that no other caller uses: who joins it waits so
// long.
constexpr int kParkMs = 100;

// The lane for the time of one exchange.
class Turn {
 public:
  Turn(ReservationLane& lane, const CallOptions& options) : lane_(lane), status_(lane.acquire(options)) {}
  ~Turn() {
    if (status_) lane_.release();
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;
  const Status& status() const { return status_; }

 private:
  ReservationLane& lane_;
  Status status_;
};

bool is_cut(const Status& status) {
  return status.code == Code::kCancelled || status.code == Code::kDeadlineExceeded;
}

// One exchange on a lane that the caller has. Only what the connection itself does wrong ends the lane.
Status run_on(ReservationLane& lane, Program& program, const CallOptions& options) {
  if (!lane.session) return {Code::kConnectionLost, "the reservation's connection is gone"};
  InterruptLook look(options.interrupted);
  Status status = lane.session->run(program, options.deadline, options.cancel ? options.cancel->fd() : -1,
                                    Session::WhenCut::kAbandon, &look);
  if (!lane.session->broken()) return status;
  lane.close();
  return status;
}

class Reserved final : public BlockReservation {
 public:
  Reserved(std::shared_ptr<Client::Impl> impl, std::shared_ptr<ReservationLane> lane, wire::WireExtent extent,
           uint32_t node_index)
      : impl_(std::move(impl)), lane_(std::move(lane)), extent_(extent), node_index_(node_index) {}

  ~Reserved() override {
    if (impl_->in_child()) {
      leak_in_child(std::move(impl_));
      leak_in_child(std::move(lane_));
      return;
    }
    // No waiting here: this runs wherever the last owner lets go, with Python's lock for example.
    if (!ended_ && impl_->usable()) give_up();
    leave();
  }

  uint32_t node_index() const override { return node_index_; }
  uint64_t size() const override { return extent_.size; }

  Status write(uint64_t offset, std::span<const ConstSlice> slices, const CallOptions& options) override {
    if (impl_->in_child()) return impl_->usable();  // before the lock
    const std::lock_guard own(mutex_);
    if (Status status = check(options); !status) return status;
    std::vector<Slice> pieces;
    uint64_t length = 0;
    for (const ConstSlice& slice : slices) {
      if (slice.size > extent_.size || length > extent_.size - slice.size)
        length = UINT64_MAX / 2;
      else
        length += slice.size;
      pieces.push_back({const_cast<std::byte*>(slice.data), slice.size});
    }
    if (!inside(offset, length, extent_.size)) {
      return {Code::kInvalidArgument, "the range [" + std::to_string(offset) + ", +" +
                                          std::to_string(length) + ") is not inside the block of " +
                                          std::to_string(extent_.size) + " bytes"};
    }
    for (const Range& range : ranges_) {
      if (offset < range.offset + range.length && range.offset < offset + length) {
        return {Code::kInvalidArgument, "the range overlaps one that was written before"};
      }
    }
    if (length == 0) return Status::ok();
    uint32_t crc = 0;
    Status status;
    {
      const Turn turn(*lane_, options);
      if (!turn.status()) return turn.status();  // nothing was written: the range can be tried again
      status = lane_->link ? write_one_sided(offset, pieces, options, crc)
                           : write_frames(offset, length, pieces, options, crc);
    }
    if (status)
      ranges_.push_back({offset, length, crc});
    else if (status.code != Code::kInvalidArgument)
      give_up();  // a torn range must never be committed
    return status;
  }

  Status commit(const CallOptions& options) override {
    if (impl_->in_child()) return impl_->usable();
    const std::lock_guard own(mutex_);
    if (Status status = check(options); !status) return status;
    std::sort(ranges_.begin(), ranges_.end(),
              [](const Range& a, const Range& b) { return a.offset < b.offset; });
    uint64_t covered = 0;
    uint32_t crc = 0;
    for (const Range& range : ranges_) {
      if (range.offset != covered) break;
      crc = covered == 0 ? range.crc : crc32c_combine(crc, range.crc, range.length);
      covered += range.length;
    }
    if (covered != extent_.size) {
      (void)abort_locked(options);
      return {Code::kIncomplete, "only the first " + std::to_string(covered) + " of " +
                                     std::to_string(extent_.size) +
                                     " bytes were written without a gap; the reservation was given back"};
    }
    const Turn turn(*lane_, options);
    if (!turn.status()) return turn.status();
    ended_ = true;
    Writer meta;
    const wire::CommitItem item{extent_.grant, crc, lane_->link ? wire::CommitItem::kFlagOneSided : 0};
    wire::encode_items<wire::CommitItem>(meta, std::span(&item, 1));
    Status status = one_code({wire::Opcode::kCommit, 0, meta.take(), {}}, options);
    if (is_cut(status)) give_up();  // it may not have been sent; what is committed stays
    return status;
  }

  Status abort(const CallOptions& options) override {
    if (impl_->in_child()) return Status::ok();  // it is the parent's
    const std::lock_guard own(mutex_);
    return abort_locked(options);
  }

 private:
  struct Range {
    uint64_t offset;
    uint64_t length;
    uint32_t crc;
  };

  Status check(const CallOptions& options) const {
    if (Status status = impl_->check_call(1, options); !status) return status;
    if (ended_) return {Code::kClosed, "the reservation was committed or aborted"};
    if (lane_->broken)
      return {Code::kConnectionLost, "the reservation's connection is gone, and the reservation with it"};
    return Status::ok();
  }

  void give_up() {
    ended_ = true;
    lane_->forget(extent_.grant);
  }

  Status abort_locked(const CallOptions& caller) {
    if (ended_) return Status::ok();
    ended_ = true;
    if (lane_->broken) return Status::ok();  // the node forgot it already
    Writer meta;
    wire::encode_grants(meta, std::span(&extent_.grant, 1));
    CallOptions options = caller;
    options.deadline.at =
        std::min(caller.deadline.at, Deadline::after_ms(impl_->config.connect_timeout_ms).at);
    const Turn turn(*lane_, options);
    Status status =
        turn.status() ? one_code({wire::Opcode::kAbort, 0, meta.take(), {}}, options) : turn.status();
    if (is_cut(status)) give_up();  // it may not have been sent; twice does no harm
    return status;
  }

  // The caller has the lane.
  Status one_code(CallProgram::Call call, const CallOptions& options) {
    const std::vector<CallProgram::Call> calls{std::move(call)};
    Status answer;
    CallProgram program(
        calls, [&](size_t, const Status& status, Reader& in) { return take_code(status, in, answer); });
    if (Status status = run_on(*lane_, program, options); !status) return status;
    return answer;
  }

  static Status take_code(const Status& status, Reader& in, Status& answer) {
    if (!status) {
      answer = status;
      return Status::ok();
    }
    const auto codes = wire::decode_codes(in);
    if (!codes || codes->size() != 1) return {Code::kProtocolError, "malformed answer"};
    const Code code = codes->front();
    if (code != Code::kOk) answer = {code, "the node answered " + std::string(code_name(code))};
    return Status::ok();
  }

  Status write_frames(uint64_t offset, uint64_t length, std::span<const Slice> pieces,
                      const CallOptions& options, uint32_t& crc) {
    std::vector<CallProgram::Call> calls;
    for (uint64_t at = 0; at < length; at += kWriteFrameBytes) {
      const uint64_t take = std::min(kWriteFrameBytes, length - at);
      PayloadSink part;
      part.add_item(pieces, at, take);
      CallProgram::Call call;
      call.opcode = wire::Opcode::kWrite;
      uint32_t part_crc = 0;
      for (const Slice& slice : part.slices) {
        part_crc = crc32c({slice.data, slice.size}, part_crc);
        call.payload.emplace_back(slice);
      }
      crc = at == 0 ? part_crc : crc32c_combine(crc, part_crc, take);
      Writer meta;
      wire::WriteRequest{extent_.grant, {{offset + at, take, part_crc}}}.encode(meta);
      call.meta = meta.take();
      calls.push_back(std::move(call));
    }
    Status answer;
    CallProgram program(
        calls, [&](size_t, const Status& status, Reader& in) { return take_code(status, in, answer); });
    if (Status status = run_on(*lane_, program, options); !status) return status;
    return answer;
  }

  Status write_one_sided(uint64_t offset, std::span<const Slice> pieces, const CallOptions& options,
                         uint32_t& crc) {
    Transfer transfer;
    transfer.id = 1;
    transfer.direction = Direction::kWrite;
    transfer.remote = {extent_.grant,      extent_.segment, extent_.slot,
                       extent_.generation, extent_.offset,  extent_.size};
    transfer.offset = offset;
    transfer.local = pieces;
    // the node frees one-sided reservations of a connection only after its end: no check, no late byte
    if (lane_->session->stale()) {
      lane_->close();
      return {Code::kConnectionLost, "the node closed the reservation's connection"};
    }
    if (lane_->link->submit(std::span(&transfer, 1)) != 1)
      return {Code::kInternal, "the link takes no transfer"};
    Completion completion;
    InterruptLook look(options.interrupted);
    for (;;) {
      if (lane_->link->poll(std::span(&completion, 1), Deadline::after(kCancelLook)) == 1) break;
      const bool cancelled = look.interrupted() || (options.cancel != nullptr && options.cancel->cancelled());
      if (cancelled || options.deadline.expired()) {
        (void)lane_->link->cancel(transfer.id);
        (void)lane_->link->poll(std::span(&completion, 1), options.deadline);
        return {cancelled ? Code::kCancelled : Code::kDeadlineExceeded,
                "the write was cut; the reservation is void"};
      }
    }
    crc = completion.crc32c;
    if (completion.code == Code::kOk) return Status::ok();
    return {completion.code, "the write ended with " + std::string(code_name(completion.code))};
  }

  void leave() {
    uint32_t others = 0;
    {
      const std::lock_guard lock(impl_->mutex);
      others = --lane_->count;
    }
    if (others == 0 && impl_->usable()) lane_->last_left();
  }

  std::shared_ptr<Client::Impl> impl_;
  std::shared_ptr<ReservationLane> lane_;
  wire::WireExtent extent_;
  uint32_t node_index_;
  std::mutex mutex_;
  std::vector<Range> ranges_;
  bool ended_ = false;
};

// A lane with room, or a new one.
Result<std::shared_ptr<ReservationLane>> lane_for(Client::Impl& impl, const std::shared_ptr<Node>& node,
                                                  const CallOptions& options) {
  {
    const std::lock_guard lock(impl.mutex);
    std::erase_if(impl.reservation_lanes, [](const auto& entry) { return entry.first.expired(); });
    auto& lanes = impl.reservation_lanes[node];
    std::erase_if(lanes, [](const auto& lane) { return lane->broken.load(); });
    for (const auto& lane : lanes) {
      if (lane->count < impl.config.reservations_per_lane) {
        ++lane->count;
        return lane;
      }
    }
    if (lanes.size() >= impl.config.reservation_lanes_max) {
      return {Code::kLimitExceeded, "too many open reservations on node " + node->info().node_id};
    }
  }
  auto lane = std::make_shared<ReservationLane>();
  const Deadline connect_by{
      std::min(options.deadline.at, Deadline::after_ms(impl.config.connect_timeout_ms).at)};
  Route route = node->preferred_route(steady_ms());
  InterruptLook look(options.interrupted);
  auto session = Session::connect(node->peer(), route, connect_by, &look);
  if (!session && route == Route::kUnix && session.code() != Code::kCancelled) {
    node->unix_failed(steady_ms());
    session = Session::connect(node->peer(), route = Route::kTcp, connect_by, &look);
  }
  if (!session) return session.status();
  lane->adopt(std::move(*session));
  if (route == Route::kUnix && node->one_sided_writes()) {
    const uint64_t incarnation = lane->session->node().incarnation;
    if (!node->segments(incarnation)) {
      AttachProgram attach(*lane->session);
      Status status = lane->session->run(attach, connect_by, -1, Session::WhenCut::kBreak, &look);
      if (!status) return status;
      if (attach.segments()) node->set_segments(*attach.segments(), incarnation);
    }
    if (auto segments = node->segments(incarnation); segments && segments->can_write()) {
      lane->link = std::make_unique<ShmLink>(std::move(segments), lane->session.get());
    }
  }
  lane->count = 1;
  impl.keeper->keep(lane);
  const std::lock_guard lock(impl.mutex);
  impl.reservation_lanes[node].push_back(lane);
  return lane;
}

// One RESERVE on a lane that the caller has. An error: of the connection, or the node's answer to it all.
Status ask_for_space(ReservationLane& lane, const wire::ReserveItem& item, uint32_t wait_ms,
                     const CallOptions& options, wire::ReserveResult& reserved) {
  if (!lane.session) return {Code::kConnectionLost, "the connection is gone"};
  wire::ReserveRequest request;
  request.wait_ms = wait_ms;
  request.items.push_back(item);
  Writer meta;
  request.encode(meta);
  const std::vector<CallProgram::Call> calls{{wire::Opcode::kReserve, 0, meta.take(), {}}};
  Status answer;
  CallProgram program(calls, [&](size_t, const Status& code, Reader& in) {
    if (!code) {
      answer = code;
      return Status::ok();
    }
    const auto items = wire::decode_items<wire::ReserveResult>(in);
    if (!items || items->size() != 1) return Status{Code::kProtocolError, "malformed RESERVE answer"};
    reserved = items->front();
    return Status::ok();
  });
  if (Status status = run_on(lane, program, options); !status) return status;
  return answer;
}

// Asks until there is space, the wait for it is over, or the caller's patience ends.
Status wait_for_space(Client::Impl& impl, ReservationLane& lane, const wire::ReserveItem& item,
                      const CallOptions& options, wire::ReserveResult& reserved) {
  const uint32_t patience_ms =
      std::min(impl.config.put_wait_ms, static_cast<uint32_t>(options.deadline.remaining_ms(60'000)) / 2);
  const Deadline until = Deadline::after_ms(static_cast<int>(patience_ms));
  InterruptLook look(options.interrupted);
  for (;;) {
    bool alone = false;
    {
      const std::lock_guard lock(impl.mutex);
      alone = lane.count == 1;
    }
    {
      const Turn turn(lane, options);
      if (!turn.status()) return turn.status();
      const int wait_ms = alone ? until.remaining_ms(kParkMs) : 0;
      Status status = ask_for_space(lane, item, static_cast<uint32_t>(wait_ms), options, reserved);
      if (!status || reserved.code != Code::kNoSpace) return status;
    }
    if (until.expired()) return Status::ok();
    pollfd cancel{options.cancel ? options.cancel->fd() : -1, POLLIN, 0};
    if (poll(&cancel, 1, until.remaining_ms(kAskAgainMs)) < 0) look.soon();
    if (look.interrupted()) return InterruptLook::status();
    if (Status status = impl.check_call(1, options); !status) return status;
  }
}

Result<std::unique_ptr<BlockReservation>> reserve_on(const std::shared_ptr<Client::Impl>& impl,
                                                     const std::shared_ptr<Node>& node, const Key& key,
                                                     uint64_t size, const CallOptions& options) {
  auto lane = lane_for(*impl, node, options);
  if (!lane) {
    if (lane.code() != Code::kCancelled) node->failure(steady_ms(), lane.status());
    return lane.status();
  }
  wire::ReserveResult reserved;
  Status status = wait_for_space(*impl, **lane, {key, size}, options, reserved);
  if (status && reserved.code != Code::kOk) {
    status = {reserved.code,
              "node " + node->info().node_id + " answered " + std::string(code_name(reserved.code))};
  }
  if (!status) {
    const std::lock_guard lock(impl->mutex);
    --(*lane)->count;
    return status;
  }
  node->success();
  reserved.extent.size = size;
  return std::unique_ptr<BlockReservation>(new Reserved(impl, *lane, reserved.extent, node->info().index));
}

}  // namespace

Status ReservationLane::acquire(const CallOptions& options) {
  InterruptLook look(options.interrupted);
  std::unique_lock lock(mutex);
  while (taken) {
    if (options.interrupted != nullptr) {
      lock.unlock();
      const bool interrupted = look.interrupted();
      lock.lock();
      if (interrupted) return InterruptLook::status();
      if (!taken) break;
    }
    if (options.cancel != nullptr && options.cancel->cancelled())
      return {Code::kCancelled, "cancelled by the caller"};
    if (options.deadline.expired()) {
      return {Code::kDeadlineExceeded, "the deadline passed while other threads used the connection"};
    }
    (void)given.wait_until(lock, std::min(options.deadline.at, Deadline::after(kCancelLook).at));
  }
  taken = true;
  return Status::ok();
}

void ReservationLane::release() {
  send_aborts();
  bool owing = false;
  {
    const std::lock_guard lock(mutex);
    owing = !unwanted_.empty();
  }
  if (owing && count == 0) close();
  {
    const std::lock_guard lock(mutex);
    taken = false;
  }
  given.notify_one();
}

void ReservationLane::close() {
  broken = true;  // the end of the connection gives the space back
  link.reset();
  session.reset();
}

void ReservationLane::last_left() {
  {
    const std::lock_guard lock(mutex);
    if (taken || unwanted_.empty()) return;
    taken = true;
  }
  release();
}

void ReservationLane::ping(int cancel_fd) {
  {
    const std::lock_guard lock(mutex);
    if (taken || broken || count == 0) return;
    taken = true;
  }
  // a node of this host sees the end of a process at once: it needs no sign of life
  if (session && session->route() == Route::kTcp) {
    const std::vector<CallProgram::Call> calls{{wire::Opcode::kPing, 0, {}, {}}};
    CallProgram program(calls, [](size_t, const Status& status, Reader&) { return status; });
    if (!session->run(program, Deadline::after_ms(kPingPatienceMs), cancel_fd)) {
      close();
    }
  }
  release();
}

void ReservationLane::adopt(std::unique_ptr<Session> made) {
  session = std::move(made);
  session->on_late_answer([this](wire::Opcode opcode, const Status& status, Reader& in) {
    if (opcode != wire::Opcode::kReserve || !status) return;
    const auto granted = wire::decode_items<wire::ReserveResult>(in);
    if (!granted) return;
    const std::lock_guard lock(mutex);
    for (const auto& item : *granted) {
      if (item.code == Code::kOk) unwanted_.push_back(item.extent.grant);
    }
  });
}

void ReservationLane::forget(uint64_t grant) {
  {
    const std::lock_guard lock(mutex);
    if (broken) return;  // the node forgot it already
    unwanted_.push_back(grant);
    if (taken) return;  // who has the lane tells the node
    taken = true;
  }
  release();
}

void ReservationLane::send_aborts() {
  std::vector<uint64_t> grants;
  {
    const std::lock_guard lock(mutex);
    grants.swap(unwanted_);
  }
  if (!session || session->broken() || grants.empty()) return;
  Writer meta;
  wire::encode_grants(meta, grants);
  OneAnswer program(wire::Opcode::kAbort, std::move(meta), 0);
  if (!session->pump(&program) || !session->abandon()) return close();
  if (program.sent()) return;
  const std::lock_guard lock(mutex);  // too much is under way: with the next use
  unwanted_.insert(unwanted_.end(), grants.begin(), grants.end());
}

void ping_lane(ReservationLane& lane, int cancel_fd) {
  lane.ping(cancel_fd);
}

Result<std::unique_ptr<BlockReservation>> Client::reserve(const Key& key, uint64_t size_bytes,
                                                          const CallOptions& options) {
  if (Status status = impl_->check_call(1, options); !status) return status;
  if (size_bytes == 0 || size_bytes > wire::kMaxPayloadBytes) {
    return {size_bytes == 0 ? Code::kInvalidArgument : Code::kTooLarge, "a block has 1 byte to 1 GiB"};
  }
  const auto map = impl_->map();
  if (map->nodes.empty()) return {Code::kNoNodes, "the cluster map has no node; is the master reachable?"};
  std::vector<uint32_t> places;
  if (options.node) {
    const uint32_t position = map->position(*options.node);
    if (position == kNoNode)
      return {Code::kUnknownNode, "no node with index " + std::to_string(*options.node)};
    places.push_back(position);
  } else {
    places = place(key, map->infos, impl_->config.host_id, 4);
  }
  Status last{Code::kNodeUnavailable, "no node takes new blocks now"};
  for (size_t i = 0; i < places.size(); ++i) {
    if (!impl_->may_ask(*map, places[i])) continue;
    if (i > 0 && impl_->take_retries(1) == 0) break;
    auto reservation = reserve_on(impl_, map->nodes[places[i]], key, size_bytes, options);
    // a lane that died while idle says nothing about the node: once more on a new one
    if (!reservation && reservation.code() == Code::kConnectionLost) {
      reservation = reserve_on(impl_, map->nodes[places[i]], key, size_bytes, options);
    }
    if (reservation) return reservation;
    last = reservation.status();
    if (last.code == Code::kAlreadyExists || last.code == Code::kTooLarge || last.code == Code::kCancelled ||
        last.code == Code::kDeadlineExceeded || last.code == Code::kQuotaExceeded) {
      break;
    }
  }
  return last;
}

}  // namespace mooncache
