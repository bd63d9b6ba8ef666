#include "server/peer_session.h"

#include <algorithm>
#include <array>
#include <type_traits>

namespace mooncache::server {

using wire::Opcode;

namespace {

// Before a peer has proved itself it may send HELLO and AUTH, nothing that needs more.
constexpr uint32_t kMaxMetaBeforeAuth = 4096;

}  // namespace

const Operation& operation(Opcode opcode) {
  static const std::array<Operation, wire::kMaxOpcode + 1> table = [] {
    std::array<Operation, wire::kMaxOpcode + 1> all{};
    const auto set = [&all](Opcode number, Operation operation) {
      all[static_cast<size_t>(number)] = operation;
    };
    set(Opcode::kHello, {.start = ops::hello, .before_auth = true, .of_engine = true});
    set(Opcode::kAuth, {.start = ops::auth, .before_auth = true, .of_engine = true});
    set(Opcode::kPut, {.start = ops::put, .takes_payload = true});
    set(Opcode::kGet, {.start = ops::get});
    set(Opcode::kLookup, {.start = ops::lookup});
    set(Opcode::kRelease, {.start = ops::release});
    set(Opcode::kReserve, {.start = ops::reserve});
    set(Opcode::kWrite, {.start = ops::write, .takes_payload = true});
    set(Opcode::kCommit, {.start = ops::commit});
    set(Opcode::kAbort, {.start = ops::abort});
    set(Opcode::kMatch, {.start = ops::match});
    set(Opcode::kRemove, {.start = ops::remove});
    set(Opcode::kPin, {.start = ops::pin});
    set(Opcode::kUnpin, {.start = ops::unpin});
    set(Opcode::kStat, {.start = ops::stat});
    set(Opcode::kRead, {.start = ops::read});
    set(Opcode::kAttach, {.start = ops::attach});
    set(Opcode::kList, {.start = ops::list});
    set(Opcode::kNodeStat, {.start = ops::node_stat});
    set(Opcode::kPing, {.start = ops::ping, .of_engine = true});
    set(Opcode::kEndpoint, {.start = ops::endpoint});
    set(Opcode::kWait, {.start = ops::wait});
    set(Opcode::kGiveUp, {.start = ops::give_up});
    set(Opcode::kPrefetch, {.start = ops::prefetch});
    set(Opcode::kReadRanges, {.start = ops::read_ranges, .of_engine = true});
    set(Opcode::kWriteRanges, {.start = ops::write_ranges, .takes_payload = true, .of_engine = true});
    set(Opcode::kOpenRanges, {.start = ops::open_ranges, .of_engine = true});
    set(Opcode::kCloseRanges, {.start = ops::close_ranges, .of_engine = true});
    set(Opcode::kMapRegion, {.start = ops::map_region, .of_engine = true});
    set(Opcode::kNotify, {.start = ops::notify, .of_engine = true});
    set(Opcode::kDescribe, {.start = ops::describe, .of_engine = true});
    set(Opcode::kClusterMap, {.start = ops::cluster_map});
    return all;
  }();
  return table[static_cast<size_t>(opcode)];
}

std::optional<size_t> PeerSession::accept(std::span<const std::byte, wire::kHeaderBytes> header) {
  const auto refused = [this](Code code, const std::string& message, CloseReason reason) {
    (void)refuse(code, message, reason);
    return std::nullopt;
  };
  const auto decoded = wire::decode_header(header);
  if (!decoded) {
    // Answer with the peer's own request id when it has one; its opcode may be anything.
    Reader reader(header.subspan(8));
    request = {};
    request.opcode = Opcode::kHello;
    request.request_id = reader.u64();
    const bool skew = decoded.code() == Code::kVersionSkew;
    if (skew) metrics().version_skews.add();
    return refused(decoded.code(), decoded.status().message,
                   skew ? CloseReason::kVersion : CloseReason::kProtocol);
  }
  request = *decoded;
  if (!proven() && (request.meta_bytes > kMaxMetaBeforeAuth || request.payload_bytes != 0))
    return refused(Code::kUnauthenticated, "the connection is not authenticated", CloseReason::kAuth);
  if (request.response)
    return refused(Code::kProtocolError, "a client sends requests, not responses", CloseReason::kProtocol);
  if (request.payload_bytes != 0 && !operation(request.opcode).takes_payload)
    return refused(Code::kProtocolError, "this request carries no payload", CloseReason::kProtocol);
  return request.meta_bytes;
}

Next PeerSession::start(std::span<const std::byte, wire::kHeaderBytes> header, wire::Meta meta) {
  start_ns = Loop::now_ns();
  wait = {};
  if (const Status check = wire::verify_check(header, meta); !check)
    return refuse(check.code, check.message, CloseReason::kProtocol);
  metrics().requests[static_cast<size_t>(request.opcode)].add();
  const Operation& wanted = operation(request.opcode);
  if (!proven() && !wanted.before_auth) {
    metrics().auth_failures.add();
    return refuse(Code::kUnauthenticated, "the connection is not authenticated", CloseReason::kAuth);
  }
  if (who.expires_ms != 0 && now_ms() >= who.expires_ms) {
    metrics().auth_failures.add();
    return refuse(Code::kUnauthenticated, "the session token has expired: connect with a new one",
                  CloseReason::kAuth);
  }
  if (who.proven_by.withdrawn()) {
    metrics().auth_failures.add();
    return refuse(Code::kUnauthenticated, "the cluster's token was withdrawn: connect with the new one",
                  CloseReason::kAuth);
  }
  if (config().ranges && !wanted.of_engine)
    return refuse(Code::kUnsupported, "this is a transfer engine; it has no blocks", CloseReason::kProtocol);
  return wanted.start(*this, meta);
}

Next PeerSession::resume() {
  const uint64_t budget = loop_.visit().check_bytes;
  return std::visit(
      [&](auto& state) {
        if constexpr (std::is_same_v<std::decay_t<decltype(state)>, std::monostate>)
          return Next::kDone;
        else
          return state.step(*this, budget);
      },
      pending);
}

void PeerSession::abandon() {
  if (auto* inbound = std::get_if<Inbound>(&pending)) inbound->abandon(*this);
  if (auto* get = std::get_if<GetOp>(&pending)) get->abandon(*this);
  if (auto* ranges = std::get_if<ReadRangesOp>(&pending)) held.end_ranges(ranges->use);
  pending = std::monostate{};
  held.release_grants();
  metrics().waits_withdrawn.add(loop_.shared().waits.forget(waiter));
}

uint64_t PeerSession::held_bytes() const {
  uint64_t bytes = out.held_bytes() + (staging_ ? kStagingBytes : 0);
  if (const auto* inbound = std::get_if<Inbound>(&pending)) bytes += inbound->held_bytes();
  if (const auto* get = std::get_if<GetOp>(&pending)) bytes += get->held_bytes();
  if (const auto* ranges = std::get_if<ReadRangesOp>(&pending)) bytes += ranges->held_bytes();
  if (const auto* looking = std::get_if<LookupOp>(&pending)) bytes += looking->held_bytes();
  if (const auto* reserving = std::get_if<ReserveOp>(&pending)) bytes += reserving->held_bytes();
  return bytes;
}

// Responses -------------------------------------------------------------------------------------------

Writer& PeerSession::begin_response(Status status) {
  Writer& writer = loop_.writer();
  wire::encode_status(writer, status);
  return writer;
}

void PeerSession::respond_head(Writer& meta, uint64_t payload_bytes, bool last) {
  out.push_head(request, meta.view(), payload_bytes, start_ns, last);
}

Next PeerSession::respond(Writer& meta) {
  respond_head(meta, 0, true);
  return Next::kDone;
}

Next PeerSession::respond_status(Status status) {
  return respond(begin_response(std::move(status)));
}

Next PeerSession::respond_codes(std::span<const Code> codes) {
  Writer& writer = begin_response();
  wire::encode_codes(writer, codes);
  return respond(writer);
}

Next PeerSession::close(Status status, CloseReason reason) {
  respond_status(std::move(status));
  close_reason_ = reason;
  return Next::kClose;
}

Next PeerSession::refuse(Code code, const std::string& message, CloseReason reason) {
  if (reason == CloseReason::kProtocol) metrics().protocol_errors.add();
  loop_.shared().log.push(30, "connection_closed", std::string(code_name(code)) + ": " + message);
  return close({code, message}, reason);
}

Next PeerSession::malformed() {
  return refuse(Code::kProtocolError,
                "malformed " + std::string(wire::opcode_name(request.opcode)) + " request",
                CloseReason::kProtocol);
}

// Waiting ---------------------------------------------------------------------------------------------

bool PeerSession::may_wait(uint32_t allowed_ms) {
  const uint32_t allowed = std::min(allowed_ms, config().max_wait_ms);
  if (wait.waited_ms >= allowed) {
    if (allowed > 0) metrics().parked_expired.add();
    return false;
  }
  if (wait.ticket == 0) {
    metrics().parked_total.add();
    wait.ticket = loop_.shared().park_tickets.fetch_add(1) + 1;
  }
  wait.begin_ms = now_ms();
  wait.deadline_ms = wait.begin_ms + (allowed - wait.waited_ms);
  return true;
}

void PeerSession::end_wait() {
  const uint64_t waited = now_ms() - wait.begin_ms;
  wait.waited_ms += static_cast<uint32_t>(std::min<uint64_t>(waited, UINT32_MAX - wait.waited_ms));
}

bool PeerSession::afford(uint64_t& budget, uint64_t cost) {
  if (cost > 0 && budget == 0) return false;
  loop_.spend(cost, budget);
  return true;
}

std::byte* PeerSession::staging() {
  if (staging_ == nullptr) staging_ = std::make_unique_for_overwrite<std::byte[]>(kStagingBytes);
  return staging_.get();
}

// Patience ---------------------------------------------------------------------------------------------

bool PeerSession::too_slow(bool parked) {
  const bool receiving = inbound() != nullptr && !parked && !out.full();
  return progress.too_slow(receiving || !out.empty(), now_ms(), config().progress_timeout_ms,
                           config().min_progress_bytes);
}

// The end of a process on this host always shows; that of a host on the network may not.
uint64_t PeerSession::silence_limit_ms() const {
  const uint64_t idle_ms = config().idle_timeout_ms;
  const uint64_t grant_ms = is_unix || held.empty() ? 0 : config().grant_timeout_ms;
  if (idle_ms == 0 || grant_ms == 0) return idle_ms + grant_ms;
  return std::min(idle_ms, grant_ms);
}

}  // namespace mooncache::server
