// RESERVE, COMMIT, ABORT: how blocks come in, beside PUT and WRITE (inbound.cpp).
#include <utility>

#include "base/free_memory.h"
#include "server/peer_session.h"

namespace mooncache::server {

namespace {

wire::WireExtent wire_extent(uint64_t grant, const Extent& extent) {
  return {grant, extent.segment, extent.slot, extent.generation, extent.offset, extent.size};
}

}  // namespace

// RESERVE -----------------------------------------------------------------------------------------------

Next ops::reserve(PeerSession& session, wire::Meta meta) {
  auto request = wire::ReserveRequest::decode(meta);
  if (!request) return session.malformed();
  return session.begin(ReserveOp(std::move(*request)), 0);
}

ReserveOp::ReserveOp(wire::ReserveRequest request) : request_(std::move(request)) {
  results_.reserve(request_.items.size());
}

uint64_t ReserveOp::held_bytes() const {
  return mooncache::held_bytes(request_.items) + mooncache::held_bytes(results_);
}

Next ReserveOp::step(PeerSession& session, uint64_t) {
  while (results_.size() < request_.items.size()) {
    const wire::ReserveItem& item = request_.items[results_.size()];
    const auto reservation = session.held.reserve(session.who.tenant, item.key, item.size);
    if (reservation.code() == Code::kNoSpace && request_.wait_ms > 0 && holds_) {
      // What it waits for may be what it holds: the peer gets that first, and asks again for the rest.
      wire::ReserveResult none;
      none.code = Code::kNoSpace;
      results_.resize(request_.items.size(), none);
      break;
    }
    if (reservation.code() == Code::kNoSpace && session.may_wait(request_.wait_ms)) return Next::kSpace;
    wire::ReserveResult result;
    result.code = reservation.code();
    if (reservation) {
      session.held.grant_reservation(*reservation);
      result.extent = wire_extent(static_cast<uint64_t>(reservation->id), reservation->extent);
      holds_ = true;
    }
    results_.push_back(result);
  }
  Writer& writer = session.begin_response();
  wire::encode_items<wire::ReserveResult>(writer, results_);
  std::vector<uint64_t> grants(results_.size());
  for (size_t i = 0; i < results_.size(); ++i) {
    if (results_[i].code == Code::kOk) grants[i] = results_[i].extent.grant;
  }
  return ops::respond_exposed(session, writer, std::move(grants), true);
}

// COMMIT and ABORT --------------------------------------------------------------------------------------

Next ops::commit(PeerSession& session, wire::Meta meta) {
  auto items = wire::decode_all_items<wire::CommitItem>(meta);
  if (!items) return session.malformed();
  return session.begin(CommitOp{std::move(*items), {}}, 0);
}

Next CommitOp::step(PeerSession& session, uint64_t budget) {
  codes.reserve(items.size());
  while (codes.size() < items.size()) {
    const wire::CommitItem& item = items[codes.size()];
    if (!session.afford(budget, session.held.cost_to_withdraw(item.reservation, true))) return Next::kTurn;
    codes.push_back(session.held.commit_granted(item));
  }
  return session.respond_codes(codes);
}

Next ops::abort(PeerSession& session, wire::Meta meta) {
  auto grants = wire::decode_all_grants(meta);
  if (!grants) return session.malformed();
  return session.begin(AbortOp{std::move(*grants), {}}, 0);
}

Next AbortOp::step(PeerSession& session, uint64_t budget) {
  codes.reserve(grants.size());
  while (codes.size() < grants.size()) {
    const uint64_t grant = grants[codes.size()];
    if (!session.afford(budget, session.held.cost_to_withdraw(grant, true))) return Next::kTurn;
    codes.push_back(session.held.abort_granted(grant));
  }
  return session.respond_codes(codes);
}

}  // namespace mooncache::server
