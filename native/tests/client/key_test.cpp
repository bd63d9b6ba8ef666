// A client's key is replaced while it works: it goes over to the new one before the old one is withdrawn.
#include "client/pool.h"

namespace mooncache::testing {
namespace {

std::array<std::byte, 32> next_secret() {
  std::array<std::byte, 32> bytes;
  bytes.fill(std::byte{9});
  return bytes;
}

class ClientKey : public ::testing::TestWithParam<bool> {};

TEST_P(ClientKey, LanesGoOverToTheNewKeyAndNoCallFails) {
  TestNode node(1);
  const std::vector<std::byte> block = bytes_of(1, 100'000);
  std::vector<std::byte> got(block.size());
  auto client = client_for({node.info}, client_config(GetParam()));
  ASSERT_EQ(put_one(*client, key_of(1), block).code, Code::kOk);
  ASSERT_TRUE(node.server->set_secrets({secret(), next_secret()}));
  ASSERT_EQ(get_one(*client, key_of(1), got).code, Code::kOk) << "the old key is good as long as both are";
  EXPECT_GT(node.server->secret_uses()[0].connections, 0u);

  client->set_key(wire::tenant_key(next_secret(), "default"));
  ASSERT_EQ(get_one(*client, key_of(1), got).code, Code::kOk);
  EXPECT_GT(node.server->secret_uses()[1].connections, 0u);
  EXPECT_TRUE(eventually([&] { return node.server->secret_uses()[0].connections == 0; }));

  ASSERT_TRUE(node.server->set_secrets({next_secret()}));
  ASSERT_EQ(get_one(*client, key_of(1), got).code, Code::kOk);
  EXPECT_EQ(got, block);
  auto late = client_for({node.info}, client_config(GetParam()));
  EXPECT_EQ(get_one(*late, key_of(1), got).code, Code::kUnauthenticated) << "it still has the old key";
}

INSTANTIATE_TEST_SUITE_P(SharedMemoryAndTcp, ClientKey, ::testing::Bool());

}  // namespace
}  // namespace mooncache::testing
