// Every operation, over real sockets.
#include <sys/mman.h>
#include <sys/stat.h>

#include "server/peer.h"

namespace mooncache::testing {
namespace {

using OperationsTest = ServerTest;

TEST_F(OperationsTest, PutThenGetOverTcpAndUnix) {
  start();
  for (const bool unix_socket : {false, true}) {
    Peer peer(*server, unix_socket);
    ASSERT_TRUE(peer.login());
    const uint64_t base = unix_socket ? 100 : 0;
    const Bytes small = block_of(1, 1), large = block_of(2, 3'000'001);
    EXPECT_EQ(peer.put({{key_of(base), small}, {key_of(base + 1), large}}),
              (std::vector<Code>{Code::kOk, Code::kOk}));
    EXPECT_EQ(peer.put(key_of(base), small), Code::kAlreadyExists);
    EXPECT_EQ(peer.get(key_of(base)), std::pair(Code::kOk, small));
    EXPECT_EQ(peer.get(key_of(base + 1)), std::pair(Code::kOk, large));
    EXPECT_EQ(peer.get(key_of(base + 2)).first, Code::kNotFound);
  }
}

TEST_F(OperationsTest, PutRefusesPerItemAndKeepsTheConnection) {
  config.store.max_block_bytes = 1 << 20;
  start();
  Peer peer(*server);
  ASSERT_TRUE(peer.login());
  const auto codes =
      peer.put({{key_of(1), {}}, {key_of(2), block_of(2, 2 << 20)}, {key_of(3), block_of(3, 5000)}});
  EXPECT_EQ(codes, (std::vector<Code>{Code::kInvalidArgument, Code::kTooLarge, Code::kOk}));
  EXPECT_TRUE(peer.put({}).empty());
  EXPECT_EQ(peer.get(key_of(3)), std::pair(Code::kOk, block_of(3, 5000)));
}

TEST_F(OperationsTest, ABlockKeyedTwiceInOneBatchIsStoredOnce) {
  start();
  Peer peer(*server);
  ASSERT_TRUE(peer.login());
  const Bytes block = block_of(1, 1000);
  EXPECT_EQ(peer.put({{key_of(1), block}, {key_of(1), block}}),
            (std::vector<Code>{Code::kOk, Code::kAlreadyExists}));
}

TEST_F(OperationsTest, DamageInTransitIsNotStored) {
  start();
  Peer peer(*server);
  ASSERT_TRUE(peer.login());
  Bytes frame = Peer::put_frame({{key_of(1), block_of(1, 400'000)}, {key_of(2), block_of(2, 100)}});
  frame[frame.size() - 200'000] ^= std::byte{4};
  ASSERT_TRUE(peer.send(frame));
  EXPECT_EQ(Peer::codes(peer.reply()), (std::vector<Code>{Code::kChecksumMismatch, Code::kOk}));
  EXPECT_EQ(peer.get(key_of(1)).first, Code::kNotFound);
  EXPECT_EQ(peer.get(key_of(2)), std::pair(Code::kOk, block_of(2, 100)));
  EXPECT_EQ(stat("crc_failures_in"), 1u);
}

TEST_F(OperationsTest, GetOfRanges) {
  start();
  Peer peer(*server);
  ASSERT_TRUE(peer.login());
  const Bytes block = block_of(1, 300'000);
  ASSERT_EQ(peer.put(key_of(1), block), Code::kOk);
  const auto answer = peer.call(Opcode::kGet, Peer::get_meta({{key_of(1), 1000, 5000},
                                                              {key_of(1), 299'999, UINT64_MAX},
                                                              {key_of(1), 300'000, 10},
                                                              {key_of(1), 300'001, 10},
                                                              {key_of(1), 0, 0}}));
  const auto results = peer.get_results(answer);
  ASSERT_EQ(results.size(), 5u);
  const Bytes first(block.begin() + 1000, block.begin() + 6000);
  EXPECT_EQ(results[0].code, Code::kOk);
  EXPECT_EQ(results[0].length, 5000u);
  EXPECT_EQ(results[0].crc32c, crc32c(first));
  EXPECT_EQ(results[1].length, 1u);
  EXPECT_EQ(results[2].code, Code::kOk);
  EXPECT_EQ(results[2].length, 0u);
  EXPECT_EQ(results[3].code, Code::kInvalidArgument);
  EXPECT_EQ(results[4].block_size, 300'000u);
  EXPECT_EQ(answer->payload.size(), 5001u);
  EXPECT_EQ(Bytes(answer->payload.begin(), answer->payload.begin() + 5000), first);

  const auto whole =
      peer.get_results(peer.call(Opcode::kGet, Peer::get_meta({{key_of(1), 0, 100}}), {}, wire::kFlagWhole));
  ASSERT_EQ(whole.size(), 1u);
  EXPECT_EQ(whole[0].code, Code::kBufferTooSmall);
  EXPECT_EQ(whole[0].block_size, 300'000u);
}

TEST_F(OperationsTest, RangesOfADamagedBlockAreNeverServed) {
  config.store.capacity_bytes = 64 << 20;
  start();
  Peer peer(*server);
  ASSERT_TRUE(peer.login());
  ASSERT_EQ(peer.put(key_of(1), block_of(1, 40 << 20)), Code::kOk);  // more than one turn can verify
  EXPECT_EQ(peer.get_results(peer.call(Opcode::kGet, Peer::get_meta({{key_of(1), 0, 10}})))[0].code,
            Code::kOk);
  ASSERT_EQ(server->store().flip_bit(kDefault, key_of(1), 8ull * (39 << 20)), Code::kOk);
  const auto answer = peer.call(Opcode::kGet, Peer::get_meta({{key_of(1), 0, 10}}));
  EXPECT_EQ(peer.get_results(answer)[0].code, Code::kChecksumMismatch);
  EXPECT_TRUE(answer->payload.empty());
  EXPECT_EQ(peer.get(key_of(1)).first, Code::kNotFound);
  EXPECT_EQ(stat("crc_failures_stored"), 1u);
  EXPECT_EQ(server->drain_log(10).back().event, "block_corrupt");
}

TEST_F(OperationsTest, LookupReadRelease) {
  start();
  Peer peer(*server), other(*server);
  ASSERT_TRUE(peer.login() && other.login());
  const Bytes block = block_of(1, 200'000);
  ASSERT_EQ(peer.put(key_of(1), block), Code::kOk);
  const auto found = peer.lookup(key_of(1));
  ASSERT_TRUE(found && found->code == Code::kOk);
  EXPECT_EQ(found->crc32c, crc32c(block));
  EXPECT_EQ(found->extent.size, block.size());
  EXPECT_EQ(peer.lookup(key_of(2))->code, Code::kNotFound);

  const auto read = [&](Peer& by, uint64_t offset, uint64_t length) {
    Writer meta;
    wire::ReadRequest{found->extent.grant, offset, length}.encode(meta);
    return by.call(Opcode::kRead, meta);
  };
  const auto part = read(peer, 100, 1000);
  ASSERT_TRUE(part && part->status);
  EXPECT_EQ(part->payload, Bytes(block.begin() + 100, block.begin() + 1100));
  EXPECT_EQ(Reader(part->body).u32(), crc32c(part->payload));
  EXPECT_EQ(read(peer, 0, block.size())->payload, block);
  EXPECT_EQ(read(peer, 1, block.size())->status.code, Code::kInvalidArgument);
  EXPECT_EQ(read(peer, UINT64_MAX, 2)->status.code, Code::kInvalidArgument);
  EXPECT_TRUE(read(peer, 0, 0)->status.is_ok());
  EXPECT_EQ(read(other, 0, 10)->status.code, Code::kPinUnknown) << "a grant belongs to its connection";

  // A block that is removed stays readable under its grant, and RELEASE behind a READ does not cut the READ.
  EXPECT_EQ(Peer::codes(peer.call(Opcode::kRemove, Peer::keys_meta({key_of(1)}))), std::vector{Code::kOk});
  Writer meta;
  wire::ReadRequest{found->extent.grant, 0, block.size()}.encode(meta);
  Bytes both = Peer::frame(Opcode::kRead, meta.view());
  const Bytes release = Peer::frame(Opcode::kRelease, Peer::grants_meta({found->extent.grant, 77}).view(), {},
                                    wire::kFlagNoReply);
  both.insert(both.end(), release.begin(), release.end());
  ASSERT_TRUE(peer.send(both));
  EXPECT_EQ(peer.reply()->payload, block);
  EXPECT_EQ(read(peer, 0, 1)->status.code, Code::kPinUnknown);
  EXPECT_TRUE(peer.call(Opcode::kRelease, Peer::grants_meta({1, 2}))->status.is_ok());
}

// One frame with ranges of several reservations: each has a code of its own.
TEST_F(OperationsTest, AWriteOfSeveralReservations) {
  start();
  Peer peer(*server), other(*server);
  ASSERT_TRUE(peer.login() && other.login());
  const Bytes first = block_of(1, 3000), second = block_of(2, 5000), foreign = block_of(3, 1000);
  const uint64_t a = peer.reserve(key_of(1), first.size())->extent.grant;
  const uint64_t b = peer.reserve(key_of(2), second.size())->extent.grant;
  const uint64_t others = other.reserve(key_of(3), foreign.size())->extent.grant;
  Bytes payload;
  std::vector<wire::ReservedRange> ranges;
  const auto part_of = [](const Bytes& block, size_t offset, size_t length) {
    return Bytes(block.begin() + static_cast<ptrdiff_t>(offset),
                 block.begin() + static_cast<ptrdiff_t>(offset + length));
  };
  const auto add = [&](uint64_t grant, uint64_t offset, const Bytes& bytes, uint32_t wrong = 0) {
    ranges.push_back({grant, {offset, bytes.size(), crc32c(bytes) ^ wrong}});
    payload.insert(payload.end(), bytes.begin(), bytes.end());
  };
  add(b, 0, part_of(second, 0, 2000));
  add(a, 0, first);
  add(others, 0, foreign);
  add(b, 2000, part_of(second, 2000, 3000));
  add(99'999, 0, foreign);
  add(a, 2500, part_of(first, 0, 600));
  Writer meta;
  wire::encode_items<wire::ReservedRange>(meta, ranges);
  EXPECT_EQ(Peer::codes(peer.call(Opcode::kWrite, meta, payload, wire::kFlagSeveral)),
            (std::vector<Code>{Code::kOk, Code::kOk, Code::kReservationUnknown, Code::kOk,
                               Code::kReservationUnknown, Code::kInvalidArgument}));
  EXPECT_EQ(peer.commit(a, crc32c(first)), Code::kOk);
  EXPECT_EQ(peer.commit(b, crc32c(second)), Code::kOk);
  EXPECT_EQ(peer.get(key_of(1)), std::pair(Code::kOk, first));
  EXPECT_EQ(peer.get(key_of(2)), std::pair(Code::kOk, second));
  EXPECT_EQ(other.commit(others, crc32c(foreign)), Code::kIncomplete) << "nothing came into it";

  const uint64_t c = peer.reserve(key_of(4), first.size())->extent.grant;
  ranges.clear();
  payload.clear();
  add(c, 0, first, 1);
  meta.bytes().clear();
  wire::encode_items<wire::ReservedRange>(meta, ranges);
  EXPECT_EQ(Peer::codes(peer.call(Opcode::kWrite, meta, payload, wire::kFlagSeveral)),
            (std::vector<Code>{Code::kChecksumMismatch}));
  EXPECT_EQ(peer.commit(c, crc32c(first)), Code::kIncomplete);
}

TEST_F(OperationsTest, ReserveWriteCommit) {
  start();
  Peer peer(*server), other(*server);
  ASSERT_TRUE(peer.login() && other.login());
  const Bytes block = block_of(5, 100'000);
  const Bytes head(block.begin(), block.begin() + 30'000), tail(block.begin() + 30'000, block.end());
  const auto place = peer.reserve(key_of(5), block.size());
  ASSERT_TRUE(place && place->code == Code::kOk);
  const uint64_t grant = place->extent.grant;
  EXPECT_EQ(other.write(grant, 0, head), Code::kReservationUnknown);
  EXPECT_EQ(other.commit(grant, crc32c(block)), Code::kReservationUnknown);
  EXPECT_EQ(peer.write(grant, 30'000, tail), Code::kOk);
  EXPECT_EQ(peer.write(grant, 90'000, head), Code::kInvalidArgument);
  EXPECT_EQ(peer.write(grant, UINT64_MAX - 5, head), Code::kInvalidArgument);
  EXPECT_EQ(peer.write(grant, 0, head, crc32c(head) ^ 1), Code::kChecksumMismatch);
  EXPECT_EQ(peer.get(key_of(5)).first, Code::kNotFound);
  EXPECT_EQ(peer.write(grant, 0, head), Code::kOk);
  EXPECT_EQ(peer.commit(grant, crc32c(block), wire::CommitItem::kFlagOneSided), Code::kPermissionDenied);
  EXPECT_EQ(peer.commit(grant, crc32c(block)), Code::kOk);
  EXPECT_EQ(peer.commit(grant, crc32c(block)), Code::kReservationUnknown);
  EXPECT_EQ(peer.get(key_of(5)), std::pair(Code::kOk, block));

  const auto holes = peer.reserve(key_of(6), 1000);
  EXPECT_EQ(peer.write(holes->extent.grant, 0, block_of(1, 999)), Code::kOk);
  EXPECT_EQ(peer.commit(holes->extent.grant, 1), Code::kIncomplete);
  const auto wrong = peer.reserve(key_of(6), 1000);
  EXPECT_EQ(peer.write(wrong->extent.grant, 0, block_of(1, 1000)), Code::kOk);
  EXPECT_EQ(peer.commit(wrong->extent.grant, 1), Code::kChecksumMismatch);
  const auto given_up = peer.reserve(key_of(6), 1000);
  EXPECT_EQ(Peer::codes(peer.call(Opcode::kAbort, Peer::grants_meta({given_up->extent.grant, 9}))),
            (std::vector<Code>{Code::kOk, Code::kReservationUnknown}));
  EXPECT_EQ(stat("reservations_held"), 0u);
}

TEST_F(OperationsTest, MatchStatPinListNodeStat) {
  start();
  Peer peer(*server), admin(*server);
  ASSERT_TRUE(peer.login("team-a") && admin.login("default", true));
  for (const uint64_t i : {0, 1, 2, 4}) ASSERT_EQ(peer.put(key_of(i), block_of(i, 1000)), Code::kOk);
  const std::vector<Key> keys{key_of(0), key_of(1), key_of(2), key_of(3), key_of(4)};
  for (const uint16_t flags : {uint16_t{0}, uint16_t{wire::kFlagTouch}}) {
    const auto answer = peer.call(Opcode::kMatch, Peer::keys_meta(keys), {}, flags);
    Reader reader(answer->body);
    const auto match = wire::MatchResponse::decode(reader, 5);
    ASSERT_TRUE(match);
    EXPECT_EQ(match->leading_run, 3u);
    EXPECT_EQ(match->present, 4u);
    EXPECT_EQ(match->bitmap, Bytes{std::byte{0b10111}});
  }
  const auto stats = peer.call(Opcode::kStat, Peer::keys_meta({key_of(0), key_of(3)}));
  Reader stats_reader(stats->body);
  const auto infos = wire::decode_items<wire::StatResult>(stats_reader);
  ASSERT_TRUE(infos && infos->size() == 2);
  EXPECT_EQ((*infos)[0].size, 1000u);
  EXPECT_EQ((*infos)[1].code, Code::kNotFound);

  Writer pin;
  wire::PinRequest{60'000, {key_of(0), key_of(3)}}.encode(pin);
  EXPECT_EQ(Peer::codes(peer.call(Opcode::kPin, pin)), (std::vector<Code>{Code::kOk, Code::kNotFound}));
  EXPECT_EQ(Peer::codes(peer.call(Opcode::kRemove, Peer::keys_meta({key_of(0)}))),
            std::vector{Code::kPinned});
  EXPECT_EQ(Peer::codes(peer.call(Opcode::kUnpin, Peer::keys_meta({key_of(0)}))), std::vector{Code::kOk});
  EXPECT_EQ(Peer::codes(peer.call(Opcode::kRemove, Peer::keys_meta({key_of(0)}))), std::vector{Code::kOk});

  const auto list = [](Peer& by) {
    std::vector<Key> found;
    uint64_t cursor = 0;
    do {
      Writer meta;
      wire::ListRequest{cursor, 2}.encode(meta);
      const auto answer = by.call(Opcode::kList, meta);
      Reader reader(answer->body);
      const auto page = wire::ListResponse::decode(reader);
      if (!page) break;
      for (const auto& item : page->items) found.push_back(item.key);
      cursor = page->next_cursor;
    } while (cursor != 0);
    return found;
  };
  EXPECT_EQ(list(peer).size(), 3u);
  EXPECT_TRUE(list(admin).empty()) << "a tenant sees its own blocks only";
  EXPECT_EQ(admin.get(key_of(1)).first, Code::kNotFound);

  const auto count = [](Peer& by) {
    const auto answer = by.call(Opcode::kNodeStat);
    Reader reader(answer->body);
    return wire::NodeStatResponse::decode(reader)->values.size();
  };
  EXPECT_EQ(count(peer), 5u);
  EXPECT_GT(count(admin), 50u);
  EXPECT_EQ(server->tenants().at(wire::tenant_id("team-a")), "team-a");
}

TEST_F(OperationsTest, AttachSharesMemory) {
  start();
  Peer over_tcp(*server), peer(*server, true);
  ASSERT_TRUE(over_tcp.login() && peer.login());
  EXPECT_EQ(over_tcp.call(Opcode::kAttach)->status.code, Code::kUnsupported);
  const Bytes block = block_of(1, 70'000);
  const auto place = peer.reserve(key_of(1), block.size());
  ASSERT_TRUE(place && place->code == Code::kOk);

  ASSERT_TRUE(peer.send(Peer::frame(Opcode::kAttach)));
  std::vector<net::UniqueFd> fds;
  Bytes answer(65536);
  size_t got = 0;
  const size_t want = wire::kHeaderBytes + 4 + 4 + 16 * server->store().segments().size();
  while (got < want) {
    ASSERT_TRUE(net::wait_ready(peer.fd(), POLLIN, -1, Deadline::after(kPatience)));
    const auto count = net::receive_with_fds(peer.fd(), std::span(answer).subspan(got), fds);
    ASSERT_TRUE(count);
    got += *count;
  }
  ASSERT_EQ(fds.size(), 3u);  // arena and generations to read, arena to write
  void* writable = mmap(nullptr, 16 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, fds[2].get(), 0);
  ASSERT_NE(writable, MAP_FAILED);
  EXPECT_EQ(mmap(nullptr, 16 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, fds[0].get(), 0), MAP_FAILED);
  std::memcpy(static_cast<std::byte*>(writable) + place->extent.offset, block.data(), block.size());
  EXPECT_EQ(peer.commit(place->extent.grant, crc32c(block), wire::CommitItem::kFlagOneSided), Code::kOk);
  EXPECT_EQ(over_tcp.get(key_of(1)), std::pair(Code::kOk, block));
  munmap(writable, 16 << 20);
}

TEST_F(OperationsTest, PipelinedRequestsAreAnsweredInOrder) {
  start();
  Peer peer(*server);
  ASSERT_TRUE(peer.login());
  constexpr uint64_t kCount = 300;
  Bytes all;
  for (uint64_t i = 0; i < kCount; ++i) {
    const Bytes put = Peer::put_frame({{key_of(i), block_of(i, 1 + i * 7)}}, 0, 2 * i);
    const Bytes get =
        Peer::frame(Opcode::kGet, Peer::get_meta({{key_of(i), 0, UINT64_MAX}}).view(), {}, 0, 2 * i + 1);
    all.insert(all.end(), put.begin(), put.end());
    all.insert(all.end(), get.begin(), get.end());
  }
  std::thread writer([&] { EXPECT_TRUE(peer.send(all)); });
  for (uint64_t i = 0; i < 2 * kCount; ++i) {
    const auto answer = peer.reply();
    ASSERT_TRUE(answer && answer->header.request_id == i);
    if (i % 2 == 1) {
      EXPECT_EQ(answer->payload, block_of(i / 2, 1 + i / 2 * 7));
    }
  }
  writer.join();
}

TEST_F(OperationsTest, ByteByByte) {
  start();
  Peer peer(*server);
  ASSERT_TRUE(peer.login());
  Bytes all = Peer::put_frame({{key_of(1), block_of(1, 40)}, {key_of(2), block_of(2, 60)}});
  const Bytes get = Peer::frame(Opcode::kGet, Peer::get_meta({{key_of(2), 0, UINT64_MAX}}).view());
  all.insert(all.end(), get.begin(), get.end());
  for (const std::byte& byte : all) {
    ASSERT_TRUE(peer.send({&byte, 1}));
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  EXPECT_EQ(Peer::codes(peer.reply()), (std::vector<Code>{Code::kOk, Code::kOk}));
  EXPECT_EQ(peer.reply()->payload, block_of(2, 60));
}

TEST_F(OperationsTest, DrainingRefusesPutsAndServesGets) {
  start();
  Peer peer(*server);
  ASSERT_TRUE(peer.login());
  ASSERT_EQ(peer.put(key_of(1), block_of(1, 100)), Code::kOk);
  server->store().set_draining(true);
  EXPECT_EQ(peer.put(key_of(2), block_of(2, 100), 100), Code::kDraining);
  EXPECT_EQ(peer.reserve(key_of(2), 100)->code, Code::kDraining);
  EXPECT_EQ(peer.get(key_of(1)).first, Code::kOk);
}

TEST_F(OperationsTest, UnixSocketIsPrivateAndGoesAtStop) {
  start();
  struct stat info {};
  ASSERT_EQ(::stat(config.unix_path.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  ASSERT_EQ(::stat(folder.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0700u);
  auto second = StoreServer::create(config);
  ASSERT_TRUE(second);
  EXPECT_EQ((*second)->start().code, Code::kConfigInvalid) << "somebody answers on the path";
  server->stop(Deadline::after_ms(1000));
  EXPECT_FALSE(std::filesystem::exists(config.unix_path));
}

TEST_F(OperationsTest, TwoLoopsShareTheConnections) {
  config.io_threads = 2;
  start();
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([this, t] {
      Peer peer(*server, t % 2 == 0);
      ASSERT_TRUE(peer.login());
      for (uint64_t i = 0; i < 50; ++i) {
        const Bytes block = block_of(t * 100 + i, 20'000);
        ASSERT_EQ(peer.put(key_of(t * 100 + i), block, 1000), Code::kOk);
        ASSERT_EQ(peer.get(key_of(t * 100 + i)), std::pair(Code::kOk, block));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(stat("put_blocks"), 200u);
  bool has_put = false;
  for (const OpcodeLatency& latency : server->latency_histograms().opcodes) {
    has_put |= latency.opcode == "PUT" && latency.count == 200;
  }
  EXPECT_TRUE(has_put);
}

}  // namespace
}  // namespace mooncache::testing
