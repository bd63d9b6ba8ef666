#include "server/session.h"

#include <algorithm>
#include <array>
#include <type_traits>

namespace mooncache::server {

using wire::Opcode;

const Operation& operation(Opcode opcode) {
  static const std::array<Operation, wire::kMaxOpcode + 1> table = [] {
    std::array<Operation, wire::kMaxOpcode + 1> all{};
    const auto set = [&all](Opcode number, Operation operation) {
      all[static_cast<size_t>(number)] = operation;
    };
    set(Opcode::kHello, {.start = ops::hello, .before_auth = true});
    set(Opcode::kAuth, {.start = ops::auth, .before_auth = true});
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
    set(Opcode::kPing, {.start = ops::ping});
    set(Opcode::kEndpoint, {.start = ops::endpoint});
    return all;
  }();
  return table[static_cast<size_t>(opcode)];
}

Next Session::resume() {
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

void Session::abandon() {
  if (auto* inbound = std::get_if<Inbound>(&pending)) inbound->abandon(*this);
  if (auto* get = std::get_if<GetOp>(&pending)) get->abandon(*this);
  pending = std::monostate{};
  held.release_grants();
}

uint64_t Session::held_bytes() const {
  uint64_t bytes = out.held_bytes() + (staging_ ? kStagingBytes : 0);
  if (const auto* inbound = std::get_if<Inbound>(&pending)) bytes += inbound->held_bytes();
  if (const auto* get = std::get_if<GetOp>(&pending)) bytes += get->held_bytes();
  if (const auto* reserving = std::get_if<ReserveOp>(&pending)) bytes += reserving->held_bytes();
  return bytes;
}

// Responses -------------------------------------------------------------------------------------------

Writer& Session::begin_response(Status status) {
  Writer& writer = loop_.writer();
  wire::encode_status(writer, status);
  return writer;
}

void Session::respond_head(Writer& meta, uint64_t payload_bytes, bool last) {
  out.push_head(request, meta.view(), payload_bytes, start_ns, last);
}

Next Session::respond(Writer& meta) {
  respond_head(meta, 0, true);
  return Next::kDone;
}

Next Session::respond_status(Status status) {
  return respond(begin_response(std::move(status)));
}

Next Session::respond_codes(std::span<const Code> codes) {
  Writer& writer = begin_response();
  wire::encode_codes(writer, codes);
  return respond(writer);
}

Next Session::close(Status status, CloseReason reason) {
  respond_status(std::move(status));
  close_reason_ = reason;
  return Next::kClose;
}

Next Session::refuse(Code code, const std::string& message, CloseReason reason) {
  if (reason == CloseReason::kProtocol) metrics().protocol_errors.add();
  loop_.shared().log.push(30, "connection_closed", std::string(code_name(code)) + ": " + message);
  return close({code, message}, reason);
}

Next Session::malformed() {
  return refuse(Code::kProtocolError,
                "malformed " + std::string(wire::opcode_name(request.opcode)) + " request",
                CloseReason::kProtocol);
}

// Waiting ---------------------------------------------------------------------------------------------

bool Session::may_wait(uint32_t allowed_ms) {
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

void Session::end_wait() {
  const uint64_t waited = now_ms() - wait.begin_ms;
  wait.waited_ms += static_cast<uint32_t>(std::min<uint64_t>(waited, UINT32_MAX - wait.waited_ms));
}

bool Session::afford(uint64_t& budget, uint64_t cost) {
  if (cost > 0 && budget == 0) return false;
  loop_.spend(cost, budget);
  return true;
}

std::byte* Session::staging() {
  if (staging_ == nullptr) staging_ = std::make_unique_for_overwrite<std::byte[]>(kStagingBytes);
  return staging_.get();
}

}  // namespace mooncache::server
