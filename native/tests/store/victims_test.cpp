// Who makes room for a block that comes up, and who never does.
#include "store/victims.h"

#include <gtest/gtest.h>

#include <vector>

#include "store/disk_fixture.h"

namespace mooncache::test {
namespace {

using store::first_to_go;
using store::Loss;
using Losses = std::vector<Loss>;

TEST(Victims, WhatCostsNothingGoesFirst) {
  EXPECT_EQ(first_to_go(Losses{Loss::kBlock, Loss::kUnderWay, Loss::kNothing, Loss::kNothing}), 2u);
  EXPECT_EQ(first_to_go(Losses{Loss::kNothing, Loss::kNothing}), 0u) << "the coldest one of them";
}

TEST(Victims, WithoutOneTheColdestGoes) {
  EXPECT_EQ(first_to_go(Losses{Loss::kBlock, Loss::kBlock}), 0u);
}

TEST(Victims, ABlockOnItsWayDownNeverGoes) {
  EXPECT_EQ(first_to_go(Losses{Loss::kUnderWay, Loss::kBlock, Loss::kBlock}), 1u);
  EXPECT_FALSE(first_to_go(Losses(100, Loss::kUnderWay)));
  EXPECT_FALSE(first_to_go(Losses{}));
}

TEST(Victims, TheLookIsBounded) {
  Losses coldest(store::kMostLooks, Loss::kBlock);
  coldest.push_back(Loss::kNothing);
  EXPECT_EQ(first_to_go(coldest), 0u) << "what is warmer than all that were looked at stays";
  coldest[0] = Loss::kUnderWay;
  EXPECT_EQ(first_to_go(coldest), 1u);
  Losses busy(store::kMostLooks, Loss::kUnderWay);
  busy.push_back(Loss::kBlock);
  EXPECT_EQ(first_to_go(busy), store::kMostLooks) << "a read is not given up for the bound";
}

TEST(Victims, OfAShardItIsTheColdestEighth) {
  EXPECT_EQ(store::looks_of_shard(0), 1u);
  EXPECT_EQ(store::looks_of_shard(15), 1u);
  EXPECT_EQ(store::looks_of_shard(24), 3u);
  EXPECT_EQ(store::looks_of_shard(1'000'000), store::kMostLooksOfShard);
}

class VictimsOnTheirWayTest : public DiskTest {};

TEST_F(VictimsOnTheirWayTest, ADiskTellsWhatIsBeingWritten) {
  faulty_ = true;
  ASSERT_TRUE(open());
  faults_->stalled = true;
  memory_->offer(1, 50'000);
  ASSERT_TRUE(memory_->wait_for([&] { return device_->is_being_written(kTenant, key_of(1)); }));
  EXPECT_FALSE(device_->find(kTenant, key_of(1))) << "it cannot be read yet";
  EXPECT_FALSE(device_->is_being_written(kTenant, key_of(2)));
  faults_->stalled = false;
  ASSERT_TRUE(memory_->wait_written(1));
  EXPECT_FALSE(device_->is_being_written(kTenant, key_of(1)));
  EXPECT_TRUE(device_->find(kTenant, key_of(1)));
}

}  // namespace
}  // namespace mooncache::test
