// The operations of the protocol. Each is a function that takes a request's meta, and a state where the
// request does not end at once; one table says which function answers which opcode.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <variant>
#include <vector>

#include "mooncache/bytes.h"
#include "mooncache/store.h"
#include "server/disk_reads.h"
#include "server/holdings.h"
#include "server/output_queue.h"
#include "server/range_check.h"
#include "wire/frame.h"
#include "wire/messages.h"
#include "wire/ranges.h"

namespace mooncache::server {

class PeerSession;

// How a request goes on.
enum class Next : uint8_t {
  kDone,     // the response is queued, or none is due: the next frame may come
  kPayload,  // more bytes of its payload are needed
  kTurn,     // it goes on in a later turn: this one has done enough for it
  kSpace,    // it goes on when space is free, or at SpaceWait::deadline_ms
  kDisk,     // it goes on when something that it asked of a disk has ended, or soon
  kClose,    // it was refused: the connection ends when the response has been sent
};

// A PUT or WRITE whose payload is arriving. Bytes go from the socket into their extent; the CRC of each chunk
// is computed while the chunk is still in the cache.
class Inbound {
 public:
  static Inbound put(std::vector<wire::PutItem> items);
  static Inbound write(PeerSession& session, std::span<const wire::ReservedRange> ranges);
  // Ranges of an engine, under a use of the session; with a `code` they are read and dropped.
  static Inbound ranges(std::span<const wire::EngineWrite> writes, std::span<std::byte* const> places,
                        uint64_t use, Code code);

  // Prepares what comes, finishes what is complete; answers after the last piece.
  Next step(PeerSession& session, uint64_t budget);
  // Where the next bytes go: places of pieces, at most `chunk_bytes` in all. `read_ahead`: the end of the
  // payload is among them, so bytes behind it belong to the next frame.
  size_t gather(PeerSession& session, std::span<Slice> slices, uint64_t chunk_bytes, bool& read_ahead);
  // `bytes` of the payload have arrived: in place (from == nullptr), or at `from`, then they are copied and
  // belong to the current piece.
  Next received(PeerSession& session, uint64_t bytes, const std::byte* from);
  // Of the current piece.
  uint64_t missing_bytes() const { return pieces_[current_].size - received_; }
  // The request will not be completed. What a PUT has reserved goes back; a WRITE's reservation stays with
  // the connection.
  void abandon(PeerSession& session);
  uint64_t held_bytes() const;
  // Gives up ranges of an engine that it wants back: the rest is read and dropped.
  void drop_revoked(PeerSession& session);

 private:
  // Not kept: the bytes are read and dropped. Kept without a place: they go to the store by way of the
  // session's staging buffer.
  struct Piece {
    bool kept = false;
    std::byte* place = nullptr;
    uint64_t size = 0;
    uint64_t offset = 0;  // WRITE: inside its reservation
    uint32_t want_crc = 0;
    uint32_t crc = 0;
    Reservation reservation{};  // WRITE: its id only
    Code code = Code::kOk;
  };

  bool is_put() const { return !items_.empty(); }
  bool prepare(PeerSession& session);
  Code reserve(PeerSession& session, size_t number);
  uint64_t store(PeerSession& session, Piece& piece, uint64_t begin, uint64_t bytes, const std::byte* from);
  void finish(PeerSession& session, Piece& piece);
  void finish_put(PeerSession& session, Piece& piece, bool intact);
  Next respond(PeerSession& session);

  std::vector<wire::PutItem> items_;  // PUT only
  std::vector<Piece> pieces_;
  size_t current_ = 0;         // the piece that is arriving
  size_t prepared_ = 0;        // pieces before this one know where they go
  uint64_t received_ = 0;      // of the current piece
  uint64_t window_bytes_ = 0;  // PUT: reserved, not committed yet
  size_t staged_ = 0;          // bytes of the current piece that the store does not have yet
  bool of_engine_ = false;     // ranges of an engine
  uint64_t use_ = 0;           // of them; 0 = none
};

class ReserveOp {
 public:
  explicit ReserveOp(wire::ReserveRequest request);
  Next step(PeerSession& session, uint64_t budget);
  uint64_t held_bytes() const;

 private:
  wire::ReserveRequest request_;
  std::vector<wire::ReserveResult> results_;
  bool holds_ = false;  // a result is a reservation
};

// A GET, or a READ under a grant, whose results are being put together. Payloads are sent from the arena
// itself, under a pin that ends when the last byte is with the kernel.
class GetOp {
 public:
  explicit GetOp(std::vector<wire::GetItem> items);
  GetOp(const wire::ReadRequest& request, const BlockInfo& info, const PinGrant& grant);
  Next step(PeerSession& session, uint64_t budget);
  void abandon(PeerSession& session);
  uint64_t held_bytes() const;

 private:
  // kPayload: the block is in hand. kDone: the item is answered, without bytes.
  Next begin_item(PeerSession& session, const wire::GetItem& item);
  bool choose_range(PeerSession& session, const wire::GetItem& item, wire::GetResult& result);
  bool verify(PeerSession& session, uint64_t& budget);
  void finish_item(PeerSession& session, const wire::GetItem& item);
  void remember_sound(PeerSession& session);
  void queue_range(PeerSession& session, uint64_t offset, uint64_t length);
  void release_block(PeerSession& session);
  Hold hold() const;
  Next respond_get(PeerSession& session);
  Next respond_read(PeerSession& session);

  std::vector<wire::GetItem> items_;
  std::vector<wire::GetResult> results_;
  std::vector<OutPiece> parts_;
  uint64_t total_bytes_ = 0;
  uint64_t read_grant_ = 0;  // READ: the grant; 0 = GET
  // The block in hand.
  Pinned pinned_;
  bool holding_ = false;
  bool verify_ = false;  // a part is wanted: first see that the whole is sound
  RangeCheck check_;
  // GET: the last block of several chunks that was found sound in this request.
  uint64_t sound_generation_ = 0;
  uint32_t sound_slot_ = 0;
  std::vector<uint32_t> sound_chunks_;
  DiskReads disk_;
};

// READ_RANGES: checksums first, then the bytes go out from where they lie.
struct ReadRangesOp {
  std::vector<wire::EngineRange> ranges;
  std::vector<std::byte*> places;
  std::vector<uint32_t> crcs;
  uint64_t use = 0;
  uint64_t checked = 0;  // bytes of the next range
  uint32_t crc = 0;      // of these

  Next step(PeerSession& session, uint64_t budget);
  uint64_t held_bytes() const;
};

class LookupOp {
 public:
  explicit LookupOp(std::vector<Key> keys);
  Next step(PeerSession& session, uint64_t budget);
  uint64_t held_bytes() const;

 private:
  std::vector<Key> keys_;
  std::vector<wire::LookupResult> results_;
  std::vector<uint64_t> grants_;
  DiskReads disk_;
};

// REMOVE of blocks that lie on a disk: it is answered when no restart brings them back, or after a second.
struct RemoveOp {
  std::vector<Code> codes;
  std::shared_ptr<std::atomic<size_t>> left;  // removals that do not last yet
  uint64_t deadline_ms = 0;

  Next step(PeerSession& session, uint64_t budget);
};

// Commands to devices take long: a turn has a budget for it, and the operation goes on in the next
// one.

// A LOOKUP or RESERVE whose grants are being opened to the peer's devices.
struct ExposeOp {
  bool writable = false;
  std::vector<std::byte> answer;  // up to the exposures
  std::vector<uint64_t> grants;   // 0: nothing to open
  std::vector<wire::Exposure> exposures;
  size_t next = 0;

  Next step(PeerSession& session, uint64_t budget);
};
struct EndpointOp {
  std::vector<wire::RdmaAddress> peers, answers;

  Next step(PeerSession& session, uint64_t budget);
};
// RELEASE, COMMIT and ABORT, which close grants first.
struct ReleaseOp {
  std::vector<uint64_t> grants;
  size_t next = 0;

  Next step(PeerSession& session, uint64_t budget);
};
struct CommitOp {
  std::vector<wire::CommitItem> items;
  std::vector<Code> codes;

  Next step(PeerSession& session, uint64_t budget);
};
struct AbortOp {
  std::vector<uint64_t> grants;
  std::vector<Code> codes;

  Next step(PeerSession& session, uint64_t budget);
};

// The request in hand; monostate: none.
using PendingOperation = std::variant<std::monostate, Inbound, ReserveOp, GetOp, LookupOp, ExposeOp,
                                      EndpointOp, ReleaseOp, CommitOp, AbortOp, RemoveOp, ReadRangesOp>;

struct Operation {
  Next (*start)(PeerSession&, wire::Meta) = nullptr;
  bool takes_payload = false;
  bool before_auth = false;  // a peer that has not proved itself may send it
  bool of_engine = false;    // a transfer engine answers it
};
const Operation& operation(wire::Opcode opcode);

namespace ops {

// ops_auth.cpp: who the peer is.
Next hello(PeerSession& session, wire::Meta meta);
Next auth(PeerSession& session, wire::Meta meta);
// inbound.cpp (PUT, WRITE) and ops_write.cpp: how blocks come in.
Next put(PeerSession& session, wire::Meta meta);
Next reserve(PeerSession& session, wire::Meta meta);
Next write(PeerSession& session, wire::Meta meta);
Next commit(PeerSession& session, wire::Meta meta);
Next abort(PeerSession& session, wire::Meta meta);
// ops_read.cpp: how blocks go out.
Next get(PeerSession& session, wire::Meta meta);
Next read(PeerSession& session, wire::Meta meta);
Next lookup(PeerSession& session, wire::Meta meta);
Next release(PeerSession& session, wire::Meta meta);
Next match(PeerSession& session, wire::Meta meta);
Next prefetch(PeerSession& session, wire::Meta meta);
// ops_admin.cpp: everything about blocks but their bytes, and the node.
Next remove(PeerSession& session, wire::Meta meta);
Next pin(PeerSession& session, wire::Meta meta);
Next unpin(PeerSession& session, wire::Meta meta);
Next stat(PeerSession& session, wire::Meta meta);
Next attach(PeerSession& session, wire::Meta meta);
Next list(PeerSession& session, wire::Meta meta);
Next node_stat(PeerSession& session, wire::Meta meta);
Next ping(PeerSession& session, wire::Meta meta);
// ops_wait.cpp: blocks that are still to come.
Next wait(PeerSession& session, wire::Meta meta);
Next give_up(PeerSession& session, wire::Meta meta);
// ops_map.cpp: the nodes of the cluster.
Next cluster_map(PeerSession& session, wire::Meta meta);
// ops_ranges.cpp: memory of a transfer engine.
Next read_ranges(PeerSession& session, wire::Meta meta);
Next write_ranges(PeerSession& session, wire::Meta meta);
Next open_ranges(PeerSession& session, wire::Meta meta);
Next close_ranges(PeerSession& session, wire::Meta meta);
Next map_region(PeerSession& session, wire::Meta meta);
Next notify(PeerSession& session, wire::Meta meta);
Next describe(PeerSession& session, wire::Meta meta);
// ops_rdma.cpp: the control side of transfers in which this process takes no part.
Next endpoint(PeerSession& session, wire::Meta meta);
bool can_rdma(PeerSession& session);
// Answers LOOKUP (pins, to read) or RESERVE (reservations, to write): `writer` holds the answer up to the
// exposures; `grants` has 0 where a result has no grant.
Next respond_exposed(PeerSession& session, Writer& writer, std::vector<uint64_t> grants, bool writable);

}  // namespace ops

}  // namespace mooncache::server
