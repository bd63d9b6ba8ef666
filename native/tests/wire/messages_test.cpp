#include "wire/messages.h"

#include <gtest/gtest.h>

#include <random>

#include "wire/frame.h"

namespace mooncache::wire {
namespace {

Key key_of(uint8_t value) {
  Key key;
  key.bytes.fill(std::byte{value});
  return key;
}

TEST(Frame, HeaderRoundTripsAndCoversMeta) {
  Writer meta;
  meta.str16("hello");
  const FrameHeader sent{Opcode::kPut, true, kFlagWhole, 42, 1000, 0, 0};
  const HeaderBytes bytes = encode_header(sent, meta.view());
  const auto got = decode_header(bytes);
  ASSERT_TRUE(got) << got.status().message;
  EXPECT_EQ(got->opcode, Opcode::kPut);
  EXPECT_TRUE(got->response);
  EXPECT_EQ(got->flags, kFlagWhole);
  EXPECT_EQ(got->request_id, 42u);
  EXPECT_EQ(got->payload_bytes, 1000u);
  EXPECT_EQ(got->meta_bytes, meta.size());
  EXPECT_TRUE(verify_check(bytes, meta.view()));
}

TEST(Frame, EveryFlippedBitIsSeen) {
  Writer meta;
  meta.u64(0x1122334455667788);
  const HeaderBytes good = encode_header({Opcode::kGet, false, 0, 7, 0, 0, 0}, meta.view());
  for (size_t bit = 0; bit < kHeaderBytes * 8; ++bit) {
    HeaderBytes bad = good;
    bad[bit / 8] ^= std::byte{1} << (bit % 8);
    EXPECT_FALSE(decode_header(bad) && verify_check(bad, meta.view())) << "header bit " << bit;
  }
  for (size_t bit = 0; bit < meta.size() * 8; ++bit) {
    auto bytes = meta.bytes();
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
    EXPECT_FALSE(verify_check(good, bytes)) << "meta bit " << bit;
  }
}

TEST(Frame, LimitsAndVersionAreNamed) {
  HeaderBytes bytes = encode_header({Opcode::kPing, false, 0, 1, 0, 0, 0}, {});
  bytes[4] = std::byte{9};
  EXPECT_EQ(decode_header(bytes).code(), Code::kVersionSkew);
  EXPECT_NE(decode_header(bytes).status().message.find("version 9"), std::string::npos);
  bytes = encode_header({Opcode::kPing, false, 0, 1, kMaxPayloadBytes + 1, 0, 0}, {});
  EXPECT_EQ(decode_header(bytes).code(), Code::kProtocolError);
}

TEST(Messages, RequestsRoundTrip) {
  Writer out;
  HelloRequest hello;
  hello.flags = HelloRequest::kFlagAdmin;
  hello.pid = 17;
  hello.client_nonce.fill(std::byte{3});
  hello.tenant = "team-a";
  hello.client_name = "bench";
  hello.software_version = "0.1.0";
  hello.encode(out);
  const auto got = HelloRequest::decode(out.view());
  ASSERT_TRUE(got);
  EXPECT_EQ(got->tenant, "team-a");
  EXPECT_EQ(got->pid, 17u);
  EXPECT_EQ(got->client_nonce, hello.client_nonce);

  Writer reserve_out;
  ReserveRequest reserve{250, {{key_of(1), 4096}, {key_of(2), 0}}};
  reserve.encode(reserve_out);
  const auto reserved = ReserveRequest::decode(reserve_out.view());
  ASSERT_TRUE(reserved);
  EXPECT_EQ(reserved->wait_ms, 250u);
  ASSERT_EQ(reserved->items.size(), 2u);
  EXPECT_EQ(reserved->items[0].size, 4096u);
  EXPECT_EQ(reserved->items[1].key, key_of(2));
}

TEST(Messages, AHelloMaySayWhoWrites) {
  HelloRequest hello;
  hello.tenant = "team-a";
  hello.flags = HelloRequest::kFlagExpires | HelloRequest::kFlagWriter;
  hello.expires_unix_s = 5;
  hello.writer = {77, "vllm-7", std::string(kMaxWriterTextBytes, 'v'), 9};
  Writer out;
  hello.encode(out);
  const auto got = HelloRequest::decode(out.view());
  ASSERT_TRUE(got);
  EXPECT_EQ(got->writer.id, 77u);
  EXPECT_EQ(got->writer.instance, "vllm-7");
  EXPECT_EQ(got->writer.build, hello.writer.build);
  EXPECT_EQ(got->writer.started_unix_s, 9u);
  for (size_t cut = out.view().size() - 90; cut < out.view().size(); ++cut)
    EXPECT_FALSE(HelloRequest::decode(out.view().first(cut))) << cut;

  hello.writer.instance = "a\n\x1b[31m\xff";
  Writer odd;
  hello.encode(odd);
  EXPECT_EQ(HelloRequest::decode(odd.view())->writer.instance, "a??[31m?");
  hello.writer.build += 'v';
  Writer longer;
  hello.encode(longer);
  EXPECT_FALSE(HelloRequest::decode(longer.view())) << "too long";
  hello.flags = 0;
  Writer former;
  hello.encode(former);
  EXPECT_EQ(HelloRequest::decode(former.view())->writer.id, 0u) << "a client that does not say: unknown";
}

TEST(Messages, ItemsHaveTheirStatedWireSize) {
  const auto size_of = [](const auto& item) {
    Writer out;
    item.encode(out);
    return out.size();
  };
  EXPECT_EQ(size_of(PutItem{}), PutItem::kWireBytes);
  EXPECT_EQ(size_of(GetItem{}), GetItem::kWireBytes);
  EXPECT_EQ(size_of(GetResult{}), GetResult::kWireBytes);
  EXPECT_EQ(size_of(LookupResult{}), LookupResult::kWireBytes);
  EXPECT_EQ(size_of(ReserveItem{}), ReserveItem::kWireBytes);
  EXPECT_EQ(size_of(ReserveResult{}), ReserveResult::kWireBytes);
  EXPECT_EQ(size_of(WriteRange{}), WriteRange::kWireBytes);
  EXPECT_EQ(size_of(ReservedRange{}), ReservedRange::kWireBytes);
  EXPECT_EQ(size_of(CommitItem{}), CommitItem::kWireBytes);
  EXPECT_EQ(size_of(StatResult{}), StatResult::kWireBytes);
  EXPECT_EQ(size_of(ListItem{}), ListItem::kWireBytes);
  EXPECT_EQ(size_of(SegmentInfo{}), SegmentInfo::kWireBytes);
}

TEST(Messages, TruncatedOrPaddedRequestsAreRefused) {
  Writer out;
  const std::vector<PutItem> items(3, PutItem{key_of(5), 100, 1, 2});
  encode_items<PutItem>(out, items);
  ASSERT_TRUE(decode_all_items<PutItem>(out.view()));
  for (size_t size = 0; size < out.size(); ++size) {
    EXPECT_FALSE(decode_all_items<PutItem>(out.view().first(size))) << "cut at " << size;
  }
  out.u8(0);
  EXPECT_FALSE(decode_all_items<PutItem>(out.view())) << "a byte too many";
}

TEST(Messages, WaitsRoundTripAndAreChecked) {
  Writer out;
  WaitRequest{5000, 20, {key_of(1), key_of(2)}}.encode(out);
  const auto request = WaitRequest::decode(out.view(), false);
  ASSERT_TRUE(request);
  EXPECT_EQ(request->timeout_ms, 5000u);
  EXPECT_EQ(request->news_ms, 20u);
  EXPECT_EQ(request->keys, (std::vector<Key>{key_of(1), key_of(2)}));
  for (size_t size = 0; size < out.size(); ++size) {
    EXPECT_FALSE(WaitRequest::decode(out.view().first(size), false)) << "cut at " << size;
  }
  out.u8(0);
  EXPECT_FALSE(WaitRequest::decode(out.view(), false)) << "a byte too many";
  Writer beating;
  WaitRequest{5000, 20, {key_of(1)}, 2500}.encode(beating);
  const auto asked = WaitRequest::decode(beating.view(), true);
  ASSERT_TRUE(asked);
  EXPECT_EQ(asked->heartbeat_ms, 2500u);
  EXPECT_FALSE(WaitRequest::decode(beating.view(), false)) << "bytes that the header does not speak of";
  EXPECT_FALSE(WaitRequest::decode(beating.view().first(beating.size() - 4), true)) << "too few";
  Writer never;
  WaitRequest{5000, 20, {key_of(1)}}.encode(never);
  never.u32(0);
  EXPECT_FALSE(WaitRequest::decode(never.view(), true)) << "asked for, but never";
  Writer no_keys;
  WaitRequest{}.encode(no_keys);
  EXPECT_FALSE(WaitRequest::decode(no_keys.view(), false));

  const auto news_of = [](uint32_t state, std::vector<uint32_t> positions, uint32_t keys, size_t spare = 0) {
    Writer news;
    news.u32(state);
    news.u32(static_cast<uint32_t>(positions.size()));
    for (const uint32_t position : positions) news.u32(position);
    for (size_t i = 0; i < spare; ++i) news.u8(0);
    Reader in(news.view());
    return WaitNews::decode(in, keys);
  };
  const auto news = news_of(2, {0, 8}, 9);
  ASSERT_TRUE(news);
  EXPECT_EQ(news->state, WaitState::kGivenUp);
  EXPECT_EQ(news->positions, (std::vector<uint32_t>{0, 8}));
  EXPECT_FALSE(news_of(2, {9}, 9)) << "no such key";
  EXPECT_FALSE(news_of(2, {0, 0}, 1)) << "more than there are";
  EXPECT_FALSE(news_of(5, {}, 9)) << "no such state";
  EXPECT_FALSE(news_of(2, {0}, 9, 1)) << "a byte too many";
  Writer lies;
  lies.u32(0);
  lies.u32(0xffffffff);
  Reader in(lies.view());
  EXPECT_FALSE(WaitNews::decode(in, 0xffffffff)) << "refused before it allocates";
}

TEST(Messages, AMatchMaySayWhatIsOnADisk) {
  MatchResponse said{2, 3, {std::byte{0b1011}, std::byte{0}}, {}, {}};
  for (const int tiers : {0, 1, 2}) {
    if (tiers > 0) said.on_disk = {std::byte{0b1000}, std::byte{0}};
    if (tiers > 1) said.shared = {std::byte{0b1000}, std::byte{0}};
    Writer out;
    said.encode(out);
    Reader in(out.view());
    const auto heard = MatchResponse::decode(in, 9);
    ASSERT_TRUE(heard) << "with and without tiers";
    EXPECT_EQ(heard->bitmap, said.bitmap);
    EXPECT_EQ(heard->on_disk, said.on_disk);
    EXPECT_EQ(heard->shared, said.shared);
  }
  said.shared.clear();
  for (const size_t more : {1, 3}) {
    said.on_disk.assign(more, std::byte{0});
    Writer out;
    said.encode(out);
    Reader in(out.view());
    EXPECT_FALSE(MatchResponse::decode(in, 9)) << more;
  }
}

TEST(Messages, CountsOverTheLimitAreRefusedBeforeAllocation) {
  Writer out;
  out.u32(0xffffffff);
  EXPECT_FALSE(decode_all_keys(out.view()));
  EXPECT_FALSE(decode_all_items<GetItem>(out.view()));
  EXPECT_FALSE(decode_all_grants(out.view()));
}

TEST(Messages, PayloadSumsDoNotOverflow) {
  std::vector<PutItem> items(2);
  items[0].size = UINT64_MAX;
  items[1].size = 2;
  EXPECT_FALSE(payload_bytes(std::span<const PutItem>(items)));
  items[0].size = kMaxPayloadBytes;
  EXPECT_FALSE(payload_bytes(std::span<const PutItem>(items)));
  items[1].size = 0;
  EXPECT_EQ(payload_bytes(std::span<const PutItem>(items)), kMaxPayloadBytes);
}

TEST(Messages, RandomBytesNeverDecodeOutOfBounds) {
  std::mt19937_64 random(20261121);
  for (int round = 0; round < 20000; ++round) {
    std::vector<std::byte> bytes(random() % 200);
    for (auto& byte : bytes) byte = static_cast<std::byte>(random());
    if (bytes.size() >= 4 && round % 2 == 0) bytes[1] = bytes[2] = bytes[3] = std::byte{0};
    (void)HelloRequest::decode(bytes);
    (void)ReserveRequest::decode(bytes);
    (void)WriteRequest::decode(bytes);
    (void)decode_all_items<ReservedRange>(bytes);
    (void)PinRequest::decode(bytes);
    Reader stat(bytes);
    (void)NodeStatResponse::decode(stat);
    Reader list(bytes);
    (void)ListResponse::decode(list);
    Reader match(bytes);
    const auto found = MatchResponse::decode(match, 40);
    EXPECT_TRUE(!found || found->on_disk.empty() || found->on_disk.size() == 5);
    (void)WaitRequest::decode(bytes, false);
    (void)WaitRequest::decode(bytes, true);
    Reader news(bytes);
    (void)WaitNews::decode(news, 40);
  }
}

TEST(Auth, ProofsDifferBySideNonceTenantAndKey) {
  Bytes32 key{};
  Bytes16 server{};
  Bytes16 client{};
  client[0] = std::byte{1};
  const auto proof = auth_mac(true, key, server, client, "default");
  EXPECT_NE(proof, auth_mac(false, key, server, client, "default"));
  EXPECT_NE(proof, auth_mac(true, key, client, server, "default"));
  EXPECT_NE(proof, auth_mac(true, key, server, client, "other"));
  EXPECT_NE(proof, auth_mac(true, tenant_key(key, "default"), server, client, "default"));
  EXPECT_NE(tenant_key(key, "a"), tenant_key(key, "b"));
  EXPECT_NE(tenant_id("a"), tenant_id("b"));
}

TEST(Auth, TenantNamesAreChecked) {
  EXPECT_TRUE(tenant_name_valid("default"));
  EXPECT_TRUE(tenant_name_valid("team-a.prod_1"));
  for (const char* bad : {"", "-a", "A", "a b", "ü"}) EXPECT_FALSE(tenant_name_valid(bad)) << bad;
  EXPECT_FALSE(tenant_name_valid(std::string(64, 'a')));
}

TEST(Auth, ConstantTimeCompareIsACompare) {
  const Bytes32 a{};
  Bytes32 b{};
  EXPECT_TRUE(equal_constant_time(a, b));
  b[31] = std::byte{1};
  EXPECT_FALSE(equal_constant_time(a, b));
  EXPECT_FALSE(equal_constant_time(a, std::span(b).first(31)));
}

}  // namespace
}  // namespace mooncache::wire
