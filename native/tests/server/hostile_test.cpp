// Peers that lie, break off, dawdle or come in crowds.
#include <netinet/in.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <functional>
#include <map>

#include "server/grant_map.h"
#include "server/metrics.h"
#include "server/peer.h"

namespace mooncache::testing {
namespace {

using HostileTest = ServerTest;

template <typename T>
void poke(Bytes& bytes, size_t at, T value) {
  std::memcpy(bytes.data() + at, &value, sizeof value);
}
// The check again, after a lie in the header.
void seal(Bytes& frame, size_t meta_bytes) {
  const uint32_t check = crc32c(std::span(frame).subspan(32, meta_bytes), crc32c(std::span(frame).first(28)));
  poke(frame, 28, check);
}

struct Lie {
  const char* name;
  std::function<void(Bytes&)> tell;
  Code answer;
};

TEST_F(HostileTest, BrokenFramesAreRefusedAndTheConnectionEnds) {
  start();
  const std::vector<Lie> lies = {
      {"magic", [](Bytes& f) { poke<uint32_t>(f, 0, 0x20544547); }, Code::kProtocolError},
      {"version", [](Bytes& f) { poke<uint8_t>(f, 4, 9), seal(f, 4); }, Code::kVersionSkew},
      {"opcode 0", [](Bytes& f) { poke<uint8_t>(f, 5, 0), seal(f, 4); }, Code::kProtocolError},
      {"opcode 99", [](Bytes& f) { poke<uint8_t>(f, 5, 99), seal(f, 4); }, Code::kProtocolError},
      {"response", [](Bytes& f) { poke<uint8_t>(f, 5, 0x80 | 4), seal(f, 4); }, Code::kProtocolError},
      {"check", [](Bytes& f) { f[28] ^= std::byte{1}; }, Code::kProtocolError},
      {"flipped meta", [](Bytes& f) { f[33] ^= std::byte{1}; }, Code::kProtocolError},
      {"meta too long", [](Bytes& f) { poke<uint32_t>(f, 24, UINT32_MAX), seal(f, 4); },
       Code::kProtocolError},
      {"payload too long", [](Bytes& f) { poke<uint64_t>(f, 16, UINT64_MAX), seal(f, 4); },
       Code::kProtocolError},
      {"payload of a GET", [](Bytes& f) { poke<uint64_t>(f, 16, 10), seal(f, 4); }, Code::kProtocolError},
      {"too many items", [](Bytes& f) { poke<uint32_t>(f, 32, UINT32_MAX), seal(f, 4); },
       Code::kProtocolError},
      {"items missing", [](Bytes& f) { poke<uint32_t>(f, 32, 3), seal(f, 4); }, Code::kProtocolError},
  };
  for (const Lie& lie : lies) {
    Peer peer(*server);
    ASSERT_TRUE(peer.login());
    Bytes frame = Peer::frame(Opcode::kGet, Peer::get_meta({}).view());
    lie.tell(frame);
    ASSERT_TRUE(peer.send(frame));
    const auto answer = peer.reply();
    ASSERT_TRUE(answer) << lie.name;
    EXPECT_EQ(answer->status.code, lie.answer) << lie.name << ": " << answer->status.message;
    EXPECT_TRUE(peer.closed_by_node()) << lie.name;
  }
  EXPECT_EQ(stat("version_skews"), 1u);
  EXPECT_EQ(stat("protocol_errors"), lies.size() - 1);
}

TEST_F(HostileTest, VersionSkewNamesBothVersions) {
  start();
  Peer peer(*server);
  Bytes frame = Peer::frame(Opcode::kHello);
  poke<uint8_t>(frame, 4, 2);
  ASSERT_TRUE(peer.send(frame));
  const auto answer = peer.reply();
  ASSERT_TRUE(answer);
  EXPECT_NE(answer->status.message.find("version 2"), std::string::npos);
  EXPECT_NE(answer->status.message.find("speaks 1"), std::string::npos);
}

TEST_F(HostileTest, PayloadThatIsNotAsLongAsItsItems) {
  start();
  for (const uint64_t size : {uint64_t{99}, uint64_t{101}, UINT64_MAX, uint64_t{1} << 31}) {
    Peer peer(*server);
    ASSERT_TRUE(peer.login());
    Writer meta;
    const wire::PutItem item{key_of(1), size, 0, 0};
    wire::encode_items<wire::PutItem>(meta, std::span(&item, 1));
    EXPECT_EQ(peer.call(Opcode::kPut, meta, block_of(1, 100))->status.code, Code::kProtocolError);
    EXPECT_TRUE(peer.closed_by_node());
  }
  Peer peer(*server);
  ASSERT_TRUE(peer.login());
  const auto place = peer.reserve(key_of(1), 100);
  Writer meta;
  wire::WriteRequest{place->extent.grant, {{0, 50, 0}, {50, UINT64_MAX, 0}}}.encode(meta);
  EXPECT_EQ(peer.call(Opcode::kWrite, meta, block_of(1, 49))->status.code, Code::kProtocolError);
  for (const uint64_t rest : {uint64_t{51}, UINT64_MAX}) {
    Peer several(*server);
    ASSERT_TRUE(several.login());
    const uint64_t grant = several.reserve(key_of(2), 100)->extent.grant;
    const std::vector<wire::ReservedRange> ranges{{grant, {0, 50, 0}}, {grant, {50, rest, 0}}};
    Writer items;
    wire::encode_items<wire::ReservedRange>(items, ranges);
    EXPECT_EQ(several.call(Opcode::kWrite, items, block_of(1, 100), wire::kFlagSeveral)->status.code,
              Code::kProtocolError);
    EXPECT_TRUE(several.closed_by_node());
  }
  Peer cut(*server);  // one byte of a range is missing
  ASSERT_TRUE(cut.login());
  const wire::ReservedRange range{1, {0, 50, 0}};
  Writer items;
  wire::encode_items<wire::ReservedRange>(items, std::span(&range, 1));
  items.bytes().pop_back();
  EXPECT_EQ(cut.call(Opcode::kWrite, items, block_of(1, 50), wire::kFlagSeveral)->status.code,
            Code::kProtocolError);
}

TEST_F(HostileTest, EveryTruncationOfAFrameStoresNothing) {
  start();
  const Bytes whole = Peer::put_frame({{key_of(1), block_of(1, 300)}});
  for (size_t length = 0; length < whole.size(); length += 7) {
    Peer peer(*server);
    ASSERT_TRUE(peer.login());
    ASSERT_TRUE(peer.send(std::span(whole).first(length)));
  }
  EXPECT_TRUE(eventually("connections_open", 0));
  EXPECT_EQ(stat("store_blocks"), 0u);
  EXPECT_EQ(stat("store_used_bytes"), 0u);
}

TEST_F(HostileTest, TheSumOfAllBuffersIsBounded) {
  config.max_buffered_bytes = 1400 << 10;
  start();
  Peer modest(*server), greedy(*server);
  ASSERT_TRUE(modest.login());
  ASSERT_TRUE(greedy.login());
  const Bytes frame = Peer::frame(Opcode::kPut, Bytes(wire::kMaxMetaBytes));
  const auto buffered = [&](uint64_t bytes) {
    const Deadline deadline = Deadline::after(kPatience);
    while (stat("buffered_bytes") < bytes && !deadline.expired()) std::this_thread::yield();
    return stat("buffered_bytes") >= bytes;
  };
  ASSERT_TRUE(modest.send(std::span(frame).first(300 << 10)));
  ASSERT_TRUE(buffered(300 << 10));
  (void)greedy.send(std::span(frame).first(900 << 10));
  EXPECT_TRUE(greedy.closed_by_node());
  EXPECT_TRUE(eventually("connections_open", 1));
  EXPECT_EQ(stat("connections_closed_memory"), 1u);
  EXPECT_TRUE(buffered(300 << 10)) << "the other one keeps what it sent";
  Peer honest(*server);
  ASSERT_TRUE(honest.login());
  EXPECT_EQ(honest.put(key_of(1), block_of(1, 1000)), Code::kOk);
  modest.close();
  honest.close();
  EXPECT_TRUE(eventually("connections_open", 0));
  EXPECT_EQ(stat("buffered_bytes"), 0u);
}

TEST_F(HostileTest, AuthenticationIsNeeded) {
  start();
  for (uint8_t number = 3; number <= wire::kMaxOpcode; ++number) {
    Peer peer(*server);
    EXPECT_EQ(peer.call(static_cast<Opcode>(number))->status.code, Code::kUnauthenticated);
    EXPECT_TRUE(peer.closed_by_node());
  }
  Peer early(*server);
  EXPECT_EQ(early.call(Opcode::kAuth, Peer::proof({}))->status.code, Code::kUnauthenticated);
  Peer half(*server);
  ASSERT_TRUE(half.hello());
  EXPECT_EQ(half.call(Opcode::kPing)->status.code, Code::kUnauthenticated);
  Peer twice(*server);
  ASSERT_TRUE(twice.login());
  wire::HelloRequest again;
  again.tenant = "other";
  Writer meta;
  again.encode(meta);
  EXPECT_EQ(twice.call(Opcode::kHello, meta)->status.code, Code::kProtocolError);
  Peer bad_name(*server);
  EXPECT_FALSE(bad_name.hello("../etc"));
  Peer greedy(*server);
  EXPECT_EQ(greedy.call(Opcode::kHello, Peer::keys_meta(std::vector<Key>(500)))->status.code,
            Code::kUnauthenticated);
}

TEST_F(HostileTest, WrongOrReplayedProofs) {
  start();
  const wire::Bytes32 key = wire::tenant_key(secret(), "default");
  const auto try_proof = [&](auto make) {
    Peer peer(*server);
    const auto challenge = peer.hello();
    EXPECT_TRUE(challenge);
    const auto answer = peer.call(Opcode::kAuth, Peer::proof(make(peer, *challenge)));
    EXPECT_TRUE(answer && answer->status.code == Code::kUnauthenticated);
    EXPECT_TRUE(peer.closed_by_node());
  };
  wire::Bytes32 recorded{};
  {
    Peer honest(*server);
    const auto challenge = honest.hello();
    recorded = wire::auth_mac(true, key, challenge->server_nonce, honest.nonce, "default");
    EXPECT_TRUE(honest.call(Opcode::kAuth, Peer::proof(recorded))->status.is_ok());
  }
  try_proof([&](const Peer&, const wire::HelloResponse&) { return recorded; });
  try_proof([&](const Peer& peer, const wire::HelloResponse& challenge) {
    return wire::auth_mac(true, wire::tenant_key(secret(), "other"), challenge.server_nonce, peer.nonce,
                          "default");
  });
  try_proof([&](const Peer& peer, const wire::HelloResponse& challenge) {
    return wire::auth_mac(false, key, challenge.server_nonce, peer.nonce, "default");
  });
  Peer not_admin(*server);
  const auto challenge = not_admin.hello("default", true);
  const auto mac = wire::auth_mac(true, key, challenge->server_nonce, not_admin.nonce, "default");
  EXPECT_EQ(not_admin.call(Opcode::kAuth, Peer::proof(mac))->status.code, Code::kUnauthenticated);
  EXPECT_EQ(stat("auth_failures"), 4u);
}

TEST_F(HostileTest, SlowPeersAreLetGo) {
  config.handshake_timeout_ms = 300;
  config.frame_timeout_ms = 300;
  config.progress_timeout_ms = 300;
  config.idle_timeout_ms = 0;
  start();
  Peer silent(*server);
  EXPECT_TRUE(silent.closed_by_node());
  Peer half_frame(*server), half_payload(*server), idle(*server);
  ASSERT_TRUE(half_frame.login() && half_payload.login() && idle.login());
  const Bytes frame = Peer::put_frame({{key_of(1), block_of(1, 200'000)}});
  ASSERT_TRUE(half_frame.send(std::span(frame).first(40)));
  ASSERT_TRUE(half_payload.send(std::span(frame).first(1000)));
  EXPECT_TRUE(half_frame.closed_by_node());
  EXPECT_TRUE(half_payload.closed_by_node());
  EXPECT_TRUE(idle.call(Opcode::kPing)->status.is_ok()) << "an idle connection is not a slow one";
  EXPECT_EQ(stat("connections_closed_slow"), 2u);
  EXPECT_EQ(stat("connections_closed_handshake_timeout"), 1u);
  EXPECT_EQ(stat("store_used_bytes"), 0u);
}

TEST_F(HostileTest, IdlePeersAreLetGo) {
  config.idle_timeout_ms = 200;
  start();
  Peer peer(*server);
  ASSERT_TRUE(peer.login());
  EXPECT_TRUE(peer.closed_by_node());
  EXPECT_EQ(stat("connections_closed_idle"), 1u);
}

TEST_F(HostileTest, PeerThatDoesNotReadIsLimitedAndLetGo) {
  config.store.capacity_bytes = 64 << 20;
  config.progress_timeout_ms = 1000;
  start();
  Peer peer(*server), other(*server);
  ASSERT_TRUE(peer.login() && other.login());
  ASSERT_EQ(other.put(key_of(1), block_of(1, 32 << 20)), Code::kOk);
  const Bytes get = Peer::frame(Opcode::kGet, Peer::get_meta({{key_of(1), 0, UINT64_MAX}}).view());
  for (int i = 0; i < 100; ++i) ASSERT_TRUE(peer.send(get));
  EXPECT_EQ(other.get(key_of(1)).first, Code::kOk) << "others are served meanwhile";
  EXPECT_LT(stat("pins_held"), 10u) << "what one connection queues is bounded";
  EXPECT_TRUE(eventually("connections_closed_slow", 1));
  EXPECT_TRUE(eventually("pins_held", 0));
}

TEST_F(HostileTest, DeathInMidPutLeavesNothing) {
  start();
  Peer other(*server);
  ASSERT_TRUE(other.login());
  {
    Peer peer(*server);
    ASSERT_TRUE(peer.login());
    const Bytes frame = Peer::put_frame({{key_of(1), block_of(1, 1000)}, {key_of(2), block_of(2, 4 << 20)}});
    ASSERT_TRUE(peer.send(std::span(frame).first(2 << 20)));
    EXPECT_TRUE(eventually("store_blocks", 1)) << "the first block was complete";
  }
  EXPECT_TRUE(eventually("store_reservations", 0));
  EXPECT_EQ(other.get(key_of(2)).first, Code::kNotFound);
  EXPECT_EQ(other.get(key_of(1)).first, Code::kOk);
  EXPECT_TRUE(eventually("store_pins", 0));
  EXPECT_EQ(stat("store_used_bytes"), 1024u);
}

TEST_F(HostileTest, DeathReleasesPinsAndReservations) {
  start();
  for (const bool unix_socket : {false, true}) {
    Peer peer(*server, unix_socket);
    ASSERT_TRUE(peer.login());
    (void)peer.put(key_of(1), block_of(1, 1000));
    ASSERT_EQ(peer.lookup(key_of(1))->code, Code::kOk);
    ASSERT_EQ(peer.reserve(key_of(2), 5 << 20)->code, Code::kOk);
    EXPECT_EQ(stat("store_reservations"), 1u);
    peer.close();
    EXPECT_TRUE(eventually("store_reservations", 0));
    EXPECT_TRUE(eventually("store_pins", 0));
  }
}

// The node ends the connection, but the client may still be writing to the shared memory: the extent must not
// be handed out again before the client's own end of the stream.
TEST_F(HostileTest, OneSidedReservationsOutliveTheNodesGoodbye) {
  start();
  Peer peer(*server, true);
  ASSERT_TRUE(peer.login());
  ASSERT_EQ(peer.reserve(key_of(1), 1000)->code, Code::kOk);
  Bytes nonsense(64);
  ASSERT_TRUE(peer.send(nonsense));
  EXPECT_EQ(peer.reply()->status.code, Code::kProtocolError);
  EXPECT_TRUE(eventually("connections_lingering", 1));
  std::this_thread::sleep_for(std::chrono::milliseconds(600));
  EXPECT_EQ(stat("store_reservations"), 1u);
  peer.close();
  EXPECT_TRUE(eventually("store_reservations", 0));
  EXPECT_TRUE(eventually("connections_lingering", 0));
}

TEST_F(HostileTest, PutWaitsForSpace) {
  config.store.capacity_bytes = 4 << 20;
  start();
  Peer holder(*server), waiter(*server);
  ASSERT_TRUE(holder.login() && waiter.login());
  const auto place = holder.reserve(key_of(1), 3 << 20);
  ASSERT_EQ(place->code, Code::kOk);
  // without patience: refused per item, the payload is dropped, the connection goes on
  EXPECT_EQ(waiter.put({{key_of(2), block_of(2, 2 << 20)}, {key_of(3), block_of(3, 1000)}}),
            (std::vector<Code>{Code::kNoSpace, Code::kOk}));
  EXPECT_EQ(waiter.reserve(key_of(2), 2 << 20, 50)->code, Code::kNoSpace);
  EXPECT_EQ(stat("parked_expired"), 1u);
  // with patience: stored as soon as there is room
  std::thread later([&] {
    EXPECT_TRUE(eventually("parked_now", 1));
    (void)holder.call(Opcode::kAbort, Peer::grants_meta({place->extent.grant}));
  });
  EXPECT_EQ(waiter.put(key_of(2), block_of(2, 2 << 20), 20'000), Code::kOk);
  later.join();
  EXPECT_EQ(waiter.get(key_of(2)), std::pair(Code::kOk, block_of(2, 2 << 20)));
}

// With a payload larger than the socket buffers the end of the stream is stuck behind it, and the death is
// seen when the wait is over; nothing is held meanwhile.
TEST_F(HostileTest, DeathWhileWaitingForSpace) {
  config.store.capacity_bytes = 4 << 20;
  start();
  Peer holder(*server);
  ASSERT_TRUE(holder.login());
  ASSERT_EQ(holder.reserve(key_of(1), 4 << 20)->code, Code::kOk);
  {
    Peer waiter(*server);
    ASSERT_TRUE(waiter.login());
    ASSERT_TRUE(waiter.send(Peer::put_frame({{key_of(2), block_of(2, 1000)}}, 20'000)));
    EXPECT_TRUE(eventually("parked_now", 1));
  }
  EXPECT_TRUE(eventually("parked_now", 0));
}

TEST_F(HostileTest, LimitsPerConnection) {
  config.max_pins_per_connection = 3;
  config.max_reservations_per_connection = 2;
  config.max_reserved_bytes_per_connection = 10'000;
  start();
  Peer peer(*server);
  ASSERT_TRUE(peer.login());
  ASSERT_EQ(peer.put(key_of(1), block_of(1, 100)), Code::kOk);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(peer.lookup(key_of(1))->code, Code::kOk);
  EXPECT_EQ(peer.lookup(key_of(1))->code, Code::kLimitExceeded);
  EXPECT_EQ(peer.get(key_of(1)).first, Code::kLimitExceeded);
  EXPECT_EQ(peer.reserve(key_of(2), 9'000)->code, Code::kOk);
  EXPECT_EQ(peer.reserve(key_of(3), 2'000)->code, Code::kLimitExceeded);
  EXPECT_EQ(peer.reserve(key_of(3), 500)->code, Code::kOk);
  EXPECT_EQ(peer.reserve(key_of(4), 1)->code, Code::kLimitExceeded);
  EXPECT_EQ(peer.put(key_of(5), block_of(5, 1)), Code::kLimitExceeded);
}

TEST_F(HostileTest, CrowdsOfConnections) {
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  const size_t count = std::min<size_t>(2500, (limit.rlim_cur - 200) / 2);
  config.max_connections = static_cast<uint32_t>(count + 2);
  config.max_unauthenticated = 64;
  start();
  Peer worker(*server);
  ASSERT_TRUE(worker.login());
  std::vector<std::unique_ptr<Peer>> crowd;
  for (size_t i = 0; i < count; ++i) {
    crowd.push_back(std::make_unique<Peer>(*server));
    ASSERT_TRUE(crowd.back()->login());
  }
  for (uint64_t i = 0; i < 20; ++i) ASSERT_EQ(worker.put(key_of(i), block_of(i, 50'000)), Code::kOk);
  Peer last(*server);
  ASSERT_TRUE(last.login());
  Peer refused(*server);
  const auto answer = refused.call(Opcode::kHello);
  ASSERT_TRUE(answer) << "a reason, not only an end";
  EXPECT_EQ(answer->status.code, Code::kLimitExceeded);
  EXPECT_TRUE(refused.closed_by_node());
  refused.close();
  EXPECT_TRUE(eventually("connections_closed_capacity", 1));
  EXPECT_TRUE(crowd.front()->call(Opcode::kPing)->status.is_ok());
}

size_t count_events(StoreServer& server, std::string_view name) {
  size_t count = 0;
  for (const ServerLogEvent& event : server.drain_log(100'000)) count += event.event == name ? 1 : 0;
  return count;
}

TEST_F(HostileTest, TakesTheDescriptorsThatItMayHaveAndSaysWhatDoesNotFit) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit low = before;
  low.rlim_cur = std::min<rlim_t>(before.rlim_max, 512);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
  config.max_connections = UINT32_MAX;
  start();
  rlimit now{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &now), 0);
  EXPECT_EQ(now.rlim_cur, before.rlim_max);
  EXPECT_EQ(count_events(*server, "connections_limited"), 1u);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
}

// All descriptors are taken: newcomers are closed at once, the log says it once, and it ends.
TEST_F(HostileTest, NoDescriptorLeft) {
  start();
  Peer worker(*server);
  ASSERT_TRUE(worker.login());
  std::vector<net::UniqueFd> waiting;
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(server->endpoints().tcp_port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  for (int i = 0; i < 40; ++i) waiting.emplace_back(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit low = before;
  low.rlim_cur = static_cast<rlim_t>(waiting.back().get()) + 1;
  std::vector<net::UniqueFd> taken;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
  for (;;) {
    net::UniqueFd fd(::dup(worker.fd()));
    if (!fd.valid()) break;
    taken.push_back(std::move(fd));
  }
  const auto* generic = static_cast<const sockaddr*>(static_cast<const void*>(&address));
  bool all_closed = true;
  for (const net::UniqueFd& fd : waiting) {
    all_closed = all_closed && ::connect(fd.get(), generic, sizeof address) == 0 &&
                 net::wait_ready(fd.get(), POLLIN, -1, Deadline::after(kPatience)).is_ok();
  }
  taken.clear();
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_TRUE(all_closed) << "nobody waits for his own deadline";
  EXPECT_EQ(count_events(*server, "accept_failed"), 1u);
  EXPECT_TRUE(worker.call(Opcode::kPing)->status.is_ok());
  Peer late(*server);
  EXPECT_TRUE(late.login());
}

TEST_F(HostileTest, StrangersCannotShutOutTheOthers) {
  config.max_unauthenticated = 8;
  config.handshake_timeout_ms = 60'000;
  start();
  std::vector<std::unique_ptr<Peer>> strangers;
  for (int i = 0; i < 12; ++i) strangers.push_back(std::make_unique<Peer>(*server));
  Peer peer(*server);
  EXPECT_TRUE(peer.login()) << "the oldest strangers are let go when there are too many";
}

TEST_F(HostileTest, StrangersOnTheNetworkDoNotKeepThisHostOut) {
  config.max_unauthenticated = 4;
  config.handshake_timeout_ms = 60'000;
  start();
  std::vector<std::unique_ptr<Peer>> strangers;
  for (int i = 0; i < 64; ++i) strangers.push_back(std::make_unique<Peer>(*server));
  for (int i = 0; i < 8; ++i) {
    Peer local(*server, true);
    EXPECT_TRUE(local.login());
  }
}

// A refused peer that keeps its side open has no claim to the room of the others.
TEST_F(HostileTest, RefusedPeersMakeRoom) {
  config.max_unauthenticated = 4;
  config.handshake_timeout_ms = 600'000;
  start();
  std::vector<std::unique_ptr<Peer>> refused;
  for (int i = 0; i < 24; ++i) {
    refused.push_back(std::make_unique<Peer>(*server));
    ASSERT_TRUE(refused.back()->send(Peer::frame(Opcode::kPing)));
  }
  Peer peer(*server);
  EXPECT_TRUE(peer.login());
  EXPECT_EQ(stat("connections_closed_handshake_timeout"), 0u);
}

// The child has the sockets open too, so closing them here ends no registration with epoll.
TEST_F(HostileTest, AForkedChildThatHoldsTheSocketsDoesNoHarm) {
  start();
  std::vector<std::unique_ptr<Peer>> peers;
  for (int i = 0; i < 8; ++i) {
    peers.push_back(std::make_unique<Peer>(*server));
    ASSERT_TRUE(peers.back()->login());
  }
  const pid_t child = fork();
  if (child == 0) {
    for (;;) pause();
  }
  ASSERT_GT(child, 0);
  for (const auto& peer : peers) {
    ::shutdown(peer->fd(), SHUT_RDWR);
    peer->close();
  }
  EXPECT_TRUE(eventually("connections_open", 0));
  Peer later(*server);
  EXPECT_TRUE(later.login());
  EXPECT_EQ(later.put(key_of(1), block_of(1, 1000)), Code::kOk);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
}

TEST_F(HostileTest, StopLetsRequestsFinish) {
  start();
  Peer peer(*server);
  ASSERT_TRUE(peer.login());
  const Bytes frame = Peer::put_frame({{key_of(1), block_of(1, 1 << 20)}});
  ASSERT_TRUE(peer.send(std::span(frame).first(1000)));
  EXPECT_TRUE(eventually("store_reservations", 1));
  std::thread stopper([&] { server->stop(Deadline::after(kPatience)); });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  ASSERT_TRUE(peer.send(std::span(frame).subspan(1000)));
  EXPECT_EQ(Peer::codes(peer.reply()), std::vector{Code::kOk});
  stopper.join();
}

TEST(ServerConfigTest, RefusesNonsense) {
  ServerConfig config;
  config.tls_cert = "cert.pem";
  EXPECT_EQ(StoreServer::create(config).code(), Code::kConfigInvalid);
  config = {};
  config.max_connections = 0;
  EXPECT_EQ(StoreServer::create(config).code(), Code::kConfigInvalid);
  config = {};
  config.tcp_host = "203.0.113.7";
  auto elsewhere = StoreServer::create(config);
  ASSERT_TRUE(elsewhere);
  EXPECT_EQ((*elsewhere)->start().code, Code::kConfigInvalid);
}

TEST(GrantMapTest, AgreesWithAPlainMap) {
  server::GrantMap<uint64_t> map;
  std::map<uint64_t, uint64_t> model;
  uint64_t state = 1;
  for (int i = 0; i < 200'000; ++i) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    const uint64_t id = 1 + (state >> 40) % 500, value = state >> 8;
    if ((state >> 33) % 2 == 0) {
      map.put(id, value);
      model[id] = value;
    } else {
      ASSERT_EQ(map.erase(id), model.erase(id) == 1);
    }
    const uint64_t asked = 1 + (state >> 20) % 500;
    const auto* found = map.find(asked);
    ASSERT_EQ(found != nullptr, model.contains(asked));
    if (found != nullptr) {
      ASSERT_EQ(*found, model[asked]);
    }
    ASSERT_EQ(map.size(), model.size());
  }
  EXPECT_EQ(map.find(0), nullptr);
}

TEST(HistogramTest, BucketsCoverEveryValueInOrder) {
  using server::LoopHistogram;
  for (uint64_t us : {0ull, 1ull, 2ull, 3ull, 7ull, 100ull, 1023ull, 1024ull, 999'999ull, 60'000'000ull}) {
    const size_t bucket = LoopHistogram::bucket_of(us);
    ASSERT_LT(bucket, LoopHistogram::kBuckets);
    EXPECT_GE(LoopHistogram::bound_us(bucket), us) << us;
    if (bucket > 8) {
      EXPECT_LE(LoopHistogram::bound_us(bucket - 1), us) << us;
    }
  }
  EXPECT_EQ(LoopHistogram::bucket_of(UINT64_MAX), LoopHistogram::kBuckets - 1);
}

}  // namespace
}  // namespace mooncache::testing
