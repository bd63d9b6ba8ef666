// A node hands its cluster map out to every peer that has proved itself, in pages, and says when a peer has
// it.
#include "wire/cluster_map.h"

#include "server/peer.h"

namespace mooncache::testing {
namespace {

ClusterMap map_of(uint64_t epoch, uint32_t nodes) {
  ClusterMap map{4, epoch, {}};
  for (uint32_t i = 0; i < nodes; ++i) {
    MapNode node;
    node.index = i;
    node.node_id = "node-" + std::to_string(i);
    node.unix_path = std::string(200, 'p');
    node.weight = 1.0;
    map.nodes.push_back(std::move(node));
  }
  return map;
}

class ClusterMapTest : public ServerTest {
 protected:
  static std::optional<Reply> ask(Peer& peer, uint64_t term, uint64_t epoch, uint32_t first) {
    Writer meta;
    wire::ClusterMapRequest{term, epoch, first}.encode(meta);
    return peer.call(Opcode::kClusterMap, meta);
  }
  static wire::ClusterMapResponse page(Peer& peer, uint64_t term, uint64_t epoch, uint32_t first) {
    const auto reply = ask(peer, term, epoch, first);
    if (!reply || !reply->status) {
      ADD_FAILURE() << "no page";
      return {};
    }
    Reader in(reply->body);
    auto page = wire::ClusterMapResponse::decode(in);
    EXPECT_TRUE(page);
    return page.value_or(wire::ClusterMapResponse{});
  }
};

TEST_F(ClusterMapTest, BeforeAMasterAnsweredThereIsNone) {
  start();
  Peer peer(*server);
  ASSERT_TRUE(peer.login());
  EXPECT_EQ(ask(peer, 0, 0, 0)->status.code, Code::kMasterUnavailable);
  EXPECT_TRUE(peer.call(Opcode::kPing)->status) << "the connection goes on";
}

TEST_F(ClusterMapTest, EveryTenantGetsItAndWhatIsKnownIsNotSent) {
  start();
  ASSERT_TRUE(server->set_cluster_map(map_of(9, 2)));
  for (const char* tenant : {"default", "team-a"}) {
    Peer peer(*server);
    ASSERT_TRUE(peer.login(tenant));
    const auto all = page(peer, 0, 0, 0);
    EXPECT_EQ(all.nodes, map_of(9, 2).nodes);
    EXPECT_EQ(all.node_count, 2u);
    EXPECT_EQ(all.epoch, 9u);
    EXPECT_TRUE(page(peer, 4, 9, 0).nodes.empty());
    EXPECT_EQ(page(peer, 4, 8, 0).nodes.size(), 2u) << "another map than the peer's";
    EXPECT_EQ(page(peer, 4, 8, 1).first, 0u) << "so its pages begin anew";
    EXPECT_EQ(page(peer, 4, 9, 70'000).nodes.size(), 0u) << "there is no such page";
  }
}

TEST_F(ClusterMapTest, ALargeOneComesInPages) {
  start();
  const ClusterMap map = map_of(1, 4000);
  ASSERT_TRUE(server->set_cluster_map(map));
  Peer peer(*server);
  ASSERT_TRUE(peer.login());
  std::vector<MapNode> nodes = page(peer, 0, 0, 0).nodes;
  int pages = 1;
  for (; nodes.size() < map.nodes.size() && pages < 100; ++pages) {
    const auto more = page(peer, 4, 1, static_cast<uint32_t>(nodes.size()));
    ASSERT_EQ(more.first, nodes.size());
    nodes.insert(nodes.end(), more.nodes.begin(), more.nodes.end());
  }
  EXPECT_EQ(nodes, map.nodes);
  EXPECT_GE(pages, 6);
}

TEST_F(ClusterMapTest, AMapBeyondTheLimitsChangesNothing) {
  start();
  ASSERT_TRUE(server->set_cluster_map(map_of(1, 1)));
  ClusterMap twice = map_of(2, 1);
  twice.nodes.push_back(twice.nodes[0]);
  EXPECT_EQ(server->set_cluster_map(twice).code, Code::kInvalidArgument);
  Peer peer(*server);
  ASSERT_TRUE(peer.login());
  EXPECT_EQ(page(peer, 0, 0, 0).epoch, 1u);
}

TEST_F(ClusterMapTest, AMalformedQuestionEndsTheConnection) {
  start();
  Peer peer(*server);
  ASSERT_TRUE(peer.login());
  Writer meta;
  meta.u64(1);
  EXPECT_EQ(peer.call(Opcode::kClusterMap, meta)->status.code, Code::kProtocolError);
  EXPECT_TRUE(peer.closed_by_node());
}

}  // namespace
}  // namespace mooncache::testing
