// ENDPOINT, and what LOOKUP and RESERVE say about it: the control side of transfers in which this process
// takes no part.
#include <utility>

#include "server/peer_session.h"

namespace mooncache::server {

// Bytes over RDMA are not encrypted: who asked for TLS gets no way around it.
bool ops::can_rdma(PeerSession& session) {
  return session.loop().shared().fabric != nullptr && !session.is_tls;
}

Next ops::endpoint(PeerSession& session, wire::Meta meta) {
  auto peers = wire::decode_all_items<wire::RdmaAddress>(meta);
  if (!peers) return session.malformed();
  if (!can_rdma(session)) {
    const Shared& shared = session.loop().shared();
    return session.respond_status(
        {Code::kTransportUnavailable, shared.fabric != nullptr
                                          ? "RDMA unavailable, because this connection uses TLS"
                                          : shared.fabric_reason});
  }
  if (peers->empty() || peers->size() > wire::kMaxRails) {
    return session.respond_status({Code::kInvalidArgument, "ENDPOINT names 1 to 8 queue pairs"});
  }
  session.pending = EndpointOp{std::move(*peers), {}};
  return Next::kTurn;
}

// One queue pair in a turn: it takes several commands to a device, each of them up to a millisecond.
Next EndpointOp::step(PeerSession& session, uint64_t budget) {
  answers.push_back(session.held.connect(answers.size(), peers[answers.size()]));
  session.loop().spend(budget);
  if (answers.size() < peers.size()) return Next::kTurn;
  Writer& writer = session.begin_response();
  wire::encode_items<wire::RdmaAddress>(writer, answers);
  return session.respond(writer);
}

Next ops::respond_exposed(PeerSession& session, Writer& writer, std::vector<uint64_t> grants, bool writable) {
  if ((session.request.flags & wire::kFlagExpose) == 0) return session.respond(writer);
  wire::Exposure unavailable;
  unavailable.code = Code::kTransportUnavailable;
  bool some = false;
  for (uint64_t& grant : grants) {
    if (!session.held.connected()) grant = 0;
    some = some || grant != 0;
  }
  ExposeOp op;
  op.writable = writable;
  op.answer.assign(writer.view().begin(), writer.view().end());
  op.exposures.resize(grants.size(), unavailable);
  op.grants = std::move(grants);
  if (!some) return session.begin(std::move(op), 0);
  session.pending = std::move(op);
  return Next::kTurn;
}

Next ExposeOp::step(PeerSession& session, uint64_t budget) {
  for (; next < grants.size(); ++next) {
    if (grants[next] == 0) continue;
    if (budget == 0) return Next::kTurn;
    exposures[next] = session.held.expose(grants[next], writable, budget);
  }
  Writer& writer = session.loop().writer();
  writer.raw(answer);
  wire::encode_items<wire::Exposure>(writer, exposures);
  return session.respond(writer);
}

}  // namespace mooncache::server
