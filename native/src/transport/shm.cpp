#include "transport/shm.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <system_error>
#include <thread>

#include "base/dax.h"
#include "mooncache/crc32c.h"
#include "transport/plain_regions.h"

namespace mooncache {

namespace {

constexpr size_t kMaxSegments = 200;
constexpr const char* kSysfs = "/sys";

// What one fault loses: a page of the mapping.
uint64_t page_bytes_of(int fd, const struct stat& facts) {
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  if (dax::is_device(kSysfs, facts)) return dax::page_bytes(kSysfs, facts.st_rdev);
  struct statfs system {};
  const bool huge = fstatfs(fd, &system) == 0 && static_cast<uint32_t>(system.f_type) == HUGETLBFS_MAGIC;
  return huge ? std::max(page, static_cast<uint64_t>(system.f_bsize)) : page;
}

struct Mapped {
  std::byte* memory = nullptr;
  BusGuard guard;
};

Result<Mapped> map_fd(int fd, uint64_t size, bool writable) {
  struct stat facts {};
  const bool found = size != 0 && fstat(fd, &facts) == 0;
  const bool device = found && dax::is_device(kSysfs, facts);
  if (!found || (!device && (facts.st_size < 0 || static_cast<uint64_t>(facts.st_size) < size))) {
    return {Code::kTransportUnavailable,
            "shared memory unavailable, because the node passed a segment shorter than it says"};
  }
  const int seals = device ? 0 : fcntl(fd, F_GET_SEALS);
  const bool may_go = seals < 0 || (seals & F_SEAL_SHRINK) == 0;
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
  Mapped mapped{static_cast<std::byte*>(memory), {}};
  if (may_go) {
    mapped.guard = BusGuard(mapped.memory, size, page_bytes_of(fd, facts));
    if (!mapped.guard.active()) {
      (void)munmap(memory, size);
      return {
          Code::kTransportUnavailable,
          "shared memory unavailable, because the node's segment is not sealed against shrinking, and is one "
          "mapping more than this process can guard"};
    }
  }
  return mapped;
}

// The kernel takes 50 ms for each GiB of small pages that were used. Who lets go of a node that has gone is
// about to ask the next one.
void unmap(std::byte* memory, size_t size) {
  constexpr size_t kApartBytes = 64 << 20;
  if (size >= kApartBytes) {
    try {
      std::thread([memory, size] { (void)munmap(memory, size); }).detach();
      return;
    } catch (const std::system_error&) {  // no more threads: at once, then
    }
  }
  (void)munmap(memory, size);
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
    segment->read = memory->memory;
    segment->read_guard = std::move(memory->guard);
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
    segment->read_guard = BusGuard();
    segment->write_guard = BusGuard();
    if (segment->read != nullptr) unmap(const_cast<std::byte*>(segment->read), segment->size);
    if (std::byte* memory = segment->write.load()) unmap(memory, segment->size);
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
      memory = mapped->memory;
      segment->write_guard = std::move(mapped->guard);
      segment->write.store(memory, std::memory_order_release);
    }
  }
  return memory + offset;
}

bool ShmSegments::damaged() const {
  return std::any_of(segments_.begin(), segments_.end(), [](const auto& segment) {
    if (segment->read_guard.lost_bytes() > 0) return true;
    // written after the mapping was made
    return segment->write.load(std::memory_order_acquire) != nullptr && segment->write_guard.lost_bytes() > 0;
  });
}

uint64_t ShmSegments::generation(uint32_t slot) const {
  if (slot >= generations_->size / sizeof(uint64_t)) return UINT64_MAX;
  // the table is page-aligned, so the entry is an aligned word that the node changes atomically
  const void* entry = generations_->read + slot * sizeof(uint64_t);
  return __atomic_load_n(static_cast<const uint64_t*>(entry), __ATOMIC_ACQUIRE);
}

Code ShmSegments::verify(const RemoteExtent& extent, uint32_t crc) const {
  const std::byte* memory = readable(extent.segment, extent.offset, extent.size);
  if (memory == nullptr) return Code::kInvalidArgument;
  const bool same = crc32c({memory, static_cast<size_t>(extent.size)}) == crc;
  if (damaged()) return Code::kTransportUnavailable;  // what was read may be zeros
  if (generation(extent.slot) != extent.generation) return Code::kGenerationChanged;
  return same ? Code::kOk : Code::kChecksumMismatch;
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
  // a node that died leaves its memory mapped here; its grants are no longer valid
  if (owned_ && owned_->idle() && owned_->stale()) mark_dead();
  return QueuedLink::poll(completions, deadline);
}

Code ShmLink::begin(const Pending& pending) {
  const RemoteExtent& remote = pending.transfer.remote;
  if (segments_->damaged()) return Code::kTransportUnavailable;
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
  if (segments_->damaged()) return Code::kTransportUnavailable;  // what was moved may be zeros
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
    // The writer does not read there again: a layer of many blocks is many small pieces of much.
    pending.crc = copy_crc32c(segments_->writable(remote.segment, at, piece.size), piece.data, piece.size,
                              pending.crc, std::max(pending.length, pending.transfer.together));
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
