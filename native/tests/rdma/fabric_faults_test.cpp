// What a device answers when it is ill: each call with each errno, reports that are doubled, invented or
// late.
#include <gtest/gtest.h>
#include <poll.h>

#include <functional>
#include <set>
#include <thread>

#include "rdma/pair.h"

namespace mooncache::testing {
namespace {

constexpr int kMtu1024 = 3, kMtu4096 = 5;  // as verbs number them
constexpr int kErrors[] = {ENOMEM, EAGAIN, EIO, EINVAL, EPERM, ENODEV, EOPNOTSUPP, EBUSY};

class FabricFaults : public FabricTest {
 protected:
  static constexpr size_t kBytes = 4096;
  void connect(Rail& near, Rail& far) {
    ASSERT_TRUE(pair_.connect(near, far));
    local_ = std::move(*pair_.near_domain->attach(slice(mine_)));
    exposed_ = std::move(*pair_.far_domain->expose(slice(theirs_), true));
  }
  void connect() { connect(rail(), rail()); }
  void disconnect() {
    local_.reset();
    exposed_.reset();
    pair_ = {};
    fabric_.reset();
  }
  void TearDown() override {
    disconnect();
    FabricTest::TearDown();
  }
  size_t write(size_t count, size_t length = kBytes) {
    std::vector<Post> posts;
    for (size_t i = 0; i < count; ++i)
      posts.push_back(post(true, std::span(mine_).first(length), *local_, *exposed_, next_id_++));
    return pair_.near->post(posts);
  }
  static void wait_until(const std::function<bool()>& done) {
    for (int i = 0; i < 2000 && !done(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    EXPECT_TRUE(done());
  }
  Pair pair_;
  std::vector<std::byte> mine_ = std::vector<std::byte>(kBytes, std::byte{1});
  std::vector<std::byte> theirs_ = std::vector<std::byte>(kBytes, std::byte{2});
  std::unique_ptr<Registration> local_, exposed_;
  uint64_t next_id_ = 1;
};

TEST_F(FabricFaults, WithoutAnAddressAPortIsNotUsed) {
  for (const int error : kErrors) {
    fake().fail("ibv_query_gid_ex", error, -1);
    const auto opened = open_fabric(options_);
    EXPECT_EQ(opened.code(), Code::kTransportUnavailable) << error;
    EXPECT_NE(opened.status().message.find("fake0:1 is not used, because "), std::string::npos);
    fake().reset(1);
  }
  EXPECT_TRUE(open_fabric(options_));
}

TEST_F(FabricFaults, PostingAndPollingFailWithEveryReason) {
  for (const char* call : {"post_send", "poll_cq"}) {
    const bool posting = std::string(call) == "post_send";
    for (const int error : kErrors) {
      connect();
      fake().fail(call, error, 1, posting ? 2 : 0);
      const size_t taken = write(5);
      EXPECT_EQ(taken, posting ? 2u : 5u) << call << error;
      EXPECT_EQ(reap(*pair_.near, taken).size(), taken) << call << error;
      EXPECT_TRUE(pair_.near->failed()) << call << error;
      EXPECT_EQ(write(1), 0u) << "nothing is posted on a queue pair that failed";
      disconnect();
      fake().reset(1);
    }
  }
}

TEST_F(FabricFaults, ADescriptorThatCannotBeArmedIsAFailure) {
  for (const int error : kErrors) {
    connect();
    EXPECT_EQ(write(3), 3u);
    fake().fail("req_notify_cq", error);
    pair_.near->arm();
    EXPECT_TRUE(pair_.near->failed()) << error;
    EXPECT_EQ(reap(*pair_.near, 3).size(), 3u) << "what was posted comes back all the same";
    disconnect();
    fake().reset(1);
  }
}

TEST_F(FabricFaults, AWakeUpThatCannotBeReadLosesNoReport) {
  fake().set_latency_us(0, 5'000);
  for (const int error : kErrors) {
    connect();
    for (int round = 0; round < 2; ++round) {
      pair_.near->arm();
      EXPECT_EQ(write(1), 1u);
      pollfd watched{pair_.near->fd(), POLLIN, 0};
      EXPECT_EQ(::poll(&watched, 1, 10'000), 1) << error;
      fake().fail("ibv_get_cq_event", error);
      pair_.near->arm();
      EXPECT_EQ(reap(*pair_.near, 1).size(), 1u) << error;
    }
    EXPECT_FALSE(pair_.near->failed());
    disconnect();
  }
}

TEST_F(FabricFaults, ADeviceWhoseEventsCannotBeReadIsGone) {
  for (const int error : kErrors) {
    Rail& one = rail();
    fake().fail("ibv_get_async_event", error);
    fake().set_port_active(0, false);
    // EAGAIN only says that there is nothing yet: the event is read at the next look.
    wait_until([&] { return !one.up(); });
    fake().set_port_active(0, true);
    if (error == EAGAIN) {
      wait_until([&] { return one.up(); });
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      EXPECT_FALSE(one.up()) << error;
    }
    fabric_.reset();
    fake().reset(1);
  }
}

TEST_F(FabricFaults, WhatCannotBeDestroyedStopsNobody) {
  for (const char* call : {"ibv_dereg_mr", "ibv_destroy_qp", "ibv_destroy_cq", "ibv_destroy_comp_channel",
                           "ibv_dealloc_pd", "ibv_close_device"}) {
    for (const int error : kErrors) {
      connect();
      EXPECT_EQ(write(2), 2u);
      EXPECT_EQ(reap(*pair_.near, 2).size(), 2u);
      fake().fail(call, error, -1);
      disconnect();
      EXPECT_EQ(fake().live_objects(), 0u) << call << error;
      fake().reset(1);
    }
  }
  connect();
  EXPECT_EQ(write(1), 1u);
  EXPECT_EQ(reap(*pair_.near, 1).at(0).outcome, WorkOutcome::kDone);
}

TEST_F(FabricFaults, AReportThatComesTwiceCountsOnce) {
  connect();
  fake().repeat_report();
  ASSERT_EQ(write(8), 8u);
  std::set<uint64_t> ids;
  for (const Reaped& one : reap(*pair_.near, 8)) {
    EXPECT_EQ(one.outcome, WorkOutcome::kDone);
    EXPECT_TRUE(ids.insert(one.id).second) << one.id;
  }
  EXPECT_EQ(ids.size(), 8u);
  EXPECT_EQ(pair_.near->outstanding(), 0u);
}

TEST_F(FabricFaults, AReportAboutNothingIsNobodysAndTheDeviceIsNotTrusted) {
  for (const uint64_t id : {uint64_t{8}, uint64_t{9}, uint64_t{1} << 40, UINT64_MAX}) {
    connect();
    fake().invent_report(id);
    ASSERT_EQ(write(8), 8u);
    std::set<uint64_t> ids;
    for (const Reaped& one : reap(*pair_.near, 8)) EXPECT_TRUE(ids.insert(one.id).second) << one.id;
    EXPECT_EQ(ids.size(), 8u);
    EXPECT_TRUE(pair_.near->failed()) << id;
    EXPECT_EQ(write(1), 0u);
    disconnect();
  }
}

TEST_F(FabricFaults, ReportsThatComeAfterTheStopAreHandedOut) {
  connect();
  ASSERT_EQ(write(4), 4u);
  wait_until([] { return fake().requests(0) == 4; });
  pair_.near->stop();  // they are through, and nobody has looked yet
  auto done = reap(*pair_.near, 4);
  ASSERT_EQ(done.size(), 4u);
  for (const Reaped& one : done) EXPECT_EQ(one.outcome, WorkOutcome::kDone);
  disconnect();

  std::fill(theirs_.begin(), theirs_.end(), std::byte{2});
  connect();
  fake().hang(0, true);
  ASSERT_EQ(write(4), 4u);
  pair_.near->stop();
  std::array<Reaped, 4> none;
  EXPECT_EQ(pair_.near->poll(none), 0u);
  EXPECT_EQ(pair_.near->outstanding(), 4u) << "the device may still work on them";
  fake().hang(0, false);
  done = reap(*pair_.near, 4);
  ASSERT_EQ(done.size(), 4u);
  for (const Reaped& one : done) EXPECT_EQ(one.outcome, WorkOutcome::kFlushed);
  EXPECT_EQ(theirs_[0], std::byte{2});
}

TEST_F(FabricFaults, OfTwoPortsTheSmallerPacketsAreTaken) {
  fake().reset(2);
  fake().set_mtu(0, kMtu4096);
  fake().set_mtu(1, kMtu1024);
  for (const auto& [near, far] : {std::pair{0u, 1u}, std::pair{1u, 0u}, std::pair{0u, 0u}}) {
    connect(rail(near), rail(far));
    const int expected = near == far ? kMtu4096 : kMtu1024;
    EXPECT_EQ(fake().path_mtu(near), expected);
    EXPECT_EQ(fake().path_mtu(far), expected);
    EXPECT_EQ(rail(1).info().mtu, kMtu1024);
    EXPECT_EQ(write(2), 2u);
    EXPECT_EQ(reap(*pair_.near, 2).size(), 2u);
    EXPECT_TRUE(mine_ == theirs_);
    disconnect();
  }
}

TEST_F(FabricFaults, ASmallWriteLeavesItsMemoryWhenItIsPosted) {
  fake().set_latency_us(0, 30'000);
  connect();
  for (const size_t length : {size_t{1}, size_t{64}, size_t{65}}) {
    std::fill(mine_.begin(), mine_.end(), std::byte{5});
    std::fill(theirs_.begin(), theirs_.end(), std::byte{2});
    ASSERT_EQ(write(1, length), 1u);
    std::fill(mine_.begin(), mine_.end(), std::byte{6});  // in the request by then, or only pointed to
    EXPECT_EQ(reap(*pair_.near, 1).at(0).outcome, WorkOutcome::kDone);
    const auto landed = length <= 64 ? std::byte{5} : std::byte{6};
    for (size_t i = 0; i < kBytes; ++i) ASSERT_EQ(theirs_[i], i < length ? landed : std::byte{2}) << i;
  }
}

}  // namespace
}  // namespace mooncache::testing
