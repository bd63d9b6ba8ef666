#include "net/resolver.h"

#include <gtest/gtest.h>
#include <poll.h>

#include "net/fake_names.h"

namespace mooncache::net {
namespace {

using mooncache::testing::FakeNames;

FakeNames& names() {
  return FakeNames::get();
}

bool ends(const Lookup& lookup) {
  return lookup.done() || wait_ready(lookup.fd(), POLLIN, -1, Deadline::after_ms(10'000)).is_ok();
}

std::string slow(int number) {
  return "slow-" + std::to_string(number) + ".fake";
}

class ResolverTest : public ::testing::Test {
 protected:
  void TearDown() override {
    names().open(true);
    ASSERT_TRUE(names().wait_for_waiting(0));
    names().open(false);
  }
};

TEST_F(ResolverTest, ANumericAddressIsThereAtOnce) {
  for (const char* host : {"127.0.0.1", "::1"}) {
    const auto lookup = look_up(host, 4711);
    ASSERT_TRUE(lookup->done());
    EXPECT_EQ(lookup->fd(), -1);
    ASSERT_TRUE(lookup->addresses()) << lookup->addresses().status().message;
    EXPECT_EQ(lookup->addresses()->size(), 1u);
  }
}

TEST_F(ResolverTest, ANameKeepsNobodyWaiting) {
  const auto first = look_up("slow.fake", 80);
  const auto second = look_up("slow.fake", 80);
  EXPECT_EQ(first, second) << "one lookup for all who ask at the same time";
  ASSERT_TRUE(names().wait_for_waiting(1));
  EXPECT_FALSE(first->done());
  EXPECT_EQ(look_up("slow.fake", 80), first) << "also when it runs already";
  const auto other = look_up("quick.fake", 80);
  EXPECT_TRUE(ends(*other));
  names().open(true);
  ASSERT_TRUE(ends(*first));
  ASSERT_TRUE(first->addresses());
  const auto& address = first->addresses()->front();
  ASSERT_EQ(address.family(), AF_INET);
  const auto* inet = static_cast<const sockaddr_in*>(static_cast<const void*>(address.get()));
  EXPECT_EQ(ntohs(inet->sin_port), 80);
  EXPECT_EQ(ntohl(inet->sin_addr.s_addr), INADDR_LOOPBACK);
}

TEST_F(ResolverTest, ThreadsAreFewAndWhoGaveUpIsNotAskedFor) {
  std::vector<std::shared_ptr<Lookup>> lookups;
  for (int i = 0; i < kResolverThreads; ++i) lookups.push_back(look_up(slow(i), 80));
  ASSERT_TRUE(names().wait_for_waiting(kResolverThreads));
  const auto kept = look_up("slow-kept.fake", 80);
  look_up("slow-dropped.fake", 80).reset();
  names().open(true);
  ASSERT_TRUE(ends(*kept));
  for (const auto& lookup : lookups) EXPECT_TRUE(ends(*lookup));
  EXPECT_EQ(names().asked("slow-kept.fake"), 1);
  EXPECT_EQ(names().asked("slow-dropped.fake"), 0);
}

TEST_F(ResolverTest, ConnectingEndsAtItsDeadlineWhileTheResolverHangs) {
  // Keeps the lookup, so that a thread of the resolver that begins late takes it as well.
  const auto lookup = look_up("slow.fake", 1);
  ASSERT_TRUE(names().wait_for_waiting(1));
  const auto fd = connect_tcp("slow.fake", 1, Deadline::after_ms(20));
  EXPECT_EQ(fd.code(), Code::kDeadlineExceeded);
  EXPECT_FALSE(lookup->done()) << "the name is still being looked up";
}

}  // namespace
}  // namespace mooncache::net
