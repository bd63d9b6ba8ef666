// Two engines in one process: what moves, what is refused, and what happens when memory is taken back
// meanwhile.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>
#include <string>
#include <thread>

#include "mooncache/server.h"
#include "mooncache/transfer_engine.h"
#include "wire/messages.h"

namespace mooncache {
namespace {

using Bytes = std::vector<std::byte>;

Bytes pattern(size_t size, unsigned seed) {
  Bytes bytes(size);
  uint32_t state = seed * 2654435761u + 1;
  for (auto& byte : bytes) {
    state = state * 1664525u + 1013904223u;
    byte = static_cast<std::byte>(state >> 24);
  }
  return bytes;
}

std::array<std::byte, 32> secret() {
  std::array<std::byte, 32> bytes{};
  bytes.fill(std::byte{7});
  return bytes;
}

Deadline soon() {
  return Deadline::after_ms(20'000);
}

std::unique_ptr<TransferEngine> engine(const std::string& name, bool unix_socket = true) {
  static std::atomic<int> number{0};
  EngineConfig config;
  config.credentials.tenant = name;
  config.credentials.key = wire::tenant_key(secret(), name);
  config.host_id = "here";
  config.listens = true;
  config.secret = secret();
  if (unix_socket)
    config.unix_path = "/tmp/mooncache-transfer-test-" + std::to_string(::getpid()) + "/" +
                       std::to_string(number++) + ".sock";
  auto opened = TransferEngine::open(std::move(config));
  EXPECT_TRUE(opened) << opened.status().message;
  return std::move(*opened);
}

std::vector<EngineGrant> everything(const std::string& peer = "*") {
  return {{peer, 0, 0, true, true}};
}

Code moved(EnginePeer& peer, Direction direction, std::vector<RangeCopy> copies,
           std::string* route = nullptr) {
  auto transfer = peer.submit(direction, std::move(copies), soon());
  if (!transfer) return transfer.code();
  const Code code = (*transfer)->wait(soon()).code;
  if (route != nullptr) *route = (*transfer)->route();
  return code;
}

struct Way {
  const char* name;
  bool allocated, unix_socket;
};

class Ways : public testing::TestWithParam<Way> {};

TEST_P(Ways, MoveScatteredRangesBothWays) {
  const Way way = GetParam();
  Bytes own(5 << 20);
  auto owner = engine("owner", way.unix_socket), other = engine("other");
  uint64_t base = 0;
  Slice memory{own.data(), own.size()};
  std::shared_ptr<void> kept;
  if (way.allocated) {
    auto allocated = owner->allocate(own.size(), "kv", everything());
    ASSERT_TRUE(allocated);
    base = allocated->base;
    memory = allocated->memory;
    kept = allocated->owner;
  } else {
    base = *owner->register_memory(memory, "kv", everything());
  }
  const Bytes first = pattern(memory.size, 1);
  std::memcpy(memory.data, first.data(), first.size());
  auto peer = other->connect(*owner->describe(), soon());
  ASSERT_TRUE(peer) << peer.status().message;
  EXPECT_EQ((*peer)->name(), "owner");
  ASSERT_EQ((*peer)->regions().size(), 1u);
  EXPECT_EQ((*peer)->regions()[0].label, "kv");

  Bytes here(memory.size);
  const std::vector<RangeCopy> copies{{here.data(), base + 3, 1},
                                      {here.data() + 1, base + 100, 0},
                                      {here.data() + 7, base + (1 << 20) - 5, 3 << 20},
                                      {here.data() + (4 << 20), base + 11, 70'001}};
  std::string route;
  ASSERT_EQ(moved(**peer, Direction::kRead, copies, &route), Code::kOk);
  EXPECT_EQ(route, way.name);
  for (const RangeCopy& copy : copies)
    EXPECT_EQ(std::memcmp(copy.local, first.data() + (copy.remote - base), copy.bytes), 0);

  const Bytes second = pattern(memory.size, 2);
  std::memcpy(here.data(), second.data(), second.size());
  Bytes expected = first;
  for (const RangeCopy& copy : copies)
    std::memcpy(expected.data() + (copy.remote - base), copy.local, copy.bytes);
  ASSERT_EQ(moved(**peer, Direction::kWrite, copies), Code::kOk);
  EXPECT_EQ(std::memcmp(memory.data, expected.data(), expected.size()), 0);
}

INSTANTIATE_TEST_SUITE_P(Transfer, Ways,
                         testing::Values(Way{"shm", true, true}, Way{"unix", false, true},
                                         Way{"tcp", true, false}),
                         [](const auto& one) { return std::string(one.param.name); });

class Grants : public testing::TestWithParam<bool> {};

TEST_P(Grants, HoldForEachPeerAndRange) {
  Bytes own = pattern(64 << 10, 3);
  auto owner = engine("owner"), reader = engine("reader"), writer = engine("writer");
  const Bytes before = own;
  uint64_t base = 0;
  Slice memory{own.data(), own.size()};
  std::shared_ptr<void> kept;
  const std::vector<EngineGrant> grants{{"reader", 4096, 8192, true, false},
                                        {"writer", 0, 4096, false, true}};
  if (GetParam()) {
    auto allocated = owner->allocate(own.size(), "", grants);
    ASSERT_TRUE(allocated);
    base = allocated->base;
    memory = allocated->memory;
    kept = allocated->owner;
    std::memcpy(memory.data, before.data(), before.size());
  } else {
    base = *owner->register_memory(memory, "", grants);
  }
  auto as_reader = *reader->connect(*owner->describe(), soon());
  auto as_writer = *writer->connect(*owner->describe(), soon());
  Bytes here(64 << 10, std::byte{9});
  const auto read = [&](EnginePeer& peer, uint64_t at, uint64_t bytes) {
    return moved(peer, Direction::kRead, {{here.data(), at, bytes}});
  };
  const auto write = [&](EnginePeer& peer, uint64_t at, uint64_t bytes) {
    return moved(peer, Direction::kWrite, {{here.data(), at, bytes}});
  };
  EXPECT_EQ(write(*as_reader, base + 4096, 1), Code::kPermissionDenied);
  EXPECT_EQ(read(*as_reader, base + 4095, 2), Code::kPermissionDenied);
  EXPECT_EQ(read(*as_reader, base + 4096, 8193), Code::kPermissionDenied);
  EXPECT_EQ(read(*as_reader, base + 4096, 8192), Code::kOk);
  EXPECT_EQ(std::memcmp(here.data(), before.data() + 4096, 8192), 0);
  EXPECT_EQ(read(*as_writer, base, 1), Code::kPermissionDenied);
  EXPECT_EQ(write(*as_writer, base + 1, 4096), Code::kPermissionDenied);
  EXPECT_EQ(write(*as_writer, base + (64 << 10), 1), Code::kNotFound);
  EXPECT_EQ(write(*as_writer, base + (64 << 10) - 1, 2), Code::kInvalidArgument);
  // One bad range of a batch: none is written.
  EXPECT_EQ(moved(*as_writer, Direction::kWrite, {{here.data(), base, 8}, {here.data(), base + 4096, 8}}),
            Code::kPermissionDenied);
  EXPECT_EQ(std::memcmp(memory.data, before.data(), before.size()), 0);
  EXPECT_EQ(write(*as_writer, base, 4096), Code::kOk);
  EXPECT_EQ(std::memcmp(memory.data, here.data(), 4096), 0);
  ASSERT_TRUE(owner->revoke(base, "writer", soon()));
  EXPECT_EQ(write(*as_writer, base, 1), Code::kPermissionDenied);
  EXPECT_EQ(read(*as_reader, base + 4096, 1), Code::kOk);
  ASSERT_TRUE(owner->unregister(base, soon()));
  EXPECT_EQ(read(*as_reader, base + 4096, 1), Code::kNotFound);
  EXPECT_EQ(owner->unregister(base, soon()).code, Code::kNotFound);
}

INSTANTIATE_TEST_SUITE_P(Transfer, Grants, testing::Bool());

// Memory that is taken back in mid-transfer stays as it is once the call has returned.
void take_back(Direction direction) {
  Bytes own(4 << 20);
  auto owner = engine("owner", false), other = engine("other");
  const uint64_t base = *owner->register_memory({own.data(), own.size()}, "", everything());
  Bytes here = pattern(own.size(), 4);
  auto peer = *other->connect(*owner->describe(), soon());
  auto transfer =
      *peer->submit(direction, std::vector<RangeCopy>(2000, {here.data(), base, own.size()}), soon());
  const Deadline begun = soon();
  while (transfer->route().empty() && !begun.expired()) std::this_thread::yield();
  ASSERT_TRUE(owner->unregister(base, soon()));
  std::ranges::fill(own, std::byte{0x5a});
  const Code code = transfer->wait(soon()).code;
  EXPECT_TRUE(code == Code::kPermissionDenied || code == Code::kNotFound) << code_name(code);
  EXPECT_TRUE(std::ranges::all_of(own, [](std::byte byte) { return byte == std::byte{0x5a}; }));
}

TEST(TakenBack, WhileAPeerWritesThroughTheNetwork) {
  take_back(Direction::kWrite);
}
TEST(TakenBack, WhileAPeerReadsThroughTheNetwork) {
  take_back(Direction::kRead);
}

TEST(TakenBack, WhileAPeerCopiesThroughSharedMemory) {
  auto owner = engine("owner"), other = engine("other");
  constexpr size_t kBytes = 4 << 20;
  auto made = owner->allocate(kBytes, "", everything());
  ASSERT_TRUE(made);
  Bytes here = pattern(kBytes, 4);
  auto peer = *other->connect(*owner->describe(), soon());
  std::vector<RangeCopy> copies(20'000, {here.data(), made->base, kBytes});
  auto transfer = *peer->submit(Direction::kWrite, copies, soon());
  const Deadline begun = soon();
  while (transfer->route() != "shm" && !begun.expired()) std::this_thread::yield();
  // It is the peer that copies: what it has opened it ends itself, and this call waits for it.
  const Status status = owner->unregister(made->base, Deadline::after_ms(1));
  if (!status) {
    EXPECT_EQ(status.code, Code::kDeadlineExceeded);
    transfer->cancel();
    ASSERT_TRUE(owner->unregister(made->base, soon()));
  }
  std::memset(made->memory.data, 0x5a, made->memory.size);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_TRUE(std::all_of(made->memory.data, made->memory.data + made->memory.size,
                          [](std::byte byte) { return byte == std::byte{0x5a}; }));
  EXPECT_NE(transfer->wait(soon()).code, Code::kOk);
}

TEST(Cancelled, AReadLeavesLocalMemoryAlone) {
  // An engine may still send what a cancelled read asked for: registered memory outlives it in every test.
  Bytes own = pattern(4 << 20, 5);
  auto owner = engine("owner", false), other = engine("other");
  const uint64_t base = *owner->register_memory({own.data(), own.size()}, "", everything());
  auto peer = *other->connect(*owner->describe(), soon());
  Bytes here(own.size());
  std::vector<RangeCopy> copies(2000, {here.data(), base, own.size()});
  auto transfer = *peer->submit(Direction::kRead, copies, soon());
  auto waiting = *peer->submit(Direction::kRead, {{here.data(), base, 1}}, soon());
  waiting->cancel();
  EXPECT_EQ(waiting->wait(soon()).code, Code::kCancelled);
  transfer->cancel();
  EXPECT_EQ(transfer->wait(soon()).code, Code::kCancelled);
  std::memset(here.data(), 0x5a, here.size());
  // The connection is whole: what comes late is dropped.
  Bytes small(16);
  EXPECT_EQ(moved(*peer, Direction::kRead, {{small.data(), base + 5, 16}}), Code::kOk);
  EXPECT_EQ(std::memcmp(small.data(), own.data() + 5, 16), 0);
  EXPECT_TRUE(std::ranges::all_of(here, [](std::byte byte) { return byte == std::byte{0x5a}; }));
}

TEST(Connecting, SaysWhatIsThere) {
  auto other = engine("other");
  EXPECT_EQ(other->connect(pattern(100, 6), soon()).code(), Code::kInvalidArgument);
  auto owner = engine("owner");
  const Bytes descriptor = *owner->describe();
  const uint16_t port = owner->tcp_port();
  ASSERT_TRUE(other->connect("127.0.0.1", port, soon()));
  owner.reset();
  EXPECT_EQ(other->connect(descriptor, Deadline::after_ms(500)).code(), Code::kNodeUnavailable);

  ServerConfig config;
  config.secret = secret();
  config.store.capacity_bytes = 1 << 20;
  auto made = StoreServer::create(std::move(config));
  ASSERT_TRUE(made);
  const auto node = std::move(*made);
  ASSERT_TRUE(node->start());
  EXPECT_EQ(other->connect("127.0.0.1", node->endpoints().tcp_port, soon()).code(), Code::kUnsupported);
}

TEST(Connecting, AnEngineThatWasStartedAgainIsAnotherOne) {
  Bytes own(4096);
  auto other = engine("other");
  auto owner = engine("owner", false);
  const uint64_t base = *owner->register_memory({own.data(), own.size()}, "", everything());
  auto peer = *other->connect(*owner->describe(), soon());
  EngineConfig config;
  config.credentials.tenant = "owner";
  config.credentials.key = wire::tenant_key(secret(), "owner");
  config.listens = true;
  config.secret = secret();
  config.tcp_port = owner->tcp_port();
  owner.reset();
  auto again = TransferEngine::open(config);
  ASSERT_TRUE(again) << again.status().message;
  Bytes here(1);
  EXPECT_EQ(moved(*peer, Direction::kRead, {{here.data(), base, 1}}), Code::kStaleIncarnation);
}

TEST(Notifications, ComeInOrderAndAreLimited) {
  auto owner = engine("owner"), other = engine("other");
  auto peer = *other->connect(*owner->describe(), soon());
  for (int i = 0; i < 3; ++i) {
    const Bytes text(1, static_cast<std::byte>(i));
    ASSERT_TRUE(peer->notify(text, soon()));
  }
  const auto notices = owner->notifications(2, soon());
  ASSERT_EQ(notices.size(), 2u);
  EXPECT_EQ(notices[0].peer, "other");
  EXPECT_EQ(notices[1].bytes, Bytes(1, std::byte{1}));
  EXPECT_EQ(owner->notifications(9, soon()).size(), 1u);
  EXPECT_TRUE(owner->notifications(9, Deadline::after_ms(10)).empty());
  EXPECT_EQ(peer->notify(Bytes((64 << 10) + 1), soon()).code, Code::kTooLarge);
  const Bytes large(64 << 10);
  Status last = Status::ok();
  for (int i = 0; i < 300 && last; ++i) last = peer->notify(large, soon());
  EXPECT_EQ(last.code, Code::kBackPressure);
}

TEST(Regions, AreRefusedWhereTheyOverlapOrAreEmpty) {
  Bytes own(4096);
  auto owner = engine("owner");
  EXPECT_EQ(owner->register_memory({own.data(), 0}, "", {}).code(), Code::kInvalidArgument);
  ASSERT_TRUE(owner->register_memory({own.data(), own.size()}, "", {}, 1 << 20));
  EXPECT_EQ(owner->register_memory({own.data(), 10}, "", {}, (1 << 20) + 4095).code(), Code::kAlreadyExists);
  EXPECT_EQ(owner->register_memory({own.data(), 10}, "", {}, (1 << 20) - 9).code(), Code::kAlreadyExists);
  EXPECT_TRUE(owner->register_memory({own.data(), 10}, "", {}, (1 << 20) + 4096));
  const std::vector<EngineGrant> beyond{{"*", 4000, 97, true, false}},
      nameless{{"No Name", 0, 0, true, false}};
  EXPECT_EQ(owner->register_memory({own.data(), own.size()}, "", beyond).code(), Code::kInvalidArgument);
  EXPECT_EQ(owner->register_memory({own.data(), own.size()}, "", nameless).code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace mooncache
