// HELLO and AUTH: who the peer is. The tenant of a connection is the one whose key it proved, and every
// operation uses that tenant alone, whatever a request says.
#include <sys/random.h>

#include "server/connection.h"

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

}  // namespace

void Connection::do_hello(Meta meta) {
  if (auth_ != Auth::kNone) {
    return refuse(Code::kProtocolError, "HELLO comes once, first", CloseReason::kProtocol);
  }
  if (surplus) {
    // Not in the log: whoever tries again and again would fill it.
    respond_status({Code::kLimitExceeded, "the node has " + std::to_string(config().max_connections) +
                                              " connections already, its limit"});
    return begin_close(CloseReason::kCapacity);
  }
  auto hello = wire::HelloRequest::decode(meta);
  if (!hello) return void(malformed());
  if (!wire::tenant_name_valid(hello->tenant)) {
    metrics().auth_failures.add();
    return refuse(Code::kUnauthenticated, "the tenant name is not valid", CloseReason::kAuth);
  }
  wire::HelloResponse response;
  if (!fill_random(server_nonce_)) {
    return refuse(Code::kInternal, "no randomness for a nonce", CloseReason::kAuth);
  }
  response.server_nonce = server_nonce_;
  client_nonce_ = hello->client_nonce;
  tenant_name_ = std::move(hello->tenant);
  admin_ = (hello->flags & wire::HelloRequest::kFlagAdmin) != 0;
  auth_ = Auth::kChallenged;
  Writer& writer = begin_response();
  response.encode(writer);
  respond(writer);
}

void Connection::do_auth(Meta meta) {
  if (auth_ != Auth::kChallenged) {
    metrics().auth_failures.add();
    return refuse(Code::kUnauthenticated, "AUTH comes once, after HELLO", CloseReason::kAuth);
  }
  const auto request = wire::AuthRequest::decode(meta);
  if (!request) return void(malformed());
  const wire::Bytes32 key = admin_ ? config().secret : wire::tenant_key(config().secret, tenant_name_);
  const auto expected = wire::auth_mac(true, key, server_nonce_, client_nonce_, tenant_name_);
  if (!wire::equal_constant_time(expected, request->mac)) {
    metrics().auth_failures.add();
    return refuse(Code::kUnauthenticated,
                  "the proof does not match the token of tenant '" + tenant_name_ + "'", CloseReason::kAuth);
  }
  tenant_ = wire::tenant_id(tenant_name_);
  if (!loop_.shared().tenants.learn(tenant_, tenant_name_)) {
    return refuse(Code::kLimitExceeded, "the node knows too many tenants already", CloseReason::kAuth);
  }
  auth_ = Auth::kProven;
  loop_.shared().strangers(is_unix_).fetch_sub(1);
  metrics().unauthenticated_open.sub();

  wire::AuthResponse response;
  response.server_mac = wire::auth_mac(false, key, server_nonce_, client_nonce_, tenant_name_);
  response.capabilities = can_rdma() ? wire::AuthResponse::kCanRdma : 0;
  response.incarnation = config().incarnation;
  response.node_id = config().node_id;
  response.host_id = config().host_id;
  Writer& writer = begin_response();
  response.encode(writer);
  respond(writer);
}

}  // namespace mooncache::server
