// What a tenant's session can do with blocks of another tenant: nothing, and it learns nothing of them,
// neither from answers nor from the work that they take.
#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <set>

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

// What an operation names. A new one fails the tests below until it is in this list, and one that names keys
// until they ask with it.
enum class Names {
  kKeys,    // of blocks
  kMakes,   // keys of blocks that it makes
  kGrants,  // of its own connection: AnotherTenantsGrantsAreUnknown
  kRanges,  // of a transfer engine's memory: a store node refuses it
  kNothing
};
const std::map<Opcode, Names> kNamesOf = {
    {Opcode::kHello, Names::kNothing},     {Opcode::kAuth, Names::kNothing},
    {Opcode::kPut, Names::kMakes},         {Opcode::kGet, Names::kKeys},
    {Opcode::kLookup, Names::kKeys},       {Opcode::kRelease, Names::kGrants},
    {Opcode::kReserve, Names::kMakes},     {Opcode::kWrite, Names::kGrants},
    {Opcode::kCommit, Names::kGrants},     {Opcode::kAbort, Names::kGrants},
    {Opcode::kMatch, Names::kKeys},        {Opcode::kRemove, Names::kKeys},
    {Opcode::kPin, Names::kKeys},          {Opcode::kUnpin, Names::kKeys},
    {Opcode::kStat, Names::kKeys},         {Opcode::kRead, Names::kGrants},
    {Opcode::kAttach, Names::kNothing},    {Opcode::kList, Names::kKeys},
    {Opcode::kNodeStat, Names::kNothing},  {Opcode::kPing, Names::kNothing},
    {Opcode::kEndpoint, Names::kNothing},  {Opcode::kWait, Names::kKeys},
    {Opcode::kGiveUp, Names::kKeys},       {Opcode::kPrefetch, Names::kKeys},
    {Opcode::kReadRanges, Names::kRanges}, {Opcode::kWriteRanges, Names::kRanges},
    {Opcode::kOpenRanges, Names::kRanges}, {Opcode::kCloseRanges, Names::kRanges},
    {Opcode::kMapRegion, Names::kRanges},  {Opcode::kNotify, Names::kRanges},
    {Opcode::kDescribe, Names::kRanges},   {Opcode::kClusterMap, Names::kNothing},
};

struct Question {
  Opcode opcode;
  uint16_t flags;
  std::function<void(Writer&, const Key&)> encode;
};

std::vector<Question> questions() {
  const auto keys = [](Writer& out, const Key& key) { wire::encode_keys(out, std::vector<Key>{key}); };
  const auto all = static_cast<uint16_t>(wire::kFlagTouch | wire::kFlagTiers | wire::kFlagShared);
  return {
      {Opcode::kGet, 0,
       [](Writer& out, const Key& key) {
         out = Peer::get_meta({{key, 0, UINT64_MAX}});
       }},
      {Opcode::kGet, wire::kFlagVerify,
       [](Writer& out, const Key& key) {
         out = Peer::get_meta({{key, 0, 0}});
       }},
      {Opcode::kLookup, 0, keys},
      {Opcode::kMatch, 0, keys},
      {Opcode::kMatch, all, keys},
      {Opcode::kStat, 0, keys},
      {Opcode::kPin, 0,
       [](Writer& out, const Key& key) {
         wire::PinRequest{60'000, {key}}.encode(out);
       }},
      {Opcode::kUnpin, 0, keys},
      {Opcode::kPrefetch, 0,
       [](Writer& out, const Key& key) {
         wire::PrefetchRequest{1000, kMiB, {key}}.encode(out);
       }},
      {Opcode::kWait, 0,
       [](Writer& out, const Key& key) {
         wire::WaitRequest{0, 0, {key}}.encode(out);
       }},
      {Opcode::kGiveUp, 0, keys},
      {Opcode::kRemove, 0, keys},
      {Opcode::kList, 0,
       [](Writer& out, const Key&) {
         wire::ListRequest{0, 100}.encode(out);
       }},
  };
}

// A block of team-a, in memory or on a disk alone, and team-b, which asks for it.
class OthersBlockTest : public TenantsTest {
 protected:
  static constexpr uint64_t kBlock = 70'000, kCount = 100;

  void start_with_block(bool on_disk) {
    if (on_disk) {
      std::filesystem::create_directories(folder / "disk");
      config.store.capacity_bytes = 4 << 20;
      config.store.eviction = "lru";
      config.store.disk.paths = {folder / "disk"};
      config.store.disk.bytes = 64 << 20;
      config.store.disk.stall_ms = 60'000;  // a busy machine is no stalled disk
    }
    start();
    owner.emplace(*server);
    other.emplace(*server);
    ASSERT_TRUE(owner->login("team-a"));
    ASSERT_EQ(session(*other, "team-b", unix_s() + 600), Code::kOk);
    if (!on_disk) {
      ASSERT_EQ(owner->put(key_of(0), block_of(0, kBlock)), Code::kOk);
      return;
    }
    const Deadline deadline = Deadline::after(kPatience);
    for (uint64_t i = 0; i < kCount && !deadline.expired(); ++i) {
      ASSERT_EQ(owner->put(key_of(i), block_of(i, kBlock)), Code::kOk);
      // At the disk's pace: a put does not wait for it.
      while (i > 54 && stat("ssd_blocks") + 54 < i && !deadline.expired())
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    for (uint64_t i = 0; i < kCount && !theirs; ++i) {
      const auto info = server->store().stat(wire::tenant_id("team-a"), key_of(i), 0);
      if (info && info->tier == Tier::kSsd) number = i;
      if (info && info->tier == Tier::kSsd) theirs = key_of(i);
    }
    ASSERT_TRUE(theirs) << "no block went to the disk";
    // What goes down for the puts has gone down.
    auto before = counted();
    for (auto now = before; !deadline.expired(); before = std::exchange(now, counted())) {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      if (now = counted(); now == before) return;
    }
  }
  // All that the node counts: reads and writes of disks, evictions, hits, requests, errors.
  std::map<std::string, uint64_t> counted() const {
    std::map<std::string, uint64_t> all;
    for (const auto& [name, value] : server->stats()) all[name] = value;
    return all;
  }
  // How the counters change by it, and the whole answer.
  std::pair<std::map<std::string, uint64_t>, Bytes> ask(const Question& question, const Key& key) {
    Writer meta;
    question.encode(meta, key);
    const auto before = counted();
    const auto reply = other->call(question.opcode, meta, {}, question.flags);
    auto changes = counted();
    for (const auto& [name, value] : before) changes[name] -= value;
    // Counted when the answer has left; the answers are compared.
    for (const char* late : {"bytes_out", "write_calls"}) changes.erase(late);
    std::erase_if(changes, [](const auto& change) { return change.second == 0; });
    if (!reply) return {changes, {}};
    Bytes answer{static_cast<std::byte>(reply->status.code)};
    for (const Bytes* part : {&reply->body, &reply->payload})
      answer.insert(answer.end(), part->begin(), part->end());
    return {changes, answer};
  }
  void ask_all() {
    const Key block = theirs.value_or(key_of(0)), nowhere = key_of(1'000'000);
    const auto before = server->store().stat(wire::tenant_id("team-a"), block, 0);
    std::set<Opcode> asked;
    for (const Question& question : questions()) {
      SCOPED_TRACE(wire::opcode_name(question.opcode));
      asked.insert(question.opcode);
      (void)ask(question, nowhere);  // what the first one of a kind costs alone
      const auto [work, answer] = ask(question, block);
      const auto [work_for_nothing, nothing] = ask(question, nowhere);
      EXPECT_EQ(answer, nothing) << "byte for byte";
      EXPECT_EQ(work, work_for_nothing) << "what it cost says nothing";
      for (const auto& [name, change] : work) EXPECT_FALSE(name.starts_with("ssd_")) << name;
      EXPECT_FALSE(answer.empty());
    }
    for (const auto& [opcode, names] : kNamesOf)
      EXPECT_EQ(asked.contains(opcode), names == Names::kKeys) << wire::opcode_name(opcode);
    const auto after = server->store().stat(wire::tenant_id("team-a"), block, 0);
    ASSERT_TRUE(before && after);
    EXPECT_EQ(after->hits, before->hits);
    EXPECT_EQ(after->tier, before->tier) << "it did not come up";
    EXPECT_EQ(after->pinned_until_ms, 0u);
    // A block of the same key is one of its own.
    EXPECT_EQ(other->put(block, block_of(9, 300)), Code::kOk);
    EXPECT_EQ(other->get(block), std::pair(Code::kOk, block_of(9, 300)));
    EXPECT_EQ(remove_as(*other, block), Code::kOk);
    const auto mine = other->reserve(block, 300);
    ASSERT_TRUE(mine);
    EXPECT_EQ(mine->code, Code::kOk);
    EXPECT_EQ(Peer::codes(other->call(Opcode::kAbort, Peer::grants_meta({mine->extent.grant}))),
              std::vector<Code>{Code::kOk});
    EXPECT_EQ(owner->get(block), std::pair(Code::kOk, block_of(number, kBlock)));
  }
  std::optional<Peer> owner, other;
  std::optional<Key> theirs;
  uint64_t number = 0;
};

TEST_F(OthersBlockTest, InMemoryItIsLikeAMissingOneForEveryOperation) {
  ASSERT_NO_FATAL_FAILURE(start_with_block(false));
  ask_all();
}

// No read of the disk begins, and nothing comes up: so no time is different either.
TEST_F(OthersBlockTest, OnADiskItIsLikeAMissingOneForEveryOperation) {
  ASSERT_NO_FATAL_FAILURE(start_with_block(true));
  ask_all();
}

TEST_F(OthersBlockTest, EveryOperationIsInTheList) {
  for (uint8_t value = 1; value <= wire::kMaxOpcode; ++value) {
    const auto opcode = static_cast<Opcode>(value);
    EXPECT_EQ(kNamesOf.contains(opcode), wire::opcode_name(opcode) != "UNKNOWN") << int{value};
  }
}

TEST_F(OthersBlockTest, OperationsOfTransferEnginesAreRefused) {
  ASSERT_NO_FATAL_FAILURE(start_with_block(false));
  for (const auto& [opcode, names] : kNamesOf) {
    if (names != Names::kRanges) continue;
    Peer peer(*server);
    ASSERT_TRUE(peer.login("team-b"));
    const auto reply = peer.call(opcode, Peer::keys_meta({key_of(0)}));
    EXPECT_TRUE(!reply || !reply->status) << wire::opcode_name(opcode);
  }
}

// A GIVE_UP ends the waits of its own tenant.
TEST_F(OthersBlockTest, AWaitIsNotEndedByAnotherTenant) {
  ASSERT_NO_FATAL_FAILURE(start_with_block(false));
  Writer wait;
  wire::WaitRequest{600'000, 0, {key_of(5)}}.encode(wait);
  ASSERT_TRUE(owner->send(Peer::frame(Opcode::kWait, wait.view())));
  ASSERT_TRUE(eventually("waits_open", 1));
  const auto reply = other->call(Opcode::kGiveUp, Peer::keys_meta({key_of(5)}));
  ASSERT_TRUE(reply && reply->status);
  EXPECT_EQ(other->put(key_of(5), block_of(5, 100)), Code::kOk);
  EXPECT_EQ(stat("waits_open"), 1u);
  EXPECT_EQ(owner->put(key_of(6), block_of(6, 100)), Code::kOk) << "it still waits";
  owner.reset();
  EXPECT_TRUE(eventually("waits_open", 0));
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
