// Devices, domains, endpoints and memory over the fake libibverbs: every call that may fail, fails.
#include "rdma/fabric.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <thread>

#include "compare.h"
#include "rdma/pair.h"

namespace mooncache::testing {
namespace {

TEST_F(FabricTest, MovesBytesBothWays) {
  Pair pair;
  ASSERT_TRUE(pair.connect(rail(), rail()));
  std::vector<std::byte> mine(5000, std::byte{1}), theirs(5000, std::byte{2});
  auto local = pair.near_domain->attach(slice(mine));
  auto readable = pair.far_domain->expose(slice(theirs), false);
  ASSERT_TRUE(local && readable);
  const Post read = post(false, mine, **local, **readable);
  ASSERT_EQ(pair.near->post(std::span(&read, 1)), 1u);
  auto done = reap(*pair.near, 1);
  ASSERT_EQ(done.size(), 1u);
  EXPECT_EQ(done[0].outcome, WorkOutcome::kDone);
  EXPECT_TRUE(mine == theirs);
  auto writable = pair.far_domain->expose(slice(theirs), true);
  std::fill(mine.begin(), mine.end(), std::byte{3});
  const Post write = post(true, mine, **local, **writable);
  ASSERT_EQ(pair.near->post(std::span(&write, 1)), 1u);
  EXPECT_EQ(reap(*pair.near, 1).at(0).outcome, WorkOutcome::kDone);
  EXPECT_TRUE(mine == theirs);
  EXPECT_LE(fake().last_retry_count(), 6);
}

TEST_F(FabricTest, AddressesTellNothingAboutTheProcess) {
  auto domain = rail().make_domain();
  std::vector<std::byte> bytes(100'000);
  auto memory = (*domain)->expose({bytes.data() + 12'345, 100}, false);
  EXPECT_LT((*memory)->remote_address(), 4096u);
}

TEST_F(FabricTest, RefusesWhatWasNotExposed) {
  enum class Wrong : uint8_t { kDirection, kPastTheEnd, kKey, kWithdrawn, kOtherDomain };
  for (const Wrong wrong :
       {Wrong::kDirection, Wrong::kPastTheEnd, Wrong::kKey, Wrong::kWithdrawn, Wrong::kOtherDomain}) {
    Pair pair, other;
    ASSERT_TRUE(pair.connect(rail(), rail()));
    ASSERT_TRUE(other.connect(rail(), rail()));
    std::vector<std::byte> mine(64, std::byte{1}), theirs(64, std::byte{2});
    auto local = pair.near_domain->attach(slice(mine));
    auto& domain = wrong == Wrong::kOtherDomain ? *other.far_domain : *pair.far_domain;
    auto exposed = domain.expose(slice(theirs), wrong != Wrong::kDirection);
    Post write = post(true, mine, **local, **exposed);
    if (wrong == Wrong::kPastTheEnd) write.remote_address += 1;
    if (wrong == Wrong::kKey) write.remote_key ^= 0x5a5a;
    if (wrong == Wrong::kWithdrawn) *exposed = nullptr;
    ASSERT_EQ(pair.near->post(std::span(&write, 1)), 1u);
    EXPECT_EQ(reap(*pair.near, 1).at(0).outcome, WorkOutcome::kRefused) << static_cast<int>(wrong);
    EXPECT_TRUE(pair.near->failed());
    EXPECT_EQ(pair.near->room(), 0u);
    EXPECT_EQ(theirs[0], std::byte{2});
  }
}

TEST_F(FabricTest, StopFlushesAndThenNothingMoves) {
  fake().set_latency_us(0, 3'000);
  Pair pair;
  ASSERT_TRUE(pair.connect(rail(), rail()));
  std::vector<std::byte> mine(4096), theirs(4096, std::byte{2});
  auto local = pair.near_domain->attach(slice(mine));
  auto exposed = pair.far_domain->expose(slice(theirs), false);
  std::vector<Post> posts(20, post(false, mine, **local, **exposed));
  EXPECT_EQ(pair.near->post(posts), 8u);  // the depth
  EXPECT_EQ(pair.near->room(), 0u);
  pair.near->stop();
  const auto done = reap(*pair.near, 8);
  ASSERT_EQ(done.size(), 8u);
  EXPECT_EQ(done.back().outcome, WorkOutcome::kFlushed);
  EXPECT_EQ(pair.near->outstanding(), 0u);
  std::fill(mine.begin(), mine.end(), std::byte{9});
  std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_TRUE(all_bytes(mine, std::byte{9}));
}

TEST_F(FabricTest, WakesThroughADescriptor) {
  fake().set_latency_us(0, 20'000);
  Pair pair;
  ASSERT_TRUE(pair.connect(rail(), rail()));
  std::vector<std::byte> mine(64), theirs(64);
  auto local = pair.near_domain->attach(slice(mine));
  auto exposed = pair.far_domain->expose(slice(theirs), false);
  for (int round = 0; round < 3; ++round) {
    const Post read = post(false, mine, **local, **exposed);
    ASSERT_EQ(pair.near->post(std::span(&read, 1)), 1u);
    pair.near->arm();
    std::array<Reaped, 1> none;
    ASSERT_EQ(pair.near->poll(none), 0u);
    pollfd watched{pair.near->fd(), POLLIN, 0};
    ASSERT_EQ(::poll(&watched, 1, 10'000), 1);
    EXPECT_EQ(reap(*pair.near, 1).size(), 1u);
  }
}

TEST_F(FabricTest, DeadPathIsGone) {
  Pair pair;
  ASSERT_TRUE(pair.connect(rail(), rail()));
  std::vector<std::byte> mine(64), theirs(64);
  auto local = pair.near_domain->attach(slice(mine));
  auto exposed = pair.far_domain->expose(slice(theirs), false);
  fake().cut_path(0, true);
  std::vector<Post> posts(3, post(false, mine, **local, **exposed));
  ASSERT_EQ(pair.near->post(posts), 3u);
  const auto done = reap(*pair.near, 3);
  ASSERT_EQ(done.size(), 3u);
  EXPECT_EQ(done[0].outcome, WorkOutcome::kGone);
  EXPECT_EQ(done[1].outcome, WorkOutcome::kFlushed);
}

TEST_F(FabricTest, PortsGoDownAndUp) {
  Rail& one = rail();
  EXPECT_TRUE(one.up());
  const auto wait_for = [&](bool up) {
    for (int i = 0; i < 1000 && one.up() != up; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    return one.up() == up;
  };
  fake().set_port_active(0, false);
  EXPECT_TRUE(wait_for(false));
  fake().set_port_active(0, true);
  EXPECT_TRUE(wait_for(true));
  fake().remove(0);
  EXPECT_TRUE(wait_for(false));
}

TEST_F(FabricTest, EveryCallFailsWithEveryReasonAndLeavesNothingBehind) {
  const char* calls[] = {"ibv_alloc_pd",  "ibv_reg_mr_iova", "ibv_create_comp_channel",
                         "ibv_create_cq", "ibv_create_qp",   "ibv_modify_qp"};
  for (const char* call : calls) {
    for (const int error : {ENOMEM, EAGAIN, EIO, EINVAL, EPERM, ENODEV, EOPNOTSUPP, EBUSY}) {
      for (int skip = 0; skip < 3; ++skip) {
        fake().fail(call, error, std::string(call) == "ibv_create_qp" ? 2 : 1, skip);
        Pair pair;
        Status status = pair.connect(rail(), rail());
        std::vector<std::byte> bytes(100);
        for (int i = 0; i < 3 && status; ++i) {
          auto memory = pair.far_domain->expose(slice(bytes), true);
          if (!memory) status = memory.status();
        }
        if (std::string(call) == "ibv_create_comp_channel" && skip > 0) continue;  // only one side makes one
        if (std::string(call) == "ibv_create_cq" || std::string(call) == "ibv_alloc_pd" ||
            std::string(call) == "ibv_create_qp") {
          if (skip > 1) continue;  // two of them are made
        }
        EXPECT_EQ(status.code, Code::kTransportUnavailable) << call << " " << error << " " << skip;
        EXPECT_NE(status.message.find(", because "), std::string::npos) << status.message;
      }
      fake().reset(1);
    }
  }
}

TEST_F(FabricTest, PostAndPollMayFail) {
  for (const char* call : {"post_send", "poll_cq"}) {
    Pair pair;
    ASSERT_TRUE(pair.connect(rail(), rail()));
    std::vector<std::byte> mine(64), theirs(64);
    auto local = pair.near_domain->attach(slice(mine));
    auto exposed = pair.far_domain->expose(slice(theirs), false);
    fake().fail(call, EIO, 1, std::string(call) == "post_send" ? 2 : 0);
    std::vector<Post> posts(5, post(false, mine, **local, **exposed));
    const size_t taken = pair.near->post(posts);
    EXPECT_EQ(taken, std::string(call) == "post_send" ? 2u : 5u);
    EXPECT_EQ(reap(*pair.near, taken).size(), taken);
    EXPECT_TRUE(pair.near->failed());
  }
}

TEST_F(FabricTest, ASurpriseRemovalLetsGoOfEverything) {
  fake().set_latency_us(0, 50'000);
  Pair pair;
  ASSERT_TRUE(pair.connect(rail(), rail()));
  std::vector<std::byte> mine(64), theirs(64);
  auto local = pair.near_domain->attach(slice(mine));
  auto exposed = pair.far_domain->expose(slice(theirs), false);
  const Post read = post(false, mine, **local, **exposed);
  ASSERT_EQ(pair.near->post(std::span(&read, 1)), 1u);
  fake().remove(0);
  const auto before = std::chrono::steady_clock::now();
  pair.near.reset();  // must not wait for completions that never come
  EXPECT_LT(std::chrono::steady_clock::now() - before, std::chrono::seconds(2));
}

TEST(Discovery, SaysWhyThereIsNothing) {
  FakeVerbs& fake = fake_verbs(MOONCACHE_FAKE_VERBS);
  fake.reset(0);
  const auto message = [](Options options) { return open_fabric(options).status().message; };
  EXPECT_EQ(message(fake_options()), "RDMA unavailable, because this machine has no RDMA device");
  Options absent;
  absent.library = "libnothing-of-this-name.so";
  EXPECT_NE(message(absent).find("libnothing-of-this-name.so cannot be opened"), std::string::npos);
  Options wrong;
  wrong.library = "libc.so.6";
  EXPECT_NE(message(wrong).find("this libibverbs lacks ibv_"), std::string::npos);
  fake.reset(1);
  fake.set_port_active(0, false);
  EXPECT_NE(message(fake_options()).find("fake0:1 is not used, because the port is not active"),
            std::string::npos);
  fake.reset(1);
  Options other = fake_options();
  other.devices = {"mlx5_0"};
  EXPECT_NE(message(other).find("the configuration names other devices"), std::string::npos);
  Options gid = fake_options();
  gid.gid_index = 0;
  EXPECT_NE(message(gid).find("GID 0 is empty"), std::string::npos);
  for (const char* call : {"ibv_get_device_list", "ibv_open_device", "ibv_query_device", "ibv_query_port"}) {
    fake.fail(call, EACCES);
    EXPECT_NE(message(fake_options()).find("Permission denied"), std::string::npos) << call;
  }
  Options retry = fake_options();
  retry.retry_count = 7;
  EXPECT_EQ(open_fabric(retry).code(), Code::kConfigInvalid);
}

TEST(Discovery, EightNicsAndInfiniband) {
  FakeVerbs& fake = fake_verbs(MOONCACHE_FAKE_VERBS);
  fake.reset(8);
  fake.set_infiniband(7);
  auto fabric = open_fabric(fake_options());
  ASSERT_TRUE(fabric) << fabric.status().message;
  ASSERT_EQ((*fabric)->rails().size(), 8u);
  EXPECT_EQ((*fabric)->rails()[7]->info().layer, LinkLayer::kInfiniband);
  EXPECT_EQ((*fabric)->rails()[2]->info().gid_reason, "RoCE v2 over IPv4");
  EXPECT_EQ(gid_text((*fabric)->rails()[2]->info().gid), "10.77.2.1");
  // each rail meets the one of its subnet; InfiniBand meets InfiniBand only
  std::vector<uint32_t> used(8, 0);
  for (size_t i = 0; i < 8; ++i) {
    EndpointAddress peer;
    peer.gid = (*fabric)->rails()[i]->info().gid;
    if (i < 7) peer.gid[15] = std::byte{2};
    peer.layer = (*fabric)->rails()[i]->info().layer;
    EXPECT_EQ(choose_rail((*fabric)->rails(), peer, used), i);
  }
}

}  // namespace
}  // namespace mooncache::testing
