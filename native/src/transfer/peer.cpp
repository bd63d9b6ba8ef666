#include "transfer/peer.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "mooncache/crc32c.h"
#include "transfer/range_program.h"

namespace mooncache::transfer {

namespace {

constexpr uint64_t kCopyStepBytes = 1 << 20;  // between two looks at whether the copy is still wanted
constexpr int kCloseRangesMs = 2000;
constexpr size_t kMaxCopies = 1 << 20;

// A request, and the descriptors that may come with its answer.
class PlainRequest final : public Program {
 public:
  PlainRequest(Session& session, wire::Opcode opcode, std::span<const std::byte> meta)
      : session_(session), opcode_(opcode), meta_(meta) {}
  bool next(Request& request) override {
    if (sent_) return false;
    sent_ = true;
    if (opcode_ == wire::Opcode::kMapRegion) session_.collect_fds();
    request.opcode = opcode_;
    request.meta.raw(meta_);
    return true;
  }
  bool finished() const override { return answered_; }
  Status on_response(const wire::FrameHeader&, const Status& status, Reader& in, PayloadSink&) override {
    answered_ = true;
    status_ = status;
    if (opcode_ == wire::Opcode::kMapRegion) fds = session_.take_fds();
    const auto rest = in.take(in.remaining());
    answer.assign(rest.begin(), rest.end());
    return Status::ok();
  }
  const Status& status() const { return status_; }
  std::vector<std::byte> answer;
  std::vector<net::UniqueFd> fds;

 private:
  Session& session_;
  const wire::Opcode opcode_;
  const std::span<const std::byte> meta_;
  Status status_;
  bool sent_ = false, answered_ = false;
};

DescribedMemory described(const wire::DescribedRegion& region) {
  using Flags = wire::DescribedRegion;
  DescribedMemory memory;
  memory.base = region.base;
  memory.size = region.size;
  memory.readable = (region.flags & Flags::kReadable) != 0;
  memory.writable = (region.flags & Flags::kWritable) != 0;
  memory.mappable = (region.flags & Flags::kMappable) != 0;
  memory.label = region.label;
  return memory;
}

}  // namespace

Peer::Peer(wire::EngineDescriptor descriptor, PeerOptions options)
    : descriptor_(std::move(descriptor)), options_(std::move(options)) {
  thread_ = std::thread([this] { run(); });
}

Peer::~Peer() {
  close();
}

void Peer::close() {
  std::shared_ptr<Job> current;
  {
    const std::lock_guard lock(mutex_);
    if (!closed_) {
      closed_ = true;
      for (const auto& job : queue_) job->finish({Code::kClosed, "the connection to the peer was closed"});
      queue_.clear();
    }
    current = current_;
    changed_.notify_all();
  }
  if (current) current->cancel();
  std::thread thread;
  {
    const std::lock_guard lock(mutex_);
    thread = std::move(thread_);
  }
  if (thread.joinable()) thread.join();
}

std::string Peer::name() const {
  const std::lock_guard lock(mutex_);
  return descriptor_.name;
}

std::vector<DescribedMemory> Peer::regions() const {
  const std::lock_guard lock(mutex_);
  std::vector<DescribedMemory> all;
  for (const auto& region : descriptor_.regions) all.push_back(described(region));
  return all;
}

Status Peer::enqueue(std::shared_ptr<Job> job) {
  const std::lock_guard lock(mutex_);
  if (closed_) return {Code::kClosed, "the connection to the peer was closed"};
  if (queue_.size() >= kMaxQueued)
    return {Code::kLimitExceeded, "too many transfers to this peer are waiting already"};
  queue_.push_back(std::move(job));
  changed_.notify_all();
  return Status::ok();
}

Result<std::shared_ptr<EngineTransfer>> Peer::submit(Direction direction, std::vector<RangeCopy> copies,
                                                     Deadline deadline) {
  if (copies.size() > kMaxCopies) return {Code::kTooLarge, "a transfer has a million ranges at most"};
  for (const RangeCopy& copy : copies) {
    if (copy.local == nullptr && copy.bytes > 0)
      return {Code::kInvalidArgument, "a range has no local memory"};
    if (copy.remote > UINT64_MAX - copy.bytes)
      return {Code::kInvalidArgument, "a range ends beyond all addresses"};
  }
  auto job =
      std::make_shared<Job>(direction == Direction::kRead ? Job::Kind::kRead : Job::Kind::kWrite, deadline);
  job->copies = std::move(copies);
  if (Status queued = enqueue(job); !queued) return queued;
  return std::static_pointer_cast<EngineTransfer>(job);
}

Status Peer::notify(std::span<const std::byte> bytes, Deadline deadline) {
  if (bytes.size() > wire::kMaxNoticeBytes) return {Code::kTooLarge, "a notification has 64 KiB at most"};
  auto job = std::make_shared<Job>(Job::Kind::kNotify, deadline);
  job->notice.assign(bytes.begin(), bytes.end());
  if (Status queued = enqueue(job); !queued) return queued;
  return job->wait(Deadline::never());
}

Status Peer::refresh(Deadline deadline) {
  auto job = std::make_shared<Job>(Job::Kind::kDescribe, deadline);
  if (Status queued = enqueue(job); !queued) return queued;
  return job->wait(Deadline::never());
}

Status Peer::open(Deadline deadline) {
  return refresh(deadline);
}

// The thread --------------------------------------------------------------------------------------------

void Peer::run() {
  for (;;) {
    std::shared_ptr<Job> job;
    {
      std::unique_lock lock(mutex_);
      current_.reset();
      changed_.wait(lock, [this] { return closed_ || !queue_.empty(); });
      if (closed_) break;
      job = std::move(queue_.front());
      queue_.pop_front();
      if (!job->claim()) continue;
      current_ = job;
    }
    job->finish(carry_out(*job));
  }
  session_.reset();
}

// A connection that broke is made again once: reading and writing the same bytes twice does no harm. So a
// transfer that was cut off by a revocation hears the reason.
Status Peer::carry_out(Job& job) {
  for (bool again = job.kind != Job::Kind::kNotify;; again = false) {
    Status status = attempt(job);
    if (session_ && session_->broken()) session_.reset();
    if (status.code == Code::kConnectionLost && again && !job.deadline.expired() && !job.cancelled())
      continue;
    return status;
  }
}

Status Peer::attempt(Job& job) {
  if (job.deadline.expired())
    return {Code::kDeadlineExceeded, "the deadline passed before the transfer began"};
  if (Status connected = ensure_session(job); !connected) return connected;
  switch (job.kind) {
    case Job::Kind::kNotify: {
      std::vector<std::byte> nothing;
      return exchange(job, wire::Opcode::kNotify, job.notice, nothing);
    }
    case Job::Kind::kDescribe: {
      std::vector<std::byte> answer;
      if (Status asked = exchange(job, wire::Opcode::kDescribe, {}, answer); !asked) return asked;
      return learn(answer);
    }
    case Job::Kind::kRead:
    case Job::Kind::kWrite:
      break;
  }
  Status failed;
  if (may_map(job, failed)) return copy_mapped(job);
  if (!failed) return failed;
  job.set_route(session_->route() == Route::kUnix ? "unix" : "tcp");
  RangeProgram program(job.kind == Job::Kind::kRead ? Direction::kRead : Direction::kWrite, job.copies);
  if (Status ran = session_->run(program, job.deadline, job.cancel_fd(), Session::WhenCut::kAbandon); !ran)
    return ran;
  return program.outcome();
}

Status Peer::ensure_session(Job& job) {
  if (session_ && session_->idle() && session_->stale()) session_.reset();
  if (session_) return Status::ok();
  PeerDescription peer;
  uint64_t incarnation = 0;
  bool same_host = false;
  {
    const std::lock_guard lock(mutex_);
    peer.node_id = descriptor_.name;
    peer.host_id = descriptor_.host_id;
    peer.tcp_host = descriptor_.tcp_host;
    peer.tcp_port = descriptor_.tcp_port;
    peer.unix_path = descriptor_.unix_path;
    peer.tls = options_.tls;
    peer.tls.enabled = descriptor_.tls;
    incarnation = descriptor_.incarnation;
    same_host = options_.shared_memory && !descriptor_.unix_path.empty();
  }
  peer.credentials = options_.credentials;
  const auto dial = [&](Route route) -> Result<std::unique_ptr<Session>> {
    std::shared_ptr<net::TlsContext> tls;
    if (route == Route::kTcp && peer.tls.enabled) {
      auto context = net::make_tls_context({peer.tls.cert_file, peer.tls.key_file, peer.tls.ca_file}, false);
      if (!context) return context.status();
      tls = std::move(*context);
    }
    auto session = Session::start(peer, route, std::move(tls), {});
    if (!session) return session;
    RangeProgram nothing(Direction::kRead, {});
    if (Status ran = (*session)->run(nothing, job.deadline, job.cancel_fd()); !ran) return ran;
    return session;
  };
  Result<std::unique_ptr<Session>> session{Code::kNodeUnavailable, "the peer has no address"};
  if (same_host && !no_unix_) session = dial(Route::kUnix);
  if (session.code() == Code::kNodeUnavailable && !peer.tcp_host.empty()) {
    no_unix_ = true;
    session = dial(Route::kTcp);
  }
  if (!session) return session.status();
  if (!(*session)->is_engine())
    return {Code::kUnsupported, "a store node answers there, not a transfer engine"};
  if (incarnation != 0 && (*session)->node().incarnation != incarnation) {
    return {
        Code::kStaleIncarnation,
        "the engine was started again since it was described: its regions are gone, get a new descriptor"};
  }
  session_ = std::move(*session);
  return Status::ok();
}

Status Peer::exchange(Job& job, wire::Opcode opcode, std::span<const std::byte> meta,
                      std::vector<std::byte>& answer) {
  PlainRequest request(*session_, opcode, meta);
  if (Status ran = session_->run(request, job.deadline, job.cancel_fd(), Session::WhenCut::kAbandon); !ran)
    return ran;
  answer = std::move(request.answer);
  return request.status();
}

Status Peer::learn(std::span<const std::byte> bytes) {
  auto descriptor = wire::EngineDescriptor::decode(bytes);
  if (!descriptor) return {Code::kProtocolError, "the peer answered with a malformed descriptor"};
  if (descriptor->incarnation != session_->node().incarnation)
    return {Code::kProtocolError, "the peer answered with the descriptor of another engine"};
  const std::lock_guard lock(mutex_);
  // How it is reached stays what it was reached by: a peer behind another address does not know it.
  descriptor_.name = descriptor->name;
  descriptor_.incarnation = descriptor->incarnation;
  descriptor_.regions = std::move(descriptor->regions);
  if (descriptor_.host_id.empty()) descriptor_.host_id = descriptor->host_id;
  return Status::ok();
}

// Mapped memory -------------------------------------------------------------------------------------------

bool Peer::is_mappable(uint64_t address) const {
  const std::lock_guard lock(mutex_);
  return std::ranges::any_of(descriptor_.regions, [&](const wire::DescribedRegion& region) {
    return (region.flags & wire::DescribedRegion::kMappable) != 0 && address >= region.base &&
           address - region.base < region.size;
  });
}

bool Peer::may_map(Job& job, Status& failed) {
  if (no_mapping_ || session_->route() != Route::kUnix) return false;
  const bool write = job.kind == Job::Kind::kWrite;
  for (const RangeCopy& copy : job.copies) {
    if (copy.bytes == 0) continue;
    if (mapped_.covers(copy.remote)) {
      if (mapped_.find(copy.remote, copy.bytes, write) == nullptr) return false;
      continue;
    }
    if (!is_mappable(copy.remote)) return false;
    Writer meta;
    meta.u64(copy.remote);
    PlainRequest request(*session_, wire::Opcode::kMapRegion, meta.view());
    failed = session_->run(request, job.deadline, job.cancel_fd());
    if (!failed) return false;
    if (!request.status()) {
      no_mapping_ = request.status().code == Code::kUnsupported;
      return false;
    }
    Reader in(request.answer);
    const auto region = wire::MappedRegion::decode(in);
    if (!region) {
      failed = {Code::kProtocolError, "malformed MAP_REGION answer"};
      return false;
    }
    if (!mapped_.add(*region, std::move(request.fds))) {
      no_mapping_ = true;
      return false;
    }
    if (mapped_.find(copy.remote, copy.bytes, write) == nullptr) return false;
  }
  return !job.copies.empty();
}

Status Peer::copy_mapped(Job& job) {
  job.set_route("shm");
  const std::span<const RangeCopy> all(job.copies);
  for (size_t begin = 0; begin < all.size(); begin += wire::kMaxItems) {
    const auto part = all.subspan(begin, std::min<size_t>(wire::kMaxItems, all.size() - begin));
    wire::OpenRangesRequest open;
    open.write = job.kind == Job::Kind::kWrite;
    for (const RangeCopy& copy : part) open.ranges.push_back({copy.remote, copy.bytes});
    Writer meta;
    open.encode(meta);
    PlainRequest opening(*session_, wire::Opcode::kOpenRanges, meta.view());
    // Cut short, the answer could come later and the ranges would stay open: then the connection ends.
    if (Status opened = session_->run(opening, job.deadline, job.cancel_fd()); !opened) return opened;
    if (!opening.status()) return opening.status();
    const Status copied = copy_part(job, part);
    PlainRequest closing(*session_, wire::Opcode::kCloseRanges, opening.answer);
    if (Status closed = session_->run(closing, Deadline::after_ms(kCloseRangesMs)); !closed) return closed;
    if (!copied) return copied;
    if (!closing.status()) return closing.status();
  }
  return Status::ok();
}

Status Peer::copy_part(Job& job, std::span<const RangeCopy> part) {
  uint64_t together = 0;
  for (const RangeCopy& copy : part) together += copy.bytes;
  uint64_t since_look = 0;
  for (const RangeCopy& copy : part) {
    std::byte* const remote = mapped_.find(copy.remote, copy.bytes, job.kind == Job::Kind::kWrite);
    if (remote == nullptr && copy.bytes > 0) return {Code::kInternal, "a mapped range is gone"};
    for (uint64_t at = 0; at < copy.bytes; at += kCopyStepBytes) {
      const uint64_t bytes = std::min(kCopyStepBytes, copy.bytes - at);
      since_look += bytes;
      if (since_look >= kCopyStepBytes) {
        if (job.cancelled()) return {Code::kCancelled, "cancelled by the caller"};
        if (job.deadline.expired()) return {Code::kDeadlineExceeded, "the deadline passed during a transfer"};
        since_look = 0;
      }
      std::byte* const to = (job.kind == Job::Kind::kRead ? copy.local : remote) + at;
      const std::byte* const from = (job.kind == Job::Kind::kRead ? remote : copy.local) + at;
      (void)copy_crc32c(to, from, static_cast<size_t>(bytes), 0, together);
    }
  }
  return Status::ok();
}

}  // namespace mooncache::transfer
