#include <gtest/gtest.h>

#include "mooncache/transport.h"
#include "wire/messages.h"

namespace mooncache {
namespace {

const std::string kHex(64, '7');

TEST(Token, ClusterTokenActsForTheDefaultTenant) {
  const auto credentials = credentials_from_token("mcc1." + kHex + "\n");
  ASSERT_TRUE(credentials) << credentials.status().message;
  wire::Bytes32 secret;
  secret.fill(std::byte{0x77});
  EXPECT_EQ(credentials->tenant, "default");
  EXPECT_EQ(credentials->key, wire::tenant_key(secret, "default"));
}

TEST(Token, TenantTokenNamesItsTenant) {
  const auto credentials = credentials_from_token("mct1.team-a.b." + kHex);
  ASSERT_TRUE(credentials) << credentials.status().message;
  EXPECT_EQ(credentials->tenant, "team-a.b");
  EXPECT_EQ(credentials->key[31], std::byte{0x77});
}

TEST(Token, SessionTokenSaysWhenItEnds) {
  const auto credentials = credentials_from_token("mcs1.team-a.b.1800000000." + kHex);
  ASSERT_TRUE(credentials) << credentials.status().message;
  EXPECT_EQ(credentials->tenant, "team-a.b");
  EXPECT_EQ(credentials->expires_unix_s, 1'800'000'000u);
}

TEST(Token, WhatIsNoTokenIsRefusedWithoutBeingRepeated) {
  for (const std::string& bad :
       {std::string(), std::string("mcc1."), "mcc1.x" + kHex, "mct1.." + kHex, "mct1." + kHex,
        "mct1.Bad Name." + kHex, "mcc2." + kHex, "mcs1.a." + kHex, "mcs1.a.0." + kHex, "mcs1.a.-1." + kHex,
        "mcs1.a.99999999999999999999." + kHex, "mcs1.a.5x." + kHex, "mcc1." + std::string(64, 'g')}) {
    const auto refused = credentials_from_token(bad);
    EXPECT_EQ(refused.code(), Code::kUnauthenticated) << bad;
    EXPECT_EQ(refused.status().message.find(kHex), std::string::npos);
  }
}

}  // namespace
}  // namespace mooncache
