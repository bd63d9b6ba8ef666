// WAIT and GIVE_UP: blocks that are still to come. A WAIT does not hold its connection up: other requests go
// on, and its frames come when there is something to say (server/wait_table.h).
#include "server/peer_session.h"

namespace mooncache::server {

Next ops::wait(PeerSession& session, wire::Meta meta) {
  WaitTable& waits = session.loop().shared().waits;
  const uint64_t id = session.request.request_id;
  if ((session.request.flags & wire::kFlagWithdraw) != 0) {
    if (!meta.empty()) return session.malformed();
    waits.withdraw(session.waiter, id);
    return Next::kDone;
  }
  const bool heartbeats = (session.request.flags & wire::kFlagHeartbeats) != 0;
  const auto request = wire::WaitRequest::decode(meta, heartbeats);
  if (!request) return session.malformed();
  const TenantId tenant = session.who.tenant;
  const Status added =
      waits.add(session.loop().waits(), session.waiter, id, tenant, *request, session.now_ms());
  if (!added) {
    session.metrics().waits_refused.add();
    return session.respond_status(added);
  }
  std::vector<uint32_t> present;
  for (uint32_t i = 0; i < request->keys.size(); ++i) {
    if (session.store().stat(tenant, request->keys[i], session.now_ms())) present.push_back(i);
  }
  waits.report_present(session.waiter, id, present, session.now_ms());
  return Next::kDone;
}

Next ops::give_up(PeerSession& session, wire::Meta meta) {
  const auto keys = wire::decode_all_keys(meta);
  if (!keys) return session.malformed();
  const uint32_t ended = session.loop().shared().waits.give_up(session.who.tenant, *keys, session.now_ms());
  Writer& writer = session.begin_response();
  writer.u32(ended);
  return session.respond(writer);
}

void PeerSession::respond_news(const WaitTable::News& news) {
  if (news.state == wire::WaitState::kAll) metrics().waits_answered.add();
  if (news.state == wire::WaitState::kGivenUp) metrics().waits_given_up.add();
  if (news.state == wire::WaitState::kTimeout) metrics().waits_timed_out.add();
  if (news.state == wire::WaitState::kWithdrawn) metrics().waits_withdrawn.add();
  if (news.heartbeat) metrics().wait_heartbeats.add();
  Writer& writer = begin_response();
  wire::WaitNews{news.state, news.positions}.encode(writer);
  wire::FrameHeader header;
  header.opcode = wire::Opcode::kWait;
  header.request_id = news.request_id;
  out.push_head(header, writer.view(), 0, 0, false);  // not counted as the node's time: it waited for others
}

}  // namespace mooncache::server
