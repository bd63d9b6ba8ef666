// CLUSTER_MAP's messages: what is written is read, what a later version adds is passed over, all else is
// refused.
#include "wire/cluster_map.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>

namespace mooncache::wire {
namespace {

MapNode some_node(uint32_t index) {
  MapNode node;
  node.index = index;
  node.incarnation = 7;
  node.state = NodeHealth::kDraining;
  node.rdma = true;
  node.node_id = "node-" + std::to_string(index);
  node.host_id = "host";
  node.tcp_host = "10.0.0.1";
  node.tcp_port = 7801;
  node.unix_path = "/run/node";
  node.arena = "dax";
  node.free_bytes = 1ull << 40;
  node.weight = 0.25;
  node.labels = {{"rack", "r1"}, {"zone", "a"}};
  return node;
}

std::vector<std::byte> page_bytes(const ClusterMapResponse& page) {
  Writer out;
  page.encode(out);
  return out.take();
}

std::optional<ClusterMapResponse> read(std::span<const std::byte> bytes) {
  Reader in(bytes);
  return ClusterMapResponse::decode(in);
}

TEST(ClusterMapMessages, RoundTrip) {
  Writer out;
  ClusterMapRequest{3, 4, 5}.encode(out);
  const auto request = ClusterMapRequest::decode(out.view());
  ASSERT_TRUE(request);
  EXPECT_EQ(request->known_term, 3u);
  EXPECT_EQ(request->known_epoch, 4u);
  EXPECT_EQ(request->first, 5u);
  const auto page = read(page_bytes({1, 2, 10, 6, {some_node(6), some_node(8)}}));
  ASSERT_TRUE(page);
  EXPECT_EQ(page->term, 1u);
  EXPECT_EQ(page->epoch, 2u);
  EXPECT_EQ(page->node_count, 10u);
  EXPECT_EQ(page->first, 6u);
  EXPECT_EQ(page->nodes, (std::vector{some_node(6), some_node(8)}));
}

TEST(ClusterMapMessages, WhatALaterVersionAddsIsPassedOver) {
  Writer node;
  encode_map_node(node, some_node(6));
  auto record = node.take();
  const auto longer = static_cast<uint16_t>(record.size() - 2 + 5);
  std::memcpy(record.data(), &longer, 2);
  record.resize(record.size() + 5, std::byte{0xee});
  record[2 + 12] = std::byte{9};  // a state that is not known here
  Writer out;
  out.u64(1);
  out.u64(2);
  for (const uint32_t number : {1u, 0u, 1u}) out.u32(number);
  out.raw(record);
  const auto page = read(out.view());
  ASSERT_TRUE(page);
  MapNode expected = some_node(6);
  expected.state = NodeHealth::kSuspect;
  EXPECT_EQ(page->nodes, std::vector{expected});
}

TEST(ClusterMapMessages, MalformedPagesAreRefused) {
  const auto good = page_bytes({1, 2, 2, 0, {some_node(0), some_node(1)}});
  for (size_t size = 0; size < good.size(); ++size) EXPECT_FALSE(read(std::span(good).first(size))) << size;
  auto more = good;
  more.push_back(std::byte{0});
  EXPECT_FALSE(read(more)) << "a byte behind the page";
  EXPECT_FALSE(read(page_bytes({1, 2, 2, 1, {some_node(0), some_node(1)}}))) << "more nodes than the map has";
  EXPECT_FALSE(read(page_bytes({1, 2, kMapNodesMax + 1, 0, {}})));
  for (const double weight :
       {-1.0, std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    MapNode node = some_node(0);
    node.weight = weight;
    EXPECT_FALSE(read(page_bytes({1, 2, 1, 0, {node}}))) << weight;
  }
  MapNode far = some_node(kMapNodesMax);
  EXPECT_FALSE(read(page_bytes({1, 2, 1, 0, {far}})));
  MapNode wordy = some_node(0);
  wordy.tcp_host.assign(kMapTextBytesMax + 1, 'a');
  EXPECT_FALSE(read(page_bytes({1, 2, 1, 0, {wordy}})));
  MapNode labelled = some_node(0);
  labelled.labels.assign(kMapLabelsMax + 1, {"a", "b"});
  EXPECT_FALSE(read(page_bytes({1, 2, 1, 0, {labelled}})));
  Writer many;
  many.u64(1);
  many.u64(2);
  for (const uint32_t number : {5000u, 0u, 5000u}) many.u32(number);
  EXPECT_FALSE(read(many.view())) << "more records than a page may have";
}

TEST(ClusterMapMessages, AnyDamageIsReadOrRefused) {
  const auto good = page_bytes({1, 2, 2, 0, {some_node(0), some_node(1)}});
  std::mt19937_64 random(1);
  for (int i = 0; i < 20'000; ++i) {
    auto bytes = good;
    for (uint64_t flips = 1 + random() % 3; flips > 0; --flips)
      bytes[random() % bytes.size()] = static_cast<std::byte>(random());
    if (const auto page = read(bytes)) {
      for (const MapNode& node : page->nodes) EXPECT_TRUE(map_valid({1, 1, {node}}));
    }
  }
}

TEST(ClusterMapMessages, AMapWithANodeTwiceIsNone) {
  EXPECT_TRUE(map_valid({1, 1, {some_node(0), some_node(1)}}));
  EXPECT_FALSE(map_valid({1, 1, {some_node(1), some_node(1)}}));
}

}  // namespace
}  // namespace mooncache::wire
