// HELLO and AUTH: who the peer is, and until when.
#include <sys/random.h>

#include <algorithm>
#include <chrono>

#include "server/peer_session.h"

namespace mooncache::server {

namespace {

bool fill_random(std::span<std::byte> bytes) {
  size_t have = 0;
  while (have < bytes.size()) {
    const ssize_t count = ::getrandom(bytes.data() + have, bytes.size() - have, 0);
    if (count < 0 && errno != EINTR) return false;
    if (count > 0) have += static_cast<size_t>(count);
  }
  return true;
}

// What the peer has to prove. A tenant's key is made from the cluster's secret, a session token's from the
// tenant's key, so the node keeps no list of either.
wire::Bytes32 key_of(const Identity& who, const wire::Bytes32& secret) {
  if (who.admin) return secret;
  const wire::Bytes32 key = wire::tenant_key(secret, who.tenant_name);
  return who.expires_unix_s == 0 ? key : wire::session_key(key, who.expires_unix_s);
}

uint64_t unix_now_s() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::seconds>(now).count());
}

}  // namespace

Next ops::hello(PeerSession& session, wire::Meta meta) {
  Identity& who = session.who;
  if (who.state != Identity::State::kNone) {
    return session.refuse(Code::kProtocolError, "HELLO comes once, first", CloseReason::kProtocol);
  }
  if (session.surplus) {
    // Not in the log: a caller that tries again and again would fill it.
    return session.close(
        {Code::kLimitExceeded, "the node has " + std::to_string(session.config().max_connections) +
                                   " connections already, its limit"},
        CloseReason::kCapacity);
  }
  auto hello = wire::HelloRequest::decode(meta);
  if (!hello) return session.malformed();
  if (!wire::tenant_name_valid(hello->tenant)) {
    session.metrics().auth_failures.add();
    return session.refuse(Code::kUnauthenticated, "the tenant name is not valid", CloseReason::kAuth);
  }
  wire::HelloResponse response;
  if (!fill_random(who.server_nonce)) {
    return session.refuse(Code::kInternal, "no randomness for a nonce", CloseReason::kAuth);
  }
  response.server_nonce = who.server_nonce;
  who.client_nonce = hello->client_nonce;
  who.tenant_name = std::move(hello->tenant);
  who.admin = (hello->flags & wire::HelloRequest::kFlagAdmin) != 0;
  who.expires_unix_s = hello->expires_unix_s;
  if (who.admin && who.expires_unix_s != 0) return session.malformed();
  who.writer_said = std::move(hello->writer);
  who.state = Identity::State::kChallenged;
  Writer& writer = session.begin_response();
  response.encode(writer);
  return session.respond(writer);
}

Next ops::auth(PeerSession& session, wire::Meta meta) {
  Identity& who = session.who;
  if (who.state != Identity::State::kChallenged) {
    session.metrics().auth_failures.add();
    return session.refuse(Code::kUnauthenticated, "AUTH comes once, after HELLO", CloseReason::kAuth);
  }
  const auto request = wire::AuthRequest::decode(meta);
  if (!request) return session.malformed();
  const ServerConfig& config = session.config();
  Shared& shared = session.loop().shared();
  auto proven = shared.secrets.proven(request->mac, unix_now_s(), [&who](const wire::Bytes32& secret) {
    return wire::auth_mac(true, key_of(who, secret), who.server_nonce, who.client_nonce, who.tenant_name);
  });
  if (!proven) {
    session.metrics().auth_failures.add();
    return session.refuse(Code::kUnauthenticated,
                          "the proof does not match the token of tenant '" + who.tenant_name + "'",
                          CloseReason::kAuth);
  }
  if (who.expires_unix_s != 0) {
    const uint64_t now_s = unix_now_s();
    if (who.expires_unix_s <= now_s) {
      session.metrics().auth_failures.add();
      return session.refuse(Code::kUnauthenticated,
                            "the session token of tenant '" + who.tenant_name + "' has expired",
                            CloseReason::kAuth);
    }
    constexpr uint64_t kLongestS = 7 * 24 * 3600;  // also when a peer proves a later end
    who.expires_ms = session.now_ms() + std::min(who.expires_unix_s - now_s, kLongestS) * 1000;
  }
  who.tenant = wire::tenant_id(who.tenant_name);
  if (!shared.tenants.learn(who.tenant, who.tenant_name)) {
    return session.refuse(Code::kLimitExceeded, "the node knows too many tenants already",
                          CloseReason::kAuth);
  }
  // Behind the proof: strangers take no place in the table.
  if (!config.ranges) session.held.write_as(who.writer_said);
  who.writer_said = {};
  const wire::Bytes32 key = key_of(who, proven->bytes());
  who.proven_by = std::move(*proven);
  who.state = Identity::State::kProven;
  shared.strangers(session.is_unix).fetch_sub(1);
  session.metrics().unauthenticated_open.sub();

  wire::AuthResponse response;
  response.server_mac = wire::auth_mac(false, key, who.server_nonce, who.client_nonce, who.tenant_name);
  response.capabilities = wire::AuthResponse::kCanWait | wire::AuthResponse::kWritesSeveral |
                          wire::AuthResponse::kHeartbeats | wire::AuthResponse::kPrefetches |
                          wire::AuthResponse::kHasMap;
  if (config.ranges) response.capabilities = wire::AuthResponse::kEngine;
  if (ops::can_rdma(session)) response.capabilities |= wire::AuthResponse::kCanRdma;
  response.incarnation = config.incarnation;
  response.node_id = config.node_id;
  response.host_id = config.host_id;
  Writer& writer = session.begin_response();
  response.encode(writer);
  return session.respond(writer);
}

}  // namespace mooncache::server
