#include "transport/shm.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>

#include "mooncache/crc32c.h"
#include "transport/plain_regions.h"

namespace mooncache {

namespace {

constexpr size_t kMaxSegments = 200;

// CXL or persistent memory: a device cannot shrink, and mmap checks its size.
bool is_dax_device(const struct stat& facts) {
  if (!S_ISCHR(facts.st_mode)) return false;
  const std::string about = "/sys/dev/char/" + std::to_string(major(facts.st_rdev)) + ":" +
                            std::to_string(minor(facts.st_rdev)) + "/subsystem";
  char target[512];
  const ssize_t length = readlink(about.c_str(), target, sizeof target);
  return length > 4 && std::string_view(target, static_cast<size_t>(length)).ends_with("/dax");
}

Result<std::byte*> map_fd(int fd, uint64_t size, bool writable) {
  struct stat facts {};
  const bool found = size != 0 && fstat(fd, &facts) == 0;
  const bool device = found && is_dax_device(facts);
  if (!found || (!device && (facts.st_size < 0 || static_cast<uint64_t>(facts.st_size) < size))) {
    return {Code::kTransportUnavailable,
            "shared memory unavailable, because the node passed a segment shorter than it says"};
  }
  const int seals = device ? F_SEAL_SHRINK : fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    return {Code::kTransportUnavailable,
            "shared memory unavailable, because the node's segment is not sealed against shrinking"};
  }
  void* memory = mmap(nullptr, size, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) {
    return {Code::kTransportUnavailable,
            "shared memory unavailable, because mmap failed: " + net::errno_text(errno)};
  }
  if (madvise(memory, size, MADV_DONTFORK) != 0) {
    const int error = errno;
    (void)munmap(memory, size);
    return {Code::kTransportUnavailable,
            "shared memory unavailable, because madvise(MADV_DONTFORK) failed: " + net::errno_text(error)};
  }
  return static_cast<std::byte*>(memory);
}

}  // namespace

Result<std::shared_ptr<ShmSegments>> ShmSegments::map(std::span<const wire::SegmentInfo> infos,
                                                      std::vector<net::UniqueFd> fds) {
  size_t arenas = 0;
  for (const wire::SegmentInfo& info : infos) arenas += info.kind == wire::SegmentInfo::kArena ? 1 : 0;
  if (infos.empty() || infos.size() > kMaxSegments ||
      (fds.size() != infos.size() && fds.size() != infos.size() + arenas)) {
    return {Code::kTransportUnavailable, "shared memory unavailable, because the node passed " +
                                             std::to_string(fds.size()) + " descriptors for " +
                                             std::to_string(infos.size()) + " segments"};
  }
  auto mapped = std::make_shared<ShmSegments>();
  mapped->can_write_ = fds.size() > infos.size();
  size_t next_writable = infos.size();
  for (size_t i = 0; i < infos.size(); ++i) {
    auto segment = std::make_unique<Segment>();
    segment->id = infos[i].segment;
    segment->arena = infos[i].kind == wire::SegmentInfo::kArena;
    segment->size = infos[i].size;
    auto memory = map_fd(fds[i].get(), segment->size, false);
    if (!memory) return memory.status();
    segment->read = *memory;
    if (segment->arena && mapped->can_write_) {
      segment->write_fd = std::move(fds[next_writable++]);
      segment->write_fd_here = net::ClosedInChild(segment->write_fd.get());
    }
    if (infos[i].kind == wire::SegmentInfo::kGenerationTable) mapped->generations_ = segment.get();
    mapped->segments_.push_back(std::move(segment));
  }
  if (mapped->generations_ == nullptr) {
    return {Code::kTransportUnavailable,
            "shared memory unavailable, because the node passed no generation table"};
  }
  return mapped;
}

ShmSegments::~ShmSegments() {
  if (owner_ != getpid()) return;  // other memory may lie at these addresses in a child
  for (const auto& segment : segments_) {
    if (segment->read != nullptr) munmap(const_cast<std::byte*>(segment->read), segment->size);
    if (std::byte* memory = segment->write.load()) munmap(memory, segment->size);
  }
}

const ShmSegments::Segment* ShmSegments::find(uint32_t id, uint64_t offset, uint64_t size) const {
  for (const auto& segment : segments_) {
    if (segment->id == id)
      return segment->arena && inside(offset, size, segment->size) ? segment.get() : nullptr;
  }
  return nullptr;
}

const std::byte* ShmSegments::readable(uint32_t segment, uint64_t offset, uint64_t size) const {
  const Segment* found = find(segment, offset, size);
  return found == nullptr ? nullptr : found->read + offset;
}

std::byte* ShmSegments::writable(uint32_t id, uint64_t offset, uint64_t size) {
  const Segment* found = find(id, offset, size);
  if (found == nullptr || !found->write_fd.valid()) return nullptr;
  auto* segment = const_cast<Segment*>(found);
  std::byte* memory = segment->write.load(std::memory_order_acquire);
  if (memory == nullptr) {
    const std::lock_guard lock(mutex_);
    memory = segment->write.load(std::memory_order_relaxed);
    if (memory == nullptr) {
      auto mapped = map_fd(segment->write_fd.get(), segment->size, true);
      if (!mapped) return nullptr;
      memory = *mapped;
      segment->write.store(memory, std::memory_order_release);
    }
  }
  return memory + offset;
}

uint64_t ShmSegments::generation(uint32_t slot) const {
  if (slot >= generations_->size / sizeof(uint64_t)) return UINT64_MAX;
  // the table is page-aligned, so the entry is an aligned word that the node changes atomically
  const void* entry = generations_->read + slot * sizeof(uint64_t);
  return __atomic_load_n(static_cast<const uint64_t*>(entry), __ATOMIC_ACQUIRE);
}

bool AttachProgram::next(Request& request) {
  if (sent_) return false;
  sent_ = true;
  session_.collect_fds();
  request.opcode = wire::Opcode::kAttach;
  return true;
}

Status AttachProgram::on_response(const wire::FrameHeader&, const Status& status, Reader& in, PayloadSink&) {
  answered_ = true;
  auto fds = session_.take_fds();
  if (!status.is_ok()) {
    segments_ = Status{Code::kTransportUnavailable, "shared memory unavailable, because " + status.message};
    return Status::ok();
  }
  auto infos = wire::decode_items<wire::SegmentInfo>(in);
  if (!infos) return {Code::kProtocolError, "malformed ATTACH answer"};
  segments_ = ShmSegments::map(*infos, std::move(fds));
  return Status::ok();
}

const Capabilities& shm_capabilities() {
  static const Capabilities capabilities = [] {
    Capabilities facts;
    facts.name = "shm";
    facts.one_sided = true;
    facts.same_host_only = true;
    facts.max_slices = 65'536;
    facts.max_in_flight = 4096;
    return facts;
  }();
  return capabilities;
}

ShmLink::ShmLink(std::shared_ptr<ShmSegments> segments, Session* session, std::unique_ptr<Session> owned)
    : QueuedLink(shm_capabilities()),
      segments_(std::move(segments)),
      session_(session),
      owned_(std::move(owned)) {}

ShmLink::~ShmLink() = default;

// The socket closes after the last copy: the node frees one-sided reservations only then.
void ShmLink::close() {
  QueuedLink::close();
  session_ = nullptr;
  owned_.reset();
}

size_t ShmLink::poll(std::span<Completion> completions, Deadline deadline) {
  // a node that died leaves its memory mapped here; its grants are worth nothing any more
  if (owned_ && owned_->idle() && owned_->stale()) mark_dead();
  return QueuedLink::poll(completions, deadline);
}

Code ShmLink::begin(const Pending& pending) {
  const RemoteExtent& remote = pending.transfer.remote;
  if (pending.transfer.direction == Direction::kWrite) {
    if (!segments_->can_write()) return Code::kTransportUnavailable;
    if (segments_->writable(remote.segment, remote.offset, remote.size) == nullptr)
      return Code::kInvalidArgument;
  } else if (segments_->readable(remote.segment, remote.offset, remote.size) == nullptr) {
    return Code::kInvalidArgument;
  }
  return segments_->generation(remote.slot) == remote.generation ? Code::kOk : Code::kGenerationChanged;
}

Code ShmLink::end(const Pending& pending) {
  std::atomic_thread_fence(std::memory_order_acquire);
  const RemoteExtent& remote = pending.transfer.remote;
  return segments_->generation(remote.slot) == remote.generation ? Code::kOk : Code::kGenerationChanged;
}

Code ShmLink::move(Pending& pending, Slice piece) {
  const RemoteExtent& remote = pending.transfer.remote;
  const uint64_t at = remote.offset + pending.transfer.offset + pending.moved;  // begin() checked the sum
  if (pending.transfer.direction == Direction::kRead) {
    pending.crc =
        copy_crc32c(piece.data, segments_->readable(remote.segment, at, piece.size), piece.size, pending.crc);
  } else {
    pending.crc =
        copy_crc32c(segments_->writable(remote.segment, at, piece.size), piece.data, piece.size, pending.crc);
  }
  return Code::kOk;
}

namespace {

class ShmTransport final : public Transport {
 public:
  const Capabilities& capabilities() const override { return shm_capabilities(); }
  Status availability() const override { return Status::ok(); }
  Result<RegionHandle> register_region(const Region& region) override { return regions_.add(region); }
  Status unregister_region(RegionHandle handle) override { return regions_.remove(handle); }
  Result<std::unique_ptr<Link>> connect(const PeerDescription& peer, Deadline deadline) override {
    if (peer.unix_path.empty()) {
      return {Code::kTransportUnavailable, "shared memory unavailable, because the node has no unix socket"};
    }
    auto session = Session::connect(peer, Route::kUnix, deadline);
    if (!session) return session.status();
    AttachProgram attach(**session);
    if (Status status = (*session)->run(attach, deadline); !status) return status;
    if (!attach.segments()) return attach.segments().status();
    Session* raw = session->get();
    return std::unique_ptr<Link>(new ShmLink(*attach.segments(), raw, std::move(*session)));
  }

 private:
  PlainRegions regions_;
};

}  // namespace

std::unique_ptr<Transport> make_shm_transport() {
  return std::make_unique<ShmTransport>();
}

}  // namespace mooncache
