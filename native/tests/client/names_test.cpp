// Nodes that the cluster map calls by host names.
#include "client/pool.h"
#include "net/fake_names.h"

namespace mooncache::testing {
namespace {

class NamesTest : public ::testing::Test {
 protected:
  NamesTest() {
    for (uint32_t i = 0; i < 2; ++i) {
      nodes_.push_back(std::make_unique<TestNode>(i, 64 << 20, "host-" + std::to_string(i), false));
      infos_.push_back(nodes_[i]->info);
    }
    const auto writer = client_for(infos_, client_config(false));
    for (uint64_t k = 0; k < 16; ++k) {
      EXPECT_EQ(put_one(*writer, key_of(k), bytes_of(k, 1000)).code, Code::kOk);
      (place(key_of(k), infos_, "", 1)[0] == 0 ? of_named_ : of_other_).push_back(k);
    }
    EXPECT_FALSE(of_named_.empty());
    EXPECT_FALSE(of_other_.empty());
    infos_[0].tcp_host = "slow.fake";
  }
  ~NamesTest() override {
    FakeNames::get().open(true);
    EXPECT_TRUE(FakeNames::get().wait_for_waiting(0));
    FakeNames::get().open(false);
  }

  // The codes of all blocks, in one call.
  std::vector<Code> get_all(Client& client, int deadline_ms) {
    std::vector<std::vector<std::byte>> copies(16, std::vector<std::byte>(1000));
    std::vector<Slice> slices;
    for (auto& copy : copies) slices.push_back({copy.data(), copy.size()});
    std::vector<GetBlock> blocks;
    for (uint64_t k = 0; k < 16; ++k) blocks.push_back({key_of(k), std::span(&slices[k], 1), 0});
    std::vector<GetOutcome> outcomes(16);
    CallOptions options;
    options.deadline = Deadline::after_ms(deadline_ms);
    (void)client.get(blocks, {}, options, outcomes);
    std::vector<Code> codes;
    for (const GetOutcome& outcome : outcomes) codes.push_back(outcome.code);
    return codes;
  }

  std::vector<std::unique_ptr<TestNode>> nodes_;
  std::vector<NodeInfo> infos_;
  std::vector<uint64_t> of_named_, of_other_;
};

TEST_F(NamesTest, ANameThatIsNotResolvedCostsOnlyItsOwnBlocks) {
  ClientConfig config = client_config(false);
  config.connect_timeout_ms = 60'000;
  const auto client = client_for(infos_, config);
  const std::vector<Code> codes = get_all(*client, 2000);
  ASSERT_TRUE(FakeNames::get().wait_for_waiting(1)) << "the call ended before the resolver did";
  for (const uint64_t k : of_other_) EXPECT_EQ(codes[k], Code::kOk);
  for (const uint64_t k : of_named_) EXPECT_NE(codes[k], Code::kOk);
  FakeNames::get().open(true);
  for (const Code code : get_all(*client, 20'000)) EXPECT_EQ(code, Code::kOk);
}

TEST_F(NamesTest, ANodeWhoseNameIsNotResolvedIsGivenUpByName) {
  ClientConfig config = client_config(false);
  config.connect_timeout_ms = 20;
  const auto client = client_for({infos_[0]}, config);
  const Status status = client->ping(infos_[0].index, {}).status();
  EXPECT_EQ(status.code, Code::kNodeUnavailable) << status.message;
  // The resolver's thread may not even have begun: a lookup without a caller is dropped then.
  EXPECT_NE(status.message.find("slow.fake"), std::string::npos) << status.message;
  EXPECT_NE(status.message.find("not resolved in time"), std::string::npos) << status.message;
}

}  // namespace
}  // namespace mooncache::testing
