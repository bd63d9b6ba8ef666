// The pure parts of following a cluster: which map counts, who is carried over, what is looked for again.
#include "client/map_follower.h"

#include <gtest/gtest.h>

#include "client/absent_keys.h"
#include "client/map_source.h"

namespace mooncache {
namespace {

ClusterMap map_of(uint64_t term, uint64_t epoch, std::initializer_list<const char*> names) {
  ClusterMap map{term, epoch, {}};
  for (const char* name : names) {
    MapNode node;
    node.index = static_cast<uint32_t>(map.nodes.size());
    node.node_id = name;
    node.weight = 1.0;
    map.nodes.push_back(std::move(node));
  }
  return map;
}

std::vector<std::pair<std::string, uint32_t>> listed(const MapFollower& follower) {
  std::vector<std::pair<std::string, uint32_t>> names;
  for (const NodeInfo& node : follower.nodes()) names.emplace_back(node.node_id, node.index);
  return names;
}
using Listed = std::vector<std::pair<std::string, uint32_t>>;

TEST(MapFollowerTest, OnlyNewerMapsCount) {
  MapFollower follower;
  EXPECT_TRUE(follower.hear(map_of(1, 5, {"a"}), 0));
  EXPECT_FALSE(follower.hear(map_of(1, 5, {"a", "b"}), 0));
  EXPECT_FALSE(follower.hear(map_of(1, 4, {}), 0));
  EXPECT_TRUE(follower.hear(map_of(1, 6, {"a", "b"}), 0));
  EXPECT_EQ(listed(follower), (Listed{{"a", 0}, {"b", 1}}));
  EXPECT_TRUE(follower.hear(map_of(1, 7, {}), 0)) << "the master says that they are gone";
  EXPECT_EQ(listed(follower), Listed{});
}

TEST(MapFollowerTest, DeadNodesAreLeftOutAndArenasTold) {
  MapFollower follower;
  ClusterMap map = map_of(1, 1, {"a", "b"});
  map.nodes[0].state = NodeHealth::kDead;
  map.nodes[1].arena = "gpu";
  map.nodes[1].rdma = true;
  ASSERT_TRUE(follower.hear(map, 0));
  const auto nodes = follower.nodes();
  ASSERT_EQ(nodes.size(), 1u);
  EXPECT_EQ(nodes[0].medium, Medium::kHbm);
  EXPECT_FALSE(nodes[0].mappable);
  EXPECT_TRUE(nodes[0].rdma);
}

TEST(MapFollowerTest, ANewMasterDoesNotEmptyTheMap) {
  MapFollower follower;
  ASSERT_TRUE(follower.hear(map_of(1, 5, {"a", "b", "c"}), 1000));
  ASSERT_TRUE(follower.hear(map_of(2, 9, {"b"}), 2000));
  EXPECT_EQ(listed(follower), (Listed{{"b", 0}, {"a", kMapNodesMax}, {"c", kMapNodesMax - 1}}));
  ASSERT_TRUE(follower.hear(map_of(2, 10, {"b", "a"}), 3000));
  EXPECT_EQ(listed(follower), (Listed{{"b", 0}, {"a", 1}, {"c", kMapNodesMax}}));
  EXPECT_FALSE(follower.expire(2000 + MapFollower::kCarryMs - 1));
  EXPECT_TRUE(follower.expire(2000 + MapFollower::kCarryMs));
  EXPECT_FALSE(follower.expire(2000 + MapFollower::kCarryMs));
  EXPECT_EQ(listed(follower), (Listed{{"b", 0}, {"a", 1}}));
}

TEST(MapFollowerTest, AnOlderTermCountsOnlyAfterAWhileWithoutANewerOne) {
  MapFollower follower;
  ASSERT_TRUE(follower.hear(map_of(7, 1, {"a"}), 0));
  EXPECT_FALSE(follower.hear(map_of(6, 9, {"b"}), 0));
  EXPECT_FALSE(follower.hear(map_of(6, 9, {"b"}), MapFollower::kPatienceMs - 1));
  follower.confirm();
  for (const uint64_t now_ms : {20'000u, 25'000u, 30'000u, 34'999u})
    EXPECT_FALSE(follower.hear(map_of(6, 9, {"b"}), now_ms)) << now_ms;
  EXPECT_TRUE(follower.hear(map_of(6, 9, {"b"}), 35'000));
  EXPECT_EQ(follower.term(), 6u);
}

TEST(AbsentKeysTest, PausesGrowWithTheWait) {
  AbsentKeys absent;
  Key key;
  EXPECT_TRUE(absent.due(key, 0));
  absent.remember(key, false, 1000);
  EXPECT_FALSE(absent.due(key, 1000 + AbsentKeys::kPauseMinMs - 1));
  EXPECT_TRUE(absent.due(key, 1000 + AbsentKeys::kPauseMinMs));
  absent.remember(key, false, 5000);
  EXPECT_FALSE(absent.due(key, 5499));
  EXPECT_TRUE(absent.due(key, 5500)) << "an eighth of the time that it has been awaited";
  absent.remember(key, true, 5500);
  EXPECT_TRUE(absent.due(key, 5500));
  absent.remember(key, false, 6000);
  absent.remember(key, false, 6000 + 2 * AbsentKeys::kForgetMs);
  EXPECT_TRUE(absent.due(key, 6000 + 2 * AbsentKeys::kForgetMs + AbsentKeys::kPauseMinMs)) << "a new wait";
}

TEST(SeedTest, AddressesAreTakenApartOrRefused) {
  EXPECT_EQ(seed_of("node.example:7801", 3)->tcp_host, "node.example");
  EXPECT_EQ(seed_of("node.example:7801", 3)->tcp_port, 7801);
  EXPECT_EQ(seed_of("[::1]:80", 0)->tcp_host, "::1");
  EXPECT_EQ(seed_of("unix:/run/n", 0)->unix_path, "/run/n");
  for (const char* text :
       {"", "host", "host:", ":80", "host:0", "host:65536", "host:8x", "unix:run", "[]:80"})
    EXPECT_EQ(seed_of(text, 0).code(), Code::kInvalidArgument) << text;
}

}  // namespace
}  // namespace mooncache
