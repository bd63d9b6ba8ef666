// Shared memory of a node on the same host: its arenas mapped into this process.
//
// Readers map read-only. A writable mapping of an arena is made at the first one-sided write into it, and
// only when the node passed a writable descriptor (same user). Nothing the node says is trusted: sizes are
// checked against the descriptor, memory that is not sealed against shrinking, or is a device whose pages may
// fail, is guarded (base/bus_guard.h: what is lost reads as zeros, and the transfer fails), and each extent
// is checked against the mapping before it is touched. A forked child has neither the mappings nor the
// descriptors: the memory of a node that ended is free when its clients are, whatever workers they forked.
#pragma once

#include <unistd.h>

#include <atomic>
#include <mutex>

#include "base/bus_guard.h"
#include "transport/queued_link.h"
#include "transport/session.h"

namespace mooncache {

class ShmSegments {
 public:
  // `infos` as the node listed them, `fds` as it passed them: one read-only each, then one writable per
  // arena.
  static Result<std::shared_ptr<ShmSegments>> map(std::span<const wire::SegmentInfo> infos,
                                                  std::vector<net::UniqueFd> fds);
  ~ShmSegments();

  // Memory of a range; null when it is not inside a mapped arena.
  const std::byte* readable(uint32_t segment, uint64_t offset, uint64_t size) const;
  std::byte* writable(uint32_t segment, uint64_t offset, uint64_t size);
  bool can_write() const { return can_write_; }
  // Memory was lost behind a mapping: what was read may be zeros, and what was written is nowhere.
  bool damaged() const;
  // The checksum of a whole extent where it lies. CHECKSUM_MISMATCH; TRANSPORT_UNAVAILABLE when memory was
  // lost, GENERATION_CHANGED, INVALID_ARGUMENT.
  Code verify(const RemoteExtent& extent, uint32_t crc) const;
  // Of a slot now; UINT64_MAX for a slot that does not exist.
  uint64_t generation(uint32_t slot) const;

 private:
  struct Segment {
    uint32_t id = 0;
    bool arena = true;
    uint64_t size = 0;
    const std::byte* read = nullptr;
    BusGuard read_guard, write_guard;  // the latter belongs to `write`
    std::atomic<std::byte*> write{nullptr};
    net::UniqueFd write_fd;
    net::ClosedInChild write_fd_here;  // goes before the descriptor
  };
  const Segment* find(uint32_t id, uint64_t offset, uint64_t size) const;

  std::vector<std::unique_ptr<Segment>> segments_;
  const Segment* generations_ = nullptr;
  bool can_write_ = false;
  const pid_t owner_ = getpid();  // who has the mappings
  std::mutex mutex_;              // making writable mappings
};

// ATTACH as a program; afterwards segments() or status() tells.
class AttachProgram final : public Program {
 public:
  explicit AttachProgram(Session& session) : session_(session) {}
  bool next(Request& request) override;
  bool finished() const override { return answered_; }
  Status on_response(const wire::FrameHeader& header, const Status& status, Reader& in,
                     PayloadSink& sink) override;
  const Result<std::shared_ptr<ShmSegments>>& segments() const { return segments_; }

 private:
  Session& session_;
  bool sent_ = false;
  bool answered_ = false;
  Result<std::shared_ptr<ShmSegments>> segments_{Code::kTransportUnavailable, "not attached"};
};

const Capabilities& shm_capabilities();

class ShmLink final : public QueuedLink {
 public:
  // `session` may be owned elsewhere (owned = null) and must outlive the link then.
  ShmLink(std::shared_ptr<ShmSegments> segments, Session* session, std::unique_ptr<Session> owned = nullptr);
  ~ShmLink() override;
  Session* session() override { return session_; }
  void close() override;
  bool healthy() const override {
    return QueuedLink::healthy() && (session_ == nullptr || !session_->broken());
  }
  size_t poll(std::span<Completion> completions, Deadline deadline) override;

 protected:
  Code begin(const Pending& pending) override;
  Code end(const Pending& pending) override;
  Code move(Pending& pending, Slice piece) override;

 private:
  std::shared_ptr<ShmSegments> segments_;
  Session* session_;
  std::unique_ptr<Session> owned_;
};

std::unique_ptr<Transport> make_shm_transport();
std::unique_ptr<Transport> make_tcp_transport();

}  // namespace mooncache
