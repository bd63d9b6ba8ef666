// A reliable connection (RC) with one completion queue of its own.
//
// The invariant: posted_ holds, oldest first, the requests of which the device may still move bytes, and
// those that are through and not yet fetched. Requests of one connection end in the order in which they were
// posted, so the device reports only every fourth of a list and the last (those that fail it reports always):
// a report that one is through says the same of all before it. None of it matters once the queue pair is
// destroyed: a destroyed queue pair touches no memory.
#include <fcntl.h>
#include <poll.h>
#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <deque>
#include <thread>

#include "rdma/device.h"

namespace mooncache::rdma {

namespace {

constexpr size_t kPostsPerCall = 16;
constexpr size_t kReapsPerCall = 16;
constexpr size_t kReportEvery = 4;
constexpr uint32_t kInlineBytes = 64;
constexpr uint32_t kPacketNumberMask = 0xffffff;
constexpr auto kDrainPatience = std::chrono::milliseconds(100);  // a device that is well needs microseconds
constexpr uint8_t kRoutedHops = 64;

WorkOutcome outcome_of(ibv_wc_status status) {
  switch (status) {
    case IBV_WC_SUCCESS:
      return WorkOutcome::kDone;
    case IBV_WC_WR_FLUSH_ERR:
      return WorkOutcome::kFlushed;
    case IBV_WC_REM_ACCESS_ERR:
    case IBV_WC_REM_INV_REQ_ERR:
    case IBV_WC_REM_OP_ERR:
      return WorkOutcome::kRefused;
    case IBV_WC_RETRY_EXC_ERR:
    case IBV_WC_RNR_RETRY_EXC_ERR:
      return WorkOutcome::kGone;
    default:
      return WorkOutcome::kFailed;
  }
}

class QueuePair final : public Endpoint {
 public:
  QueuePair(std::shared_ptr<Protection> protection, uint32_t depth)
      : protection_(std::move(protection)),
        verbs_(protection_->verbs()),
        info_(protection_->port->info()),
        depth_(depth) {}
  ~QueuePair() override;
  Status open();

  EndpointAddress address() const override;
  Status connect(const EndpointAddress& peer) override;
  size_t post(std::span<const Post> posts) override;
  size_t poll(std::span<Reaped> reaped) override;
  size_t room() const override { return failed_ || !connected_ ? 0 : depth_ - posted_.size(); }
  size_t outstanding() const override { return posted_.size(); }
  bool failed() const override { return failed_; }
  void stop() override;
  int fd() const override { return channel_ == nullptr ? -1 : channel_->fd; }
  void arm() override;

 private:
  Status create();
  void mark_end();
  size_t hand_out(std::span<Reaped> reaped);
  bool take_report(uint64_t number, ibv_wc_status status);
  Status make_ready_to_receive(const EndpointAddress& peer, uint8_t mtu);
  Status make_ready_to_send(const EndpointAddress& peer);
  Status modify(ibv_qp_attr& attributes, int mask, const char* what);

  const std::shared_ptr<Protection> protection_;
  const Verbs& verbs_;
  const RailInfo& info_;  // as it was when this was made: the address that the peer knows
  const uint32_t depth_;
  ibv_comp_channel* channel_ = nullptr;
  ibv_cq* cq_ = nullptr;
  ibv_qp* qp_ = nullptr;
  uint32_t first_packet_ = 0;
  uint32_t inline_bytes_ = 0;
  std::deque<uint64_t> posted_;  // ids
  uint64_t first_ = 0;           // the device's number for the front of posted_
  uint64_t through_ = 0;         // all before this one succeeded
  uint64_t failed_number_ = 0;   // this one, at or behind through_, did not
  Reaped failure_;
  bool has_failure_ = false;
  bool has_marker_ = false;  // behind posted_
  bool connected_ = false;
  bool stopped_ = false;
  std::chrono::steady_clock::time_point stopped_at_;
  bool failed_ = false;
  bool lost_ = false;
};

Status QueuePair::modify(ibv_qp_attr& attributes, int mask, const char* what) {
  const int error = verbs_.modify_qp(qp_, &attributes, mask);
  if (error == 0) return Status::ok();
  failed_ = true;
  return refused(std::string("ibv_modify_qp (") + what + ") on " + info_.device, error);
}

Status QueuePair::create() {
  ibv_qp_init_attr wish{};
  wish.send_cq = wish.recv_cq = cq_;
  wish.qp_type = IBV_QPT_RC;
  wish.cap.max_send_wr = depth_ + 1;  // and a marker
  wish.cap.max_recv_wr = 1;
  wish.cap.max_send_sge = depth_ > 0 ? info_.max_gather : 1;
  wish.cap.max_recv_sge = 1;
  wish.cap.max_inline_data = depth_ > 0 ? kInlineBytes : 0;
  const ibv_qp_init_attr plain = wish;
  errno = 0;
  qp_ = verbs_.create_qp(protection_->pd, &wish);
  if (qp_ == nullptr && wish.cap.max_inline_data > 0) {
    wish = plain;  // a device may refuse inline data as such
    wish.cap.max_inline_data = 0;
    qp_ = verbs_.create_qp(protection_->pd, &wish);
  }
  if (qp_ == nullptr) return refused("ibv_create_qp on " + info_.device, errno);
  inline_bytes_ = std::min(wish.cap.max_inline_data, kInlineBytes);
  return Status::ok();
}

Status QueuePair::open() {
  const Port& port = *protection_->port;
  ibv_context* context = port.device().context;
  errno = 0;
  if (depth_ > 0) {
    channel_ = verbs_.create_comp_channel(context);
    if (channel_ == nullptr) return refused("ibv_create_comp_channel on " + info_.device, errno);
    (void)fcntl(channel_->fd, F_SETFL, fcntl(channel_->fd, F_GETFL) | O_NONBLOCK);
  }
  cq_ = verbs_.create_cq(context, static_cast<int>(depth_) + 2, nullptr, channel_, 0);
  if (cq_ == nullptr) return refused("ibv_create_cq on " + info_.device, errno);
  if (Status status = create(); !status) return status;
  if (getrandom(&first_packet_, sizeof first_packet_, 0) != sizeof first_packet_) {
    return {Code::kInternal, "no randomness for a packet number"};
  }
  first_packet_ &= kPacketNumberMask;
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_INIT;
  attributes.port_num = static_cast<uint8_t>(info_.port);
  // An endpoint that asks is never asked: its own memory stays its own.
  attributes.qp_access_flags = depth_ > 0 ? 0 : IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
  return modify(attributes, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, "to INIT");
}

EndpointAddress QueuePair::address() const {
  const RailInfo& info = info_;
  EndpointAddress address;
  address.gid = info.gid;
  address.queue_pair = qp_->qp_num;
  address.first_packet = first_packet_;
  address.lid = info.lid;
  address.mtu = info.mtu;
  address.layer = info.layer;
  address.outstanding_reads = static_cast<uint8_t>(info.max_outstanding_reads);
  return address;
}

Status QueuePair::connect(const EndpointAddress& peer) {
  const RailInfo& info = info_;
  if (peer.layer != info.layer || peer.mtu < 1 || peer.mtu > 5 || peer.outstanding_reads == 0) {
    failed_ = true;
    return {Code::kProtocolError, "the peer described an RDMA endpoint that is not possible"};
  }
  if (Status status = make_ready_to_receive(peer, std::min(peer.mtu, info.mtu)); !status) return status;
  if (Status status = make_ready_to_send(peer); !status) return status;
  connected_ = true;
  return Status::ok();
}

Status QueuePair::make_ready_to_receive(const EndpointAddress& peer, uint8_t mtu) {
  const Port& port = *protection_->port;
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_RTR;
  attributes.path_mtu = static_cast<ibv_mtu>(mtu);
  attributes.dest_qp_num = peer.queue_pair;
  attributes.rq_psn = peer.first_packet & kPacketNumberMask;
  attributes.max_dest_rd_atomic = static_cast<uint8_t>(info_.max_outstanding_reads);
  attributes.min_rnr_timer = 12;
  attributes.ah_attr.port_num = static_cast<uint8_t>(info_.port);
  attributes.ah_attr.sl = port.options().service_level;
  attributes.ah_attr.dlid = peer.lid;
  attributes.ah_attr.is_global = info_.layer == LinkLayer::kRoceV2 ? 1 : 0;
  if (attributes.ah_attr.is_global != 0) {
    std::copy_n(reinterpret_cast<const uint8_t*>(peer.gid.data()), peer.gid.size(),
                attributes.ah_attr.grh.dgid.raw);
    attributes.ah_attr.grh.sgid_index = static_cast<uint8_t>(info_.gid_index);
    attributes.ah_attr.grh.hop_limit = kRoutedHops;
    attributes.ah_attr.grh.traffic_class = port.options().traffic_class;
  }
  return modify(attributes,
                IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                    IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
                "to RTR");
}

Status QueuePair::make_ready_to_send(const EndpointAddress& peer) {
  const Port& port = *protection_->port;
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_RTS;
  attributes.timeout = port.options().ack_timeout;
  attributes.retry_cnt = port.options().retry_count;
  attributes.rnr_retry = 6;
  attributes.sq_psn = first_packet_;
  attributes.max_rd_atomic =
      static_cast<uint8_t>(std::min<uint32_t>(info_.max_outstanding_reads, peer.outstanding_reads));
  return modify(attributes,
                IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                    IBV_QP_MAX_QP_RD_ATOMIC,
                "to RTS");
}

size_t QueuePair::post(std::span<const Post> posts) {
  size_t taken = 0;
  while (taken < posts.size() && room() > 0) {
    std::array<ibv_send_wr, kPostsPerCall> requests{};
    std::array<ibv_sge, kPostsPerCall * kMaxGather> ranges;
    ibv_sge* range = ranges.data();
    const size_t count = std::min({posts.size() - taken, room(), kPostsPerCall});
    for (size_t i = 0; i < count; ++i) {
      const Post& post = posts[taken + i];
      ibv_send_wr& request = requests[i];
      request.sg_list = range;
      request.num_sge = static_cast<int>(post.ranges);
      for (const LocalRange& local : std::span(post.local).first(post.ranges))
        *range++ = {reinterpret_cast<uintptr_t>(local.data), local.length, local.key};
      request.wr_id = first_ + posted_.size() + i;
      request.next = i + 1 < count ? &requests[i + 1] : nullptr;
      request.opcode = post.write ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ;
      request.send_flags = i + 1 == count || (i + 1) % kReportEvery == 0 ? unsigned{IBV_SEND_SIGNALED} : 0u;
      if (post.write && !post.device && post.length <= inline_bytes_) request.send_flags |= IBV_SEND_INLINE;
      request.wr.rdma.remote_addr = post.remote_address;
      request.wr.rdma.rkey = post.remote_key;
    }
    ibv_send_wr* bad = nullptr;
    const int error = ibv_post_send(qp_, requests.data(), &bad);
    const size_t accepted = error == 0       ? count
                            : bad == nullptr ? 0
                                             : static_cast<size_t>(bad - requests.data());
    for (size_t i = 0; i < accepted; ++i) posted_.push_back(posts[taken + i].id);
    taken += accepted;
    if (error != 0) {
      const bool reported = accepted == 0 || (requests[accepted - 1].send_flags & IBV_SEND_SIGNALED) != 0;
      stop();
      if (!reported) mark_end();
      break;
    }
  }
  return taken;
}

// The last requests were to be reported by one that the device did not take: this one says when they are
// over.
void QueuePair::mark_end() {
  ibv_send_wr marker{};
  marker.wr_id = first_ + posted_.size();
  marker.opcode = IBV_WR_RDMA_WRITE;
  marker.send_flags = IBV_SEND_SIGNALED;
  ibv_send_wr* bad = nullptr;
  has_marker_ = ibv_post_send(qp_, &marker, &bad) == 0;
  if (!has_marker_) lost_ = true;
}

// The next requests that are known to be over, in the order in which they were posted.
size_t QueuePair::hand_out(std::span<Reaped> reaped) {
  size_t count = 0;
  while (count < reaped.size() && !posted_.empty()) {
    if (first_ < through_) {
      reaped[count++] = {posted_.front(), WorkOutcome::kDone, 0};
    } else if (has_failure_ && first_ == failed_number_) {
      failure_.id = posted_.front();
      reaped[count++] = failure_;
      has_failure_ = false;
    } else {
      break;
    }
    posted_.pop_front();
    ++first_;
  }
  return count;
}

// A report about request `number`. False: it names none that is under way.
bool QueuePair::take_report(uint64_t number, ibv_wc_status status) {
  if (has_marker_ && number == first_ + posted_.size()) {
    has_marker_ = false;
    through_ = number;
    return true;
  }
  if (number - first_ >= posted_.size()) return false;
  const WorkOutcome outcome = outcome_of(status);
  if (outcome == WorkOutcome::kDone) {
    through_ = number + 1;
    return true;
  }
  failed_ = true;
  through_ = number;  // those before it went well, or would have been reported
  failed_number_ = number;
  failure_ = {0, outcome, static_cast<uint32_t>(status)};
  has_failure_ = true;
  return true;
}

size_t QueuePair::poll(std::span<Reaped> reaped) {
  size_t count = hand_out(reaped);
  while (count < reaped.size() && !posted_.empty()) {
    ibv_wc found;
    const int got = ibv_poll_cq(cq_, 1, &found);
    if (got < 0) failed_ = true;
    if (got <= 0) break;
    if (!take_report(found.wr_id, found.status)) failed_ = true;
    count += hand_out(reaped.subspan(count));
  }
  return count;
}

void QueuePair::arm() {
  if (channel_ == nullptr) return;
  ibv_cq* which = nullptr;
  void* context = nullptr;
  while (verbs_.get_cq_event(channel_, &which, &context) == 0) verbs_.ack_cq_events(which, 1);
  if (ibv_req_notify_cq(cq_, 0) != 0) failed_ = true;
}

void QueuePair::stop() {
  failed_ = true;
  if (stopped_ || qp_ == nullptr) return;
  stopped_ = true;
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_ERR;
  // A device that refuses this is gone and will finish nothing.
  lost_ = verbs_.modify_qp(qp_, &attributes, IBV_QP_STATE) != 0;
  stopped_at_ = std::chrono::steady_clock::now();
}

QueuePair::~QueuePair() {
  stop();
  const auto patience = stopped_at_ + kDrainPatience;
  std::array<Reaped, kReapsPerCall> reaped;
  while (!posted_.empty() && !lost_ && std::chrono::steady_clock::now() < patience) {
    if (poll(reaped) == 0) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  if (qp_ != nullptr) (void)verbs_.destroy_qp(qp_);
  if (channel_ != nullptr && cq_ != nullptr) {
    ibv_cq* which = nullptr;
    void* context = nullptr;
    while (verbs_.get_cq_event(channel_, &which, &context) == 0) verbs_.ack_cq_events(which, 1);
  }
  if (cq_ != nullptr) (void)verbs_.destroy_cq(cq_);
  if (channel_ != nullptr) (void)verbs_.destroy_comp_channel(channel_);
}

}  // namespace

Result<std::unique_ptr<Endpoint>> make_queue_pair(std::shared_ptr<Protection> protection, uint32_t depth) {
  auto made = std::make_unique<QueuePair>(std::move(protection), depth);
  if (Status status = made->open(); !status) return status;
  return std::unique_ptr<Endpoint>(std::move(made));
}

}  // namespace mooncache::rdma
