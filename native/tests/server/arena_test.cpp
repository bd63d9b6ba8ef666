// A node whose arena is not anonymous memory of the host.
#include <fcntl.h>

#include <fstream>

#include "server/peer.h"

namespace mooncache::testing {
namespace {

constexpr uint64_t kMiB = 1 << 20;

class ArenaTest : public ServerTest {
 protected:
  bool logged(std::string_view event, std::string_view words) {
    for (auto& entry : server->drain_log(1000)) log_.push_back(std::move(entry));
    return std::any_of(log_.begin(), log_.end(), [&](const ServerLogEvent& entry) {
      return entry.event == event && entry.message.find(words) != std::string::npos;
    });
  }

 private:
  std::vector<ServerLogEvent> log_;
};

class FileArenaTest : public ArenaTest {
 protected:
  void SetUp() override {
    ArenaTest::SetUp();
    std::filesystem::create_directories(folder);
    std::filesystem::permissions(folder, std::filesystem::perms::owner_all);
    path = folder / "arena";
    std::ofstream(path).put('x');
    std::filesystem::permissions(path, std::filesystem::perms(0600));
    config.store.arena_path = path;
    config.store.capacity_bytes = 8 * kMiB;
  }
  std::filesystem::path path;
};

TEST_F(FileArenaTest, ServesOverSocketsAndSaysWhyItIsNotShared) {
  start();
  Peer peer(*server, true);
  ASSERT_TRUE(peer.login());
  const Bytes block = block_of(1, 3 * kMiB);
  ASSERT_EQ(peer.put(key_of(1), block), Code::kOk);
  EXPECT_EQ(peer.get(key_of(1)).second, block);
  const auto attach = peer.call(Opcode::kAttach);
  ASSERT_TRUE(attach);
  EXPECT_EQ(attach->status.code, Code::kUnsupported);
  EXPECT_NE(attach->status.message.find("could be truncated"), std::string::npos) << attach->status.message;
  // nobody of this host can have written to it: a commit without bytes is refused
  const auto reserved = peer.reserve(key_of(2), 100);
  ASSERT_TRUE(reserved && reserved->code == Code::kOk);
  EXPECT_EQ(peer.commit(reserved->extent.grant, 0, wire::CommitItem::kFlagOneSided), Code::kPermissionDenied);
  EXPECT_TRUE(logged("arena_opened", "the node starts empty"));
  EXPECT_TRUE(logged("arena_not_shared", "TCP or RDMA"));
}

TEST_F(FileArenaTest, ATruncatedFileCostsItsBlocks) {
  start();
  Peer peer(*server);
  ASSERT_TRUE(peer.login());
  const Bytes block = block_of(1, kMiB);
  for (uint64_t number = 0; number < 8; ++number) ASSERT_EQ(peer.put(key_of(number), block), Code::kOk);
  std::filesystem::resize_file(path, 4 * kMiB);
  ASSERT_TRUE(eventually("arena_lost_bytes", 4 * kMiB));
  EXPECT_TRUE(logged("arena_damaged", "4194304 bytes"));
  size_t found = 0;
  for (uint64_t number = 0; number < 8; ++number) {
    // a range: the node looks before it sends
    const auto answer = peer.call(Opcode::kGet, Peer::get_meta({{key_of(number), 1, kMiB - 1}}));
    const auto results = peer.get_results(answer);
    ASSERT_EQ(results.size(), 1u);
    if (results[0].code == Code::kOk) {
      ++found;
      EXPECT_TRUE(std::equal(answer->payload.begin(), answer->payload.end(), block.begin() + 1));
    } else {
      EXPECT_EQ(results[0].code, Code::kChecksumMismatch);
    }
  }
  EXPECT_EQ(found, 4u);
  // the node goes on with memory in the place of what is gone
  for (uint64_t number = 10; number < 14; ++number) ASSERT_EQ(peer.put(key_of(number), block), Code::kOk);
  for (uint64_t number = 10; number < 14; ++number) EXPECT_EQ(peer.get(key_of(number)).second, block);
}

TEST_F(FileArenaTest, TheCapacityIsThatOfTheFile) {
  config.store.capacity_bytes = 0;
  std::filesystem::resize_file(path, 5 * kMiB);
  start();
  EXPECT_EQ(stat("store_capacity_bytes"), 5 * kMiB);
  ServerConfig second = config;
  second.unix_path = "";
  const auto made = StoreServer::create(second);
  ASSERT_FALSE(made);
  EXPECT_EQ(made.status().code, Code::kConfigInvalid);
  EXPECT_NE(made.status().message.find("in use by another process"), std::string::npos);
}

}  // namespace
}  // namespace mooncache::testing
