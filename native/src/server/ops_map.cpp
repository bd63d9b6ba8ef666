// CLUSTER_MAP: which nodes there are, for peers that ask no master.
#include "server/peer_session.h"

namespace mooncache::server {

Next ops::cluster_map(PeerSession& session, wire::Meta meta) {
  const auto request = wire::ClusterMapRequest::decode(meta);
  if (!request) return session.malformed();
  Writer& writer = session.begin_response();
  if (session.loop().shared().cluster_map.write_page(*request, writer)) return session.respond(writer);
  return session.respond_status(
      {Code::kMasterUnavailable, "this node has no cluster map: no master has answered it yet"});
}

}  // namespace mooncache::server
