// What a tenant's session can do with blocks of another tenant: nothing, and it learns nothing of them.
#include <chrono>

#include "server/peer.h"

namespace mooncache::testing {
namespace {

uint64_t unix_s() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::seconds>(now).count());
}

class TenantsTest : public ServerTest {
 protected:
  // Proves a session token.
  static Code session(Peer& peer, const std::string& tenant, uint64_t expires_unix_s, uint16_t flags = 0) {
    wire::HelloRequest request;
    request.flags = static_cast<uint16_t>(wire::HelloRequest::kFlagExpires | flags);
    request.client_nonce = peer.nonce;
    request.tenant = tenant;
    request.expires_unix_s = expires_unix_s;
    Writer meta;
    request.encode(meta);
    const auto challenge = peer.call(Opcode::kHello, meta);
    if (!challenge) return Code::kConnectionLost;
    if (!challenge->status) return challenge->status.code;
    Reader reader(challenge->body);
    const auto hello = wire::HelloResponse::decode(reader);
    const auto key = wire::session_key(wire::tenant_key(secret(), tenant), expires_unix_s);
    const auto answer = peer.call(
        Opcode::kAuth, Peer::proof(wire::auth_mac(true, key, hello->server_nonce, peer.nonce, tenant)));
    return answer ? answer->status.code : Code::kConnectionLost;
  }
  static Code remove_as(Peer& peer, const Key& key) {
    const auto codes = Peer::codes(peer.call(Opcode::kRemove, Peer::keys_meta({key})));
    return codes.size() == 1 ? codes[0] : Code::kConnectionLost;
  }
};

TEST_F(TenantsTest, ASessionTokenOpensItsTenantUntilItEnds) {
  start();
  Peer owner(*server), same(*server), late(*server), forged(*server), admin(*server), soon(*server);
  ASSERT_TRUE(owner.login("team-a"));
  ASSERT_EQ(owner.put(key_of(1), block_of(1, 5000)), Code::kOk);
  ASSERT_EQ(session(same, "team-a", unix_s() + 60), Code::kOk);
  EXPECT_EQ(same.get(key_of(1)), std::pair(Code::kOk, block_of(1, 5000)));
  EXPECT_EQ(session(late, "team-a", unix_s() - 1), Code::kUnauthenticated);
  EXPECT_EQ(session(admin, "team-a", unix_s() + 60, wire::HelloRequest::kFlagAdmin), Code::kProtocolError);
  // The key of a tenant alone does not make a session with an end of one's own choice.
  const auto challenge = forged.hello("team-a");
  const auto key = wire::session_key(wire::tenant_key(secret(), "team-a"), unix_s() + 60);
  EXPECT_EQ(forged
                .call(Opcode::kAuth,
                      Peer::proof(wire::auth_mac(true, key, challenge->server_nonce, forged.nonce, "team-a")))
                ->status.code,
            Code::kUnauthenticated);
  // An open session ends with its token.
  ASSERT_EQ(session(soon, "team-a", unix_s() + 2), Code::kOk);
  Code code = Code::kOk;
  const Deadline deadline = Deadline::after(kPatience);
  while (code == Code::kOk && !deadline.expired()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    const auto answer = soon.call(Opcode::kPing);
    code = answer ? answer->status.code : Code::kConnectionLost;
  }
  EXPECT_EQ(code, Code::kUnauthenticated);
  EXPECT_TRUE(soon.closed_by_node());
  EXPECT_EQ(same.get(key_of(1)).first, Code::kOk);
}

TEST_F(TenantsTest, AnotherTenantsBlockIsLikeAMissingOneForEveryOperation) {
  start();
  Peer owner(*server), other(*server);
  ASSERT_TRUE(owner.login("team-a"));
  ASSERT_EQ(session(other, "team-b", unix_s() + 600), Code::kOk);
  const Bytes block = block_of(1, 70'000);
  ASSERT_EQ(owner.put(key_of(1), block), Code::kOk);
  const Key theirs = key_of(1), nowhere = key_of(2);

  EXPECT_EQ(other.get(theirs), other.get(nowhere));
  EXPECT_EQ(other.get(theirs).first, Code::kNotFound);
  EXPECT_EQ(other.lookup(theirs)->code, other.lookup(nowhere)->code);
  EXPECT_EQ(other.lookup(theirs)->code, Code::kNotFound);
  EXPECT_EQ(remove_as(other, theirs), Code::kNotFound);
  for (const Opcode opcode : {Opcode::kMatch, Opcode::kStat, Opcode::kUnpin, Opcode::kRemove}) {
    const auto a = other.call(opcode, Peer::keys_meta({theirs}));
    const auto b = other.call(opcode, Peer::keys_meta({nowhere}));
    ASSERT_TRUE(a && b) << static_cast<int>(opcode);
    EXPECT_EQ(a->status.code, b->status.code);
    EXPECT_EQ(a->body, b->body) << "byte for byte, opcode " << static_cast<int>(opcode);
  }
  for (const Key& key : {theirs, nowhere}) {
    Writer pin;
    wire::PinRequest{60'000, {key}}.encode(pin);
    EXPECT_EQ(Peer::codes(other.call(Opcode::kPin, pin)), std::vector<Code>{Code::kNotFound});
  }
  Writer list;
  wire::ListRequest{0, 100}.encode(list);
  const auto listed = other.call(Opcode::kList, list);
  Reader reader(listed->body);
  EXPECT_TRUE(wire::ListResponse::decode(reader)->items.empty());
  // A block of the same key is one of its own.
  EXPECT_EQ(other.put(theirs, block_of(9, 300)), Code::kOk);
  EXPECT_EQ(other.get(theirs), std::pair(Code::kOk, block_of(9, 300)));
  EXPECT_EQ(remove_as(other, theirs), Code::kOk);
  EXPECT_EQ(owner.get(theirs), std::pair(Code::kOk, block));
}

TEST_F(TenantsTest, AnotherTenantsGrantsAreUnknown) {
  start();
  Peer owner(*server), other(*server);
  ASSERT_TRUE(owner.login("team-a"));
  ASSERT_EQ(session(other, "team-b", unix_s() + 600), Code::kOk);
  ASSERT_EQ(owner.put(key_of(1), block_of(1, 5000)), Code::kOk);
  const uint64_t pinned = owner.lookup(key_of(1))->extent.grant;
  const auto reserved = owner.reserve(key_of(2), 64);
  Writer read;
  wire::ReadRequest{.grant = pinned, .offset = 0, .length = 5000}.encode(read);
  EXPECT_NE(other.call(Opcode::kRead, read)->status.code, Code::kOk);
  const Bytes bytes = block_of(2, 64);
  EXPECT_EQ(other.write(reserved->extent.grant, 0, bytes), Code::kReservationUnknown);
  EXPECT_EQ(other.commit(reserved->extent.grant, crc32c(bytes)), Code::kReservationUnknown);
  EXPECT_EQ(Peer::codes(other.call(Opcode::kAbort, Peer::grants_meta({reserved->extent.grant}))),
            std::vector<Code>{Code::kReservationUnknown});
  EXPECT_EQ(owner.write(reserved->extent.grant, 0, bytes), Code::kOk);
  EXPECT_EQ(owner.commit(reserved->extent.grant, crc32c(bytes)), Code::kOk);
}

TEST_F(TenantsTest, AFloodEvictsNothingOfAReservedShare) {
  config.store.capacity_bytes = 4 << 20;
  start();
  ASSERT_TRUE(server->set_limits("team-a", {.memory = {.share_bytes = 1 << 20}}));
  Peer owner(*server), other(*server);
  ASSERT_TRUE(owner.login("team-a"));
  ASSERT_EQ(session(other, "team-b", unix_s() + 600), Code::kOk);
  for (uint64_t i = 0; i < 10; ++i) ASSERT_EQ(owner.put(key_of(i), block_of(i, 100'000)), Code::kOk);
  for (uint64_t i = 100; i < 200; ++i) ASSERT_EQ(other.put(key_of(i), block_of(i, 100'000)), Code::kOk);
  for (uint64_t i = 0; i < 10; ++i) EXPECT_EQ(owner.get(key_of(i)).first, Code::kOk) << i;
}

}  // namespace
}  // namespace mooncache::testing
