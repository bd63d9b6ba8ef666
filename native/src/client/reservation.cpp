// Reservations: space on a node, filled range by range, visible at commit. Bytes move as those of put do: by
// the connection's link (shared memory, RDMA), else in frames.
#include <poll.h>

#include <algorithm>

#include "client/impl.h"
#include "client/reservation_lane.h"
#include "client/reservation_programs.h"
#include "mooncache/crc32c.h"
#include "transport/one_request.h"

namespace mooncache {

namespace {

// Between two requests for space on a lane that others use.
constexpr int kRetryMs = 20;
// How long the node may hold a request for space on a lane that no other caller uses: who joins it waits so
// long.
constexpr int kHoldMs = 100;

bool is_cut(const Status& status) {
  return status.code == Code::kCancelled || status.code == Code::kDeadlineExceeded;
}

class Reserved final : public BlockReservation {
 public:
  Reserved(std::shared_ptr<Client::Impl> impl, std::shared_ptr<Node> node,
           std::shared_ptr<ReservationLane> lane, const RemoteExtent& extent)
      : impl_(std::move(impl)), node_(std::move(node)), lane_(std::move(lane)), extent_(extent) {}

  ~Reserved() override {
    if (impl_->in_child()) {
      leak_in_child(std::move(impl_));
      leak_in_child(std::move(node_));
      leak_in_child(std::move(lane_));
      return;
    }
    // No waiting here: this runs wherever the last owner lets go, with Python's lock for example.
    if (!ended_ && impl_->usable()) give_up();
    leave();
  }

  uint32_t node_index() const override { return node_->info().index; }
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
      const LaneTurn turn(*lane_, options);
      if (!turn.status()) return turn.status();  // nothing was written: the range can be tried again
      status = write_range({extent_, offset, length, pieces}, options, crc);
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
    const LaneTurn turn(*lane_, options);
    if (!turn.status()) return turn.status();
    ended_ = true;
    const wire::CommitItem item{extent_.grant, crc, one_sided_ ? wire::CommitItem::kFlagOneSided : 0};
    Request request;
    encode_commit(request, std::span(&item, 1));
    Status status = exchange_code(std::move(request), options);
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
    if (lane_->broken())
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
    if (lane_->broken()) return Status::ok();  // the node forgot it already
    Request request;
    encode_abort(request, std::span(&extent_.grant, 1));
    CallOptions options = caller;
    options.deadline.at =
        std::min(caller.deadline.at, Deadline::after_ms(impl_->config.connect_timeout_ms).at);
    const LaneTurn turn(*lane_, options);
    Status status = turn.status() ? exchange_code(std::move(request), options) : turn.status();
    if (is_cut(status)) give_up();  // it may not have been sent; twice does no harm
    return status;
  }

  // COMMIT or ABORT of this reservation, by the thread that has the lane.
  Status exchange_code(Request request, const CallOptions& options) {
    OneRequest program(std::move(request));
    if (Status status = lane_->run(program, options); !status) return status;
    if (!program.status()) return program.status();
    Reader in(program.answer());
    const auto codes = decode_outcomes(program.status(), in, 1);
    if (!codes) {
      lane_->close();  // it does not speak the protocol
      return codes.status();
    }
    const Code code = codes->front();
    if (code != Code::kOk) return {code, "the node answered " + std::string(code_name(code))};
    return Status::ok();
  }

  // By the thread that has the lane.
  Status write_range(const RangeWrite::Range& range, const CallOptions& options, uint32_t& crc) {
    Session* const session = lane_->session();
    if (session == nullptr) return {Code::kConnectionLost, "the reservation's connection is gone"};
    const bool by_link =
        (session->route() == Route::kUnix || extent_.exposed) && lane_->may_have_link(*node_);
    // The node frees the space of a connection that may write by itself only after its end. Seen here, that
    // end leaves no byte that could come late.
    if (by_link && session->stale()) {
      lane_->close();
      return {Code::kConnectionLost, "the node closed the reservation's connection"};
    }
    RangeWrite program(range, by_link, *node_, *session, *impl_->buffers, impl_->config, impl_->counters);
    if (Status status = lane_->run(program, options); !status) return status;
    if (const Code code = program.code(); code != Code::kOk)
      return {code, "the write ended with " + std::string(code_name(code))};
    crc = program.crc();
    one_sided_ = one_sided_ || program.one_sided();
    return Status::ok();
  }

  void leave() {
    uint32_t others = 0;
    {
      const std::lock_guard lock(impl_->mutex);
      lane_->empty_since_ms = steady_ms();
      others = --lane_->count;
    }
    if (others == 0 && impl_->usable()) lane_->last_left();
  }

  std::shared_ptr<Client::Impl> impl_;
  std::shared_ptr<Node> node_;
  std::shared_ptr<ReservationLane> lane_;
  const RemoteExtent extent_;
  std::mutex mutex_;
  std::vector<Range> ranges_;
  bool one_sided_ = false;  // the node did not see all bytes
  bool ended_ = false;
};

// A lane with room, or a new one.
Result<std::shared_ptr<ReservationLane>> lane_for(Client::Impl& impl, const std::shared_ptr<Node>& node,
                                                  const CallOptions& options) {
  {
    const std::lock_guard lock(impl.mutex);
    std::erase_if(impl.reservation_lanes, [](const auto& entry) { return entry.first.expired(); });
    auto& lanes = impl.reservation_lanes[node];
    std::erase_if(lanes, [](const auto& lane) { return lane->broken(); });
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
  const Deadline connect_by{
      std::min(options.deadline.at, Deadline::after_ms(impl.config.connect_timeout_ms).at)};
  const Route route = node->preferred_route(steady_ms());
  InterruptLook look(options.interrupted);
  auto session = Session::connect(node->peer(), route, connect_by, &look);
  if (!session && route == Route::kUnix && session.code() != Code::kCancelled) {
    node->unix_failed(steady_ms());
    session = Session::connect(node->peer(), Route::kTcp, connect_by, &look);
  }
  if (!session) return session.status();
  auto lane = std::make_shared<ReservationLane>(std::move(*session));
  lane->count = 1;
  impl.keeper->keep(lane);
  const std::lock_guard lock(impl.mutex);
  impl.reservation_lanes[node].push_back(lane);
  return lane;
}

// One RESERVE, by the thread that has the lane. An error is the connection's, or the caller's patience ended.
Status request_space(Client::Impl& impl, ReservationLane& lane, Node& node, const wire::ReserveItem& item,
                     uint32_t wait_ms, const CallOptions& options, Granted<wire::ReserveResult>& granted) {
  Session* const session = lane.session();
  if (session == nullptr) return {Code::kConnectionLost, "the connection is gone"};
  const bool worth_link = session->route() == Route::kUnix || worth_rdma(impl.config, item.size, 1);
  std::optional<LinkOpener> opener;
  if (worth_link && lane.may_have_link(node)) opener.emplace(node, *session);
  ReserveProgram program(item, wait_ms, opener ? &*opener : nullptr);
  Status status = lane.run(program, options);
  if (opener && opener->unavailable() && !opener->rdma()) lane.link_refused();
  granted = program.granted();
  return status;
}

// Repeats the request until there is space, the wait for it is over, or the caller's patience ends.
Status wait_for_space(Client::Impl& impl, ReservationLane& lane, Node& node, const wire::ReserveItem& item,
                      const CallOptions& options, Granted<wire::ReserveResult>& granted) {
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
      const LaneTurn turn(lane, options);
      if (!turn.status()) return turn.status();
      const int wait_ms = alone ? until.remaining_ms(kHoldMs) : 0;
      Status status = request_space(impl, lane, node, item, static_cast<uint32_t>(wait_ms), options, granted);
      if (!status || granted.result.code != Code::kNoSpace) return status;
    }
    if (until.expired()) return Status::ok();
    pollfd cancel{options.cancel ? options.cancel->fd() : -1, POLLIN, 0};
    if (poll(&cancel, 1, until.remaining_ms(kRetryMs)) < 0) look.soon();
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
  Granted<wire::ReserveResult> granted;
  Status status = wait_for_space(*impl, **lane, *node, {key, size}, options, granted);
  const Code code = granted.result.code;
  if (status && code != Code::kOk)
    status = {code, "node " + node->info().node_id + " answered " + std::string(code_name(code))};
  if (!status) {
    const std::lock_guard lock(impl->mutex);
    (*lane)->empty_since_ms = steady_ms();
    --(*lane)->count;
    return status;
  }
  node->success();
  granted.extent.size = size;
  return std::unique_ptr<BlockReservation>(new Reserved(impl, node, *lane, granted.extent));
}

}  // namespace

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
    if (!impl_->may_use(*map, places[i])) continue;
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
