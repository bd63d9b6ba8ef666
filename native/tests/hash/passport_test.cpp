#include "mooncache/passport.h"

#include <gtest/gtest.h>

#include <cstring>
#include <set>

#include "mooncache/bytes.h"

namespace mooncache {
namespace {

Digest root_of(std::vector<PassportField> fields) {
  return passport_root(fields).value();
}

TEST(Passport, OrderOfFieldsDoesNotMatter) {
  EXPECT_EQ(root_of({{"a", "1"}, {"b", "2"}}), root_of({{"b", "2"}, {"a", "1"}}));
}

TEST(Passport, NoTwoSetsOfFieldsLookAlike) {
  const std::set<Digest> roots = {root_of({{"a", "1"}}),
                                  root_of({{"a", "2"}}),
                                  root_of({{"b", "1"}}),
                                  root_of({{"a1", ""}}),
                                  root_of({{"a", "1"}, {"b", ""}}),
                                  root_of({{"a", ""}, {"b", "1"}}),
                                  root_of({{"a", std::string("1\0", 2)}})};
  EXPECT_EQ(roots.size(), 7u);
}

TEST(Passport, EncodingIsTheDocumentedOne) {
  const auto encoding = passport_encoding(std::vector<PassportField>{{"tp", "1"}, {"kv", "bf16"}}).value();
  Writer expected;
  expected.u32(1);
  expected.u32(2);
  for (const std::string_view text : {"kv", "bf16", "tp", "1"}) {
    expected.u32(static_cast<uint32_t>(text.size()));
    expected.raw(std::as_bytes(std::span(text)));
  }
  EXPECT_EQ(encoding, expected.take());
}

TEST(Passport, BadFieldsAreRefused) {
  const auto code = [](std::vector<PassportField> fields) { return passport_root(fields).code(); };
  EXPECT_EQ(code({}), Code::kInvalidArgument);
  EXPECT_EQ(code({{"", "x"}}), Code::kInvalidArgument);
  EXPECT_EQ(code({{"a", "x"}, {"a", "x"}}), Code::kInvalidArgument);
  EXPECT_EQ(code({{"a", std::string(kPassportTextBytesMax + 1, 'x')}}), Code::kTooLarge);
  std::vector<PassportField> many;
  for (size_t i = 0; i <= kPassportFieldsMax; ++i) many.push_back({std::to_string(i), ""});
  EXPECT_EQ(code(many), Code::kTooLarge);
}

TEST(ChainKeys, AKeyNamesItsBlockAndAllBefore) {
  const Digest root = root_of({{"model", "m"}});
  std::vector<uint32_t> tokens(70);
  for (uint32_t i = 0; i < tokens.size(); ++i) tokens[i] = i * 1000;
  const auto keys = chain_keys(root, tokens, 16).value();
  ASSERT_EQ(keys.size(), 4u) << "six tokens fill no block";

  std::vector<std::byte> input(32 + 64);
  std::memcpy(input.data() + 32, tokens.data(), 64);
  EXPECT_EQ(keys[0].bytes, blake3_keyed(root, input));
  std::memcpy(input.data(), keys[0].bytes.data(), 32);
  std::memcpy(input.data() + 32, tokens.data() + 16, 64);
  EXPECT_EQ(keys[1].bytes, blake3_keyed(root, input));

  auto changed = tokens;
  changed[20] += 1;
  const auto other = chain_keys(root, changed, 16).value();
  EXPECT_EQ(other[0], keys[0]);
  for (size_t i = 1; i < 4; ++i) EXPECT_NE(other[i], keys[i]);
  EXPECT_NE(chain_keys(root_of({{"model", "n"}}), tokens, 16).value()[0], keys[0]);
}

TEST(ChainKeys, AChainCanBeContinued) {
  const Digest root = root_of({{"model", "m"}});
  std::vector<uint32_t> tokens(64);
  for (uint32_t i = 0; i < tokens.size(); ++i) tokens[i] = i;
  const auto whole = chain_keys(root, tokens, 16).value();
  const auto rest = chain_keys(root, std::span(tokens).subspan(32), 16, whole[1]).value();
  EXPECT_EQ(rest, std::vector<Key>(whole.begin() + 2, whole.end()));
}

TEST(ChainKeys, SizesAreChecked) {
  const std::vector<uint32_t> tokens(8);
  EXPECT_EQ(chain_keys({}, tokens, 0).code(), Code::kInvalidArgument);
  EXPECT_EQ(chain_keys({}, tokens, kBlockTokensMax + 1).code(), Code::kInvalidArgument);
  EXPECT_TRUE(chain_keys({}, {}, 16).value().empty());
}

TEST(Names, AreStable) {
  EXPECT_NE(key_of_name("a"), key_of_name("b"));
  EXPECT_EQ(key_of_name("a"), key_of_name("a"));
  // first 8 bytes of BLAKE3("") = af 13 49 b9 f5 f9 a1 a6, little endian
  EXPECT_EQ(tenant_id_of(""), 0xa6a1f9f5b94913afu);
}

}  // namespace
}  // namespace mooncache
