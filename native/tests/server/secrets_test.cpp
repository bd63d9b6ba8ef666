// The cluster's secret is replaced while the node serves: two are good at a time, and one that was withdrawn
// ends what proved it.
#include "server/peer.h"

namespace mooncache::testing {
namespace {

wire::Bytes32 other_secret(uint8_t number) {
  wire::Bytes32 bytes;
  bytes.fill(std::byte{number});
  return bytes;
}

class SecretsTest : public ServerTest {
 protected:
  // Proves that tenant's key, made from the given secret; what the node proved back is checked, too.
  static Code login(Peer& peer, const wire::Bytes32& secret, const std::string& tenant = "default") {
    const auto challenge = peer.hello(tenant);
    if (!challenge) return Code::kConnectionLost;
    const auto key = wire::tenant_key(secret, tenant);
    const auto answer = peer.call(
        Opcode::kAuth, Peer::proof(wire::auth_mac(true, key, challenge->server_nonce, peer.nonce, tenant)));
    if (!answer) return Code::kConnectionLost;
    if (!answer->status) return answer->status.code;
    Reader reader(answer->body);
    const auto proven = wire::AuthResponse::decode(reader);
    const auto expected = wire::auth_mac(false, key, challenge->server_nonce, peer.nonce, tenant);
    return proven && proven->server_mac == expected ? Code::kOk : Code::kInternal;
  }
  static Code ping(Peer& peer) {
    const auto answer = peer.call(Opcode::kPing);
    return answer ? answer->status.code : Code::kConnectionLost;
  }
};

TEST_F(SecretsTest, BothAreAcceptedUntilOneIsWithdrawn) {
  start();
  const auto next = other_secret(9);
  Peer early(*server);
  EXPECT_EQ(login(early, next), Code::kUnauthenticated);
  Peer old(*server);
  ASSERT_EQ(login(old, secret()), Code::kOk);
  ASSERT_EQ(old.put(key_of(1), block_of(1, 5000)), Code::kOk);

  ASSERT_TRUE(server->set_secrets({secret(), next}));
  Peer fresh(*server), tenant(*server);
  ASSERT_EQ(login(fresh, next), Code::kOk);
  ASSERT_EQ(login(tenant, next, "team-a"), Code::kOk);
  EXPECT_EQ(fresh.get(key_of(1)), std::pair(Code::kOk, block_of(1, 5000)))
      << "a tenant's blocks stay its own";
  EXPECT_EQ(ping(old), Code::kOk);
  auto uses = server->secret_uses();
  ASSERT_EQ(uses.size(), 2u);
  EXPECT_EQ(uses[0].connections, 1u);
  EXPECT_EQ(uses[1].connections, 2u);
  EXPECT_GT(uses[0].last_proven_unix_s, 0u);

  ASSERT_TRUE(server->set_secrets({next, secret()}));  // the order tells who signs; both are accepted
  EXPECT_EQ(ping(old), Code::kOk);
  EXPECT_EQ(server->secret_uses()[1].connections, 1u) << "counts stay with their secret";

  ASSERT_TRUE(server->set_secrets({next}));
  EXPECT_EQ(ping(old), Code::kUnauthenticated);
  EXPECT_TRUE(old.closed_by_node());
  EXPECT_EQ(ping(fresh), Code::kOk);
  Peer late(*server);
  EXPECT_EQ(login(late, secret()), Code::kUnauthenticated);
}

TEST_F(SecretsTest, NoOtherSecretIsEverAccepted) {
  start();
  ASSERT_TRUE(server->set_secrets({secret(), other_secret(9)}));
  for (const int number : {0, 1, 8, 10, 255}) {
    Peer wrong(*server);
    EXPECT_EQ(login(wrong, other_secret(static_cast<uint8_t>(number))), Code::kUnauthenticated);
  }
  // The proof of one key is none of another tenant's, whichever secret it comes from.
  Peer mixed(*server);
  const auto challenge = mixed.hello("team-a");
  const auto key = wire::tenant_key(other_secret(9), "team-b");
  const auto mac = wire::auth_mac(true, key, challenge->server_nonce, mixed.nonce, "team-a");
  EXPECT_EQ(mixed.call(Opcode::kAuth, Peer::proof(mac))->status.code, Code::kUnauthenticated);
}

TEST_F(SecretsTest, WhatIsNoListOfSecretsChangesNothing) {
  start();
  const auto next = other_secret(9);
  EXPECT_EQ(server->set_secrets({}).code, Code::kInvalidArgument);
  EXPECT_EQ(server->set_secrets({next, next}).code, Code::kInvalidArgument);
  EXPECT_EQ(
      server->set_secrets({next, other_secret(1), other_secret(2), other_secret(3), other_secret(4)}).code,
      Code::kInvalidArgument);
  Peer old(*server), fresh(*server);
  EXPECT_EQ(login(old, secret()), Code::kOk);
  EXPECT_EQ(login(fresh, next), Code::kUnauthenticated);
}

}  // namespace
}  // namespace mooncache::testing
