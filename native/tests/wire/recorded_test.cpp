// Frames that released versions wrote must mean the same forever: each is decoded by the present code, and
// what was understood is encoded again to the same bytes. One folder for each release below recorded/.
//
//   MOONCACHE_RECORD_FRAMES=0.2.0 build/release/test_wire --gtest_filter='Recorded.*'
//
// writes the folder of a new release (docs/upgrades.md). A recorded file is never changed.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <set>

#include "wire/cluster_map.h"
#include "wire/frame.h"
#include "wire/messages.h"
#include "wire/ranges.h"

namespace mooncache::wire {
namespace {

namespace fs = std::filesystem;
using Bytes = std::vector<std::byte>;
using Again = std::function<std::optional<Bytes>(Meta)>;  // decode, then encode what was understood

struct Sample {
  Opcode opcode;
  bool response;
  uint16_t flags;
  Bytes meta;
  Again again;
};

fs::path folder() {
  return MOONCACHE_RECORDED_FRAMES;
}

Key recorded_key(uint8_t first) {
  Key key;
  for (size_t i = 0; i < key.bytes.size(); ++i) key.bytes[i] = static_cast<std::byte>(first + i);
  return key;
}

template <size_t N>
std::array<std::byte, N> bytes_of(uint8_t first) {
  std::array<std::byte, N> bytes;
  for (size_t i = 0; i < N; ++i) bytes[i] = static_cast<std::byte>(first + i);
  return bytes;
}

Bytes taken(const Writer& out) {
  return {out.view().begin(), out.view().end()};
}

template <typename T>
Bytes encoded(const T& value) {
  Writer out;
  value.encode(out);
  return taken(out);
}

// A request that is one message.
template <typename T>
Sample request(Opcode opcode, const T& value, uint16_t flags = 0) {
  return {opcode, false, flags, encoded(value), [](Meta meta) -> std::optional<Bytes> {
            const auto found = T::decode(meta);
            return found ? std::optional(encoded(*found)) : std::nullopt;
          }};
}

// A request that is a list of items.
template <typename T>
Sample listed(Opcode opcode, const std::vector<T>& items, uint16_t flags = 0) {
  Writer out;
  encode_items<T>(out, items);
  return {opcode, false, flags, taken(out), [](Meta meta) -> std::optional<Bytes> {
            const auto found = decode_all_items<T>(meta);
            if (!found) return std::nullopt;
            Writer again;
            encode_items<T>(again, *found);
            return taken(again);
          }};
}

Sample keys(Opcode opcode, uint16_t flags = 0) {
  Writer out;
  encode_keys(out, std::vector{recorded_key(1), recorded_key(40)});
  return {opcode, false, flags, taken(out), [](Meta meta) -> std::optional<Bytes> {
            const auto found = decode_all_keys(meta);
            if (!found) return std::nullopt;
            Writer again;
            encode_keys(again, *found);
            return taken(again);
          }};
}

Sample grants(Opcode opcode) {
  Writer out;
  encode_grants(out, std::vector<uint64_t>{7, 1ull << 40});
  return {opcode, false, 0, taken(out), [](Meta meta) -> std::optional<Bytes> {
            const auto found = decode_all_grants(meta);
            if (!found) return std::nullopt;
            Writer again;
            encode_grants(again, *found);
            return taken(again);
          }};
}

Sample empty(Opcode opcode) {
  return {opcode, false, 0, {}, [](Meta meta) -> std::optional<Bytes> {
            return meta.empty() ? std::optional(Bytes{}) : std::nullopt;
          }};
}

// An answer: a status, then a body that `write` makes and `read` takes and writes again.
Sample answer(Opcode opcode, const std::function<void(Writer&)>& write,
              std::function<bool(Reader&, Writer&)> read, uint16_t flags = 0) {
  Writer out;
  encode_status(out, Status::ok());
  write(out);
  return {opcode, true, flags, taken(out), [read = std::move(read)](Meta meta) -> std::optional<Bytes> {
            Reader in(meta);
            const auto status = decode_status(in);
            Writer again;
            if (!status) return std::nullopt;
            encode_status(again, *status);
            if (!read(in, again) || !in.done()) return std::nullopt;
            return taken(again);
          }};
}

template <typename T>
Sample answered(Opcode opcode, const T& value) {
  return answer(
      opcode, [&](Writer& out) { value.encode(out); },
      [](Reader& in, Writer& again) {
        const auto found = T::decode(in);
        if (found) found->encode(again);
        return found.has_value();
      });
}

template <typename T>
Sample results(Opcode opcode, const std::vector<T>& items) {
  return answer(
      opcode, [&](Writer& out) { encode_items<T>(out, items); },
      [](Reader& in, Writer& again) {
        const auto found = decode_items<T>(in);
        if (found) encode_items<T>(again, *found);
        return found.has_value();
      });
}

Sample codes(Opcode opcode) {
  return answer(
      opcode,
      [](Writer& out) {
        encode_codes(out, std::vector{Code::kOk, Code::kNotFound});
      },
      [](Reader& in, Writer& again) {
        const auto found = decode_codes(in);
        if (found) encode_codes(again, *found);
        return found.has_value();
      });
}

Sample nothing(Opcode opcode) {
  return answer(
      opcode, [](Writer&) {}, [](Reader&, Writer&) { return true; });
}

Sample refused(Opcode opcode) {
  Writer out;
  encode_status(out, {Code::kVersionSkew, "the peer speaks data-plane version 2"});
  return {opcode, true, 0, taken(out), [](Meta meta) -> std::optional<Bytes> {
            Reader in(meta);
            const auto status = decode_status(in);
            if (!status || !in.done()) return std::nullopt;
            Writer again;
            encode_status(again, *status);
            return taken(again);
          }};
}

template <typename T>
Sample of_keys(Opcode opcode, const T& value,
               uint16_t flags = 0) {  // the reader knows how many keys it asked for
  return answer(
      opcode, [&](Writer& out) { value.encode(out); },
      [](Reader& in, Writer& again) {
        const auto found = T::decode(in, 9);
        if (found) found->encode(again);
        return found.has_value();
      },
      flags);
}

using Samples = std::map<std::string, Sample>;

// Of a connection's beginning, and of blocks that come and go.
Samples transfers() {
  const WireExtent extent{7, 2, 3, 4, 5ull << 32, 4096};
  HelloRequest hello{
      0, HelloRequest::kFlagExpires, 17, bytes_of<16>(3), "team-a", "bench", "0.1.0", 1800000000, {}};
  HelloRequest admin{0, HelloRequest::kFlagAdmin, 17, bytes_of<16>(3), "default", "bench", "0.1.0", 0, {}};
  AuthResponse auth{bytes_of<32>(9), 0, 31, 77, "node-1", "host-1", 4000, 1u << 19, 1ull << 29};
  const GetResult got{Code::kNotFound, Tier::kDram, 9, 4096, 100};
  const Exposure exposure{Code::kOk, 1ull << 40, {1, 2, 3, 4, 5, 6, 7, 8}};
  return {
      {"hello-request", request(Opcode::kHello, admin)},
      {"hello-request-session", request(Opcode::kHello, hello)},
      {"hello-response", answered(Opcode::kHello, HelloResponse{bytes_of<16>(4)})},
      {"hello-response-refused", refused(Opcode::kHello)},
      {"auth-request", request(Opcode::kAuth, AuthRequest{bytes_of<32>(5)})},
      {"auth-response", answered(Opcode::kAuth, auth)},
      {"put-request", listed<PutItem>(Opcode::kPut, {{recorded_key(1), 4096, 0xabcd, 100}})},
      {"put-response", codes(Opcode::kPut)},
      {"get-request", listed<GetItem>(Opcode::kGet, {{recorded_key(1), 16, 1000}}, kFlagWhole | kFlagVerify)},
      {"get-response", results<GetResult>(Opcode::kGet, {got})},
      {"lookup-request", keys(Opcode::kLookup, kFlagExpose)},
      {"lookup-response",
       results<LookupResult>(Opcode::kLookup, {{Code::kOk, Tier::kDram, 5, 4096, extent}})},
      {"release-request", grants(Opcode::kRelease)},
      {"release-response", nothing(Opcode::kRelease)},
      {"reserve-request",
       request(Opcode::kReserve, ReserveRequest{250, {{recorded_key(1), 4096}}}, kFlagExpose)},
      {"reserve-response", results<ReserveResult>(Opcode::kReserve, {{Code::kOk, extent}})},
      {"reserve-exposures", results<Exposure>(Opcode::kReserve, {exposure})},
      {"write-request", request(Opcode::kWrite, WriteRequest{7, {{16, 4096, 0xabcd}}})},
      {"write-request-several",
       listed<ReservedRange>(Opcode::kWrite, {{7, {16, 4096, 0xabcd}}}, kFlagSeveral)},
      {"write-response", codes(Opcode::kWrite)},
      {"commit-request", listed<CommitItem>(Opcode::kCommit, {{7, 0xabcd, CommitItem::kFlagOneSided}})},
      {"commit-response", codes(Opcode::kCommit)},
      {"abort-request", grants(Opcode::kAbort)},
      {"abort-response", nothing(Opcode::kAbort)},
  };
}

// What is asked about blocks, and the rest.
Samples questions() {
  const RdmaAddress rail{Code::kOk, 3, 2, 5, 16, 99, 17, bytes_of<16>(30)};
  const Bytes bits{std::byte{0b1011}, std::byte{1}};
  return {
      {"match-request", keys(Opcode::kMatch, kFlagTouch | kFlagTiers | kFlagShared)},
      {"match-response", of_keys(Opcode::kMatch, MatchResponse{2, 4, bits, {}, {}})},
      {"match-response-tiers", of_keys(Opcode::kMatch, MatchResponse{2, 4, bits, bits, bits})},
      {"remove-request", keys(Opcode::kRemove)},
      {"remove-response", codes(Opcode::kRemove)},
      {"pin-request", request(Opcode::kPin, PinRequest{1000, {recorded_key(1)}})},
      {"pin-response", codes(Opcode::kPin)},
      {"unpin-request", keys(Opcode::kUnpin)},
      {"unpin-response", codes(Opcode::kUnpin)},
      {"stat-request", keys(Opcode::kStat)},
      {"stat-response", results<StatResult>(Opcode::kStat, {{Code::kOk, Tier::kDram, 5, 4096, 1, 2, 3000}})},
      {"read-request", request(Opcode::kRead, ReadRequest{7, 16, 4096})},
      {"read-response", nothing(Opcode::kRead)},
      {"attach-request", empty(Opcode::kAttach)},
      {"attach-response",
       results<SegmentInfo>(Opcode::kAttach, {{2, SegmentInfo::kGenerationTable, 1 << 20}})},
      {"list-request", request(Opcode::kList, ListRequest{9, 100})},
      {"list-response", answered(Opcode::kList, ListResponse{9, {{recorded_key(1), 4096, Tier::kDram, 2}}})},
      {"node-stat-request", empty(Opcode::kNodeStat)},
      {"node-stat-response", answered(Opcode::kNodeStat, NodeStatResponse{{{"store_blocks", 3}}})},
      {"ping-request", empty(Opcode::kPing)},
      {"ping-response", nothing(Opcode::kPing)},
      {"endpoint-request", listed<RdmaAddress>(Opcode::kEndpoint, {rail})},
      {"endpoint-response", results<RdmaAddress>(Opcode::kEndpoint, {rail})},
      {"wait-request",
       {Opcode::kWait, false, 0, encoded(WaitRequest{5000, 20, {recorded_key(1)}}),
        [](Meta meta) -> std::optional<Bytes> {
          const auto found = WaitRequest::decode(meta, false);
          return found ? std::optional(encoded(*found)) : std::nullopt;
        }}},
      {"wait-request-heartbeats",
       {Opcode::kWait, false, kFlagHeartbeats, encoded(WaitRequest{5000, 20, {recorded_key(1)}, 2500}),
        [](Meta meta) -> std::optional<Bytes> {
          const auto found = WaitRequest::decode(meta, true);
          return found ? std::optional(encoded(*found)) : std::nullopt;
        }}},
      {"wait-response", of_keys(Opcode::kWait, WaitNews{WaitState::kGivenUp, {0, 8}})},
      {"give-up-request", keys(Opcode::kGiveUp)},
      {"give-up-response", nothing(Opcode::kGiveUp)},
      {"prefetch-request", request(Opcode::kPrefetch, PrefetchRequest{200, 1 << 20, {recorded_key(1)}})},
      {"prefetch-response", answered(Opcode::kPrefetch, PrefetchResponse{3, 1 << 19})},
  };
}

Sample number(Opcode opcode) {
  Writer out;
  out.u64(1ull << 40);
  return {opcode, false, 0, taken(out), [](Meta meta) -> std::optional<Bytes> {
            Reader in(meta);
            Writer again;
            again.u64(in.u64());
            return in.done() ? std::optional(taken(again)) : std::nullopt;
          }};
}

Sample text(Opcode opcode) {
  return {opcode, false, 0, {std::byte{1}, std::byte{2}}, [](Meta meta) -> std::optional<Bytes> {
            return Bytes(meta.begin(), meta.end());
          }};
}

// Between transfer engines.
Samples of_engines() {
  const EngineRange range{1ull << 44, 4096};
  const EngineDescriptor described{
      "engine-1", "host-1", 31,       "10.0.0.5",
      7400,       true,     "/run/e", {{1ull << 44, 8192, DescribedRegion::kReadable, "kv"}}};
  return {
      {"read-ranges-request", listed<EngineRange>(Opcode::kReadRanges, {range})},
      {"read-ranges-response", answer(
                                   Opcode::kReadRanges,
                                   [](Writer& out) {
                                     out.u32(1);
                                     out.u32(0xabcd);
                                   },
                                   [](Reader& in, Writer& again) {
                                     const uint32_t count = in.u32();
                                     again.u32(count);
                                     for (uint32_t i = 0; i < count && in.ok(); ++i) again.u32(in.u32());
                                     return in.ok();
                                   })},
      {"write-ranges-request", listed<EngineWrite>(Opcode::kWriteRanges, {{range, 0xabcd}})},
      {"write-ranges-response", codes(Opcode::kWriteRanges)},
      {"open-ranges-request", request(Opcode::kOpenRanges, OpenRangesRequest{true, {range}})},
      {"open-ranges-response", answer(
                                   Opcode::kOpenRanges, [](Writer& out) { out.u64(7); },
                                   [](Reader& in, Writer& again) {
                                     again.u64(in.u64());
                                     return in.ok();
                                   })},
      {"close-ranges-request", number(Opcode::kCloseRanges)},
      {"close-ranges-response", nothing(Opcode::kCloseRanges)},
      {"map-region-request", number(Opcode::kMapRegion)},
      {"map-region-response", answered(Opcode::kMapRegion, MappedRegion{1ull << 44, 8192, true})},
      {"notify-request", text(Opcode::kNotify)},
      {"notify-response", nothing(Opcode::kNotify)},
      {"describe-request", empty(Opcode::kDescribe)},
      {"describe-response", answer(
                                Opcode::kDescribe, [&](Writer& out) { described.encode(out); },
                                [](Reader& in, Writer& again) {
                                  const auto found = EngineDescriptor::decode(in.take(in.remaining()));
                                  if (found) found->encode(again);
                                  return found.has_value();
                                })},
  };
}

Samples of_maps() {
  MapNode node;
  node.index = 3;
  node.incarnation = 31;
  node.state = NodeHealth::kDraining;
  node.rdma = true;
  node.node_id = "node-3";
  node.host_id = "host-1";
  node.tcp_host = "10.0.0.5";
  node.tcp_port = 7801;
  node.unix_path = "/run/n";
  node.arena = "memory";
  node.free_bytes = 1ull << 33;
  node.weight = 0.75;
  node.labels = {{"zone", "a"}};
  return {{"cluster-map-request", request(Opcode::kClusterMap, ClusterMapRequest{2, 9, 4})},
          {"cluster-map-response", answered(Opcode::kClusterMap, ClusterMapResponse{2, 9, 8, 4, {node}})}};
}

// Every message in every form that flags give it, with a value other than its default in every field.
Samples samples() {
  Samples all = transfers();
  all.merge(questions());
  all.merge(of_engines());
  all.merge(of_maps());
  return all;
}

Bytes frame_of(const Sample& sample) {
  const FrameHeader header{sample.opcode, sample.response, sample.flags, 0x1122334455667788, 0, 0, 0};
  const HeaderBytes head = encode_header(header, sample.meta);
  Bytes bytes(head.begin(), head.end());
  bytes.insert(bytes.end(), sample.meta.begin(), sample.meta.end());
  return bytes;
}

Bytes read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const auto view = std::as_bytes(std::span(text));
  return {view.begin(), view.end()};
}

std::vector<fs::path> releases() {
  std::vector<fs::path> found;
  for (const auto& entry : fs::directory_iterator(folder())) found.push_back(entry.path());
  return found;
}

TEST(Recorded, FramesOfEveryReleaseAreUnderstood) {
  const auto known = samples();
  if (const char* release = std::getenv("MOONCACHE_RECORD_FRAMES")) {
    ASSERT_TRUE(fs::create_directories(folder() / release)) << "what was recorded stays as it is";
    for (const auto& [name, sample] : known) {
      const Bytes bytes = frame_of(sample);
      std::ofstream(folder() / release / (name + ".frame"), std::ios::binary)
          .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    }
  }
  ASSERT_FALSE(releases().empty());
  for (const fs::path& release : releases()) {
    size_t count = 0;
    for (const auto& entry : fs::directory_iterator(release)) {
      const std::string name = entry.path().stem();
      SCOPED_TRACE(release.filename().string() + "/" + name);
      ASSERT_TRUE(known.contains(name)) << "a message that a release wrote has no decoder here";
      const Sample& sample = known.at(name);
      const Bytes bytes = read_file(entry.path());
      ASSERT_GE(bytes.size(), kHeaderBytes);
      const auto head = std::span(bytes).first<kHeaderBytes>();
      const auto header = decode_header(head);
      ASSERT_TRUE(header) << header.status().message;
      EXPECT_EQ(header->opcode, sample.opcode);
      EXPECT_EQ(header->response, sample.response);
      EXPECT_EQ(header->flags, sample.flags);
      EXPECT_EQ(header->request_id, 0x1122334455667788u);
      const Meta meta = std::span(bytes).subspan(kHeaderBytes);
      ASSERT_EQ(meta.size(), header->meta_bytes);
      EXPECT_TRUE(verify_check(head, meta));
      const auto again = sample.again(meta);
      ASSERT_TRUE(again) << "not understood";
      EXPECT_TRUE(std::equal(again->begin(), again->end(), meta.begin(), meta.end()))
          << "understood otherwise";
      ++count;
    }
    EXPECT_GT(count, 40u) << release;
  }
}

TEST(Recorded, EveryOpcodeIsRecordedBothWays) {
  std::set<std::pair<int, bool>> seen;
  for (const auto& [name, sample] : samples()) {
    seen.insert({static_cast<int>(sample.opcode), sample.response});
    const Bytes now = frame_of(sample);
    size_t same = 0;
    for (const fs::path& release : releases()) same += read_file(release / (name + ".frame")) == now;
    EXPECT_GT(same, 0u) << name << ": no release wrote what this code writes; record it (docs/upgrades.md)";
  }
  for (int opcode = 1; opcode <= kMaxOpcode; ++opcode)
    for (const bool response : {false, true})
      EXPECT_TRUE(seen.contains({opcode, response})) << opcode_name(static_cast<Opcode>(opcode));
}

TEST(Recorded, ANewerPeersOpcodeAndVersionAreNamed) {
  Bytes bytes = frame_of(samples().at("ping-request"));
  const auto head = [&] { return std::span<const std::byte, kHeaderBytes>(bytes.data(), kHeaderBytes); };
  bytes[5] = static_cast<std::byte>(kMaxOpcode + 1);
  EXPECT_EQ(decode_header(head()).code(), Code::kProtocolError);
  EXPECT_NE(decode_header(head()).status().message.find("opcode"), std::string::npos);
  bytes[4] = std::byte{kVersion + 1};
  EXPECT_EQ(decode_header(head()).code(), Code::kVersionSkew);
  EXPECT_NE(decode_header(head()).status().message.find("version 2"), std::string::npos);
}

}  // namespace
}  // namespace mooncache::wire
