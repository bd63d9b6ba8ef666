// Fuzzes everything that turns bytes of a peer into numbers: the frame header and every message decoder.
// Input: one byte chooses the decoder, the rest are the bytes. What is accepted must survive a round trip:
// encoding it again gives bytes that decode to the same encoding.
//
//   fuzz_wire native/fuzz/fuzz_wire_corpus            run; the folder holds valid messages, written by
//   seed_corpus.py
#include <cstdint>
#include <cstdlib>
#include <span>

#include "mooncache/crc32c.h"
#include "wire/cluster_map.h"
#include "wire/frame.h"
#include "wire/messages.h"
#include "wire/ranges.h"

namespace {

using namespace mooncache;
using Bytes = std::span<const std::byte>;

void require(bool condition) {
  if (!condition) std::abort();
}

bool equal(Bytes a, Bytes b) {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin());
}

// decode(bytes) -> optional<T>, encode(Writer&, T)
template <typename Decode, typename Encode>
void round_trip(Bytes bytes, Decode decode, Encode encode) {
  const auto first = decode(bytes);
  if (!first) return;
  Writer once;
  encode(once, *first);
  const auto second = decode(once.view());
  require(second.has_value());
  Writer twice;
  encode(twice, *second);
  require(equal(once.view(), twice.view()));
}

template <typename T>
void request(Bytes bytes) {
  round_trip(
      bytes, [](Bytes in) { return T::decode(in); }, [](Writer& out, const T& value) { value.encode(out); });
}

template <bool kHeartbeats>
void wait_request(Bytes bytes) {
  round_trip(
      bytes, [](Bytes in) { return wire::WaitRequest::decode(in, kHeartbeats); },
      [](Writer& out, const wire::WaitRequest& value) { value.encode(out); });
}

template <typename T>
void response(Bytes bytes) {
  round_trip(
      bytes,
      [](Bytes in) {
        Reader reader(in);
        return T::decode(reader);
      },
      [](Writer& out, const T& value) { value.encode(out); });
}

template <typename T>
void items(Bytes bytes) {
  round_trip(
      bytes, [](Bytes in) { return wire::decode_all_items<T>(in); },
      [](Writer& out, const std::vector<T>& value) { wire::encode_items<T>(out, value); });
  Reader reader(bytes);
  const auto some = wire::decode_items<T>(reader);
  require(!some || some->size() <= wire::kMaxItems);
}

void header(Bytes bytes) {
  if (bytes.size() < wire::kHeaderBytes) return;
  const auto head = bytes.first<wire::kHeaderBytes>();
  const auto decoded = wire::decode_header(head);
  if (!decoded) return;
  require(decoded->meta_bytes <= wire::kMaxMetaBytes && decoded->payload_bytes <= wire::kMaxPayloadBytes);
  const Bytes meta = bytes.subspan(wire::kHeaderBytes);
  const bool sound = wire::verify_check(head, meta).is_ok();
  if (sound && meta.size() == decoded->meta_bytes) require(equal(wire::encode_header(*decoded, meta), head));
}

void lengths(Bytes bytes) {
  if (const auto put = wire::decode_all_items<wire::PutItem>(bytes)) {
    const auto total = wire::payload_bytes(std::span<const wire::PutItem>(*put));
    require(!total || *total <= wire::kMaxPayloadBytes);
  }
  if (const auto write = wire::decode_all_items<wire::ReservedRange>(bytes)) {
    const auto total = wire::payload_bytes(std::span<const wire::ReservedRange>(*write));
    require(!total || *total <= wire::kMaxPayloadBytes);
  }
  if (const auto read = wire::decode_all_items<wire::EngineRange>(bytes)) {
    const auto total = wire::payload_bytes(std::span<const wire::EngineRange>(*read));
    require(!total || *total <= wire::kMaxPayloadBytes);
  }
  if (const auto write = wire::decode_all_items<wire::EngineWrite>(bytes)) {
    const auto total = wire::payload_bytes(std::span<const wire::EngineWrite>(*write));
    require(!total || *total <= wire::kMaxPayloadBytes);
  }
  Reader reader(bytes);
  if (const auto get = wire::decode_items<wire::GetResult>(reader)) {
    const auto total = wire::payload_bytes(std::span<const wire::GetResult>(*get));
    require(!total || *total <= wire::kMaxPayloadBytes);
  }
}

void match_response(Bytes bytes) {
  if (bytes.size() < 2) return;
  const uint32_t keys = static_cast<uint32_t>(bytes[0]) | static_cast<uint32_t>(bytes[1]) << 8;
  Reader reader(bytes.subspan(2));
  const auto match = wire::MatchResponse::decode(reader, keys);
  require(!match || match->bitmap.size() == (keys + 7) / 8);
}

void wait_news(Bytes bytes) {
  if (bytes.size() < 2) return;
  const uint32_t keys = static_cast<uint32_t>(bytes[0]) | static_cast<uint32_t>(bytes[1]) << 8;
  round_trip(
      bytes.subspan(2),
      [keys](Bytes in) {
        Reader reader(in);
        auto news = wire::WaitNews::decode(reader, keys);
        if (news) {
          require(news->positions.size() <= keys);
          for (const uint32_t position : news->positions) require(position < keys);
        }
        return news;
      },
      [](Writer& out, const wire::WaitNews& value) { value.encode(out); });
}

void status(Bytes bytes) {
  Reader reader(bytes);
  if (const auto decoded = wire::decode_status(reader)) {
    Writer out;
    wire::encode_status(out, *decoded);
    require(equal(out.view(), bytes.first(out.size())));
  }
}

void keys(Bytes bytes) {
  round_trip(
      bytes, [](Bytes in) { return wire::decode_all_keys(in); },
      [](Writer& out, const std::vector<Key>& value) { wire::encode_keys(out, value); });
}
void grants(Bytes bytes) {
  round_trip(
      bytes, [](Bytes in) { return wire::decode_all_grants(in); },
      [](Writer& out, const std::vector<uint64_t>& value) { wire::encode_grants(out, value); });
}
void codes(Bytes bytes) {
  round_trip(
      bytes,
      [](Bytes in) {
        Reader reader(in);
        return wire::decode_codes(reader);
      },
      [](Writer& out, const std::vector<Code>& value) { wire::encode_codes(out, value); });
}

// As it is, and with its checksum put right.
void engine_descriptor(Bytes bytes) {
  request<wire::EngineDescriptor>(bytes);
  Writer sound;
  sound.raw(bytes);
  sound.u32(crc32c(bytes));
  const auto decoded = wire::EngineDescriptor::decode(sound.view());
  if (!decoded) return;
  for (const wire::DescribedRegion& region : decoded->regions) {
    require(region.size > 0 && region.base <= UINT64_MAX - region.size);
    require(region.label.size() <= wire::kMaxLabelBytes);
  }
  request<wire::EngineDescriptor>(sound.view());
}

// What a page says is within the limits of a map, so that a map made of pages is, too.
void cluster_map(Bytes bytes) {
  Reader reader(bytes);
  if (const auto page = wire::ClusterMapResponse::decode(reader)) {
    require(page->nodes.size() <= wire::kMaxItems);
    require(page->first + page->nodes.size() <= page->node_count);
    for (const MapNode& node : page->nodes) require(wire::map_valid({1, 1, {node}}));
  }
  response<wire::ClusterMapResponse>(bytes);
}

using Target = void (*)(Bytes);
// The order is the corpus's: new ones go to the end.
constexpr Target kTargets[] = {
    header,
    lengths,
    status,
    keys,
    grants,
    codes,
    match_response,
    request<wire::HelloRequest>,
    request<wire::AuthRequest>,
    request<wire::ReserveRequest>,
    request<wire::WriteRequest>,
    request<wire::PinRequest>,
    request<wire::ReadRequest>,
    request<wire::ListRequest>,
    response<wire::HelloResponse>,
    response<wire::AuthResponse>,
    response<wire::ListResponse>,
    response<wire::NodeStatResponse>,
    items<wire::PutItem>,
    items<wire::GetItem>,
    items<wire::GetResult>,
    items<wire::LookupResult>,
    items<wire::ReserveItem>,
    items<wire::ReserveResult>,
    items<wire::WriteRange>,
    items<wire::CommitItem>,
    items<wire::StatResult>,
    items<wire::ListItem>,
    items<wire::SegmentInfo>,
    items<wire::RdmaAddress>,
    items<wire::Exposure>,
    wait_request<false>,
    wait_news,
    items<wire::ReservedRange>,
    request<wire::PrefetchRequest>,
    response<wire::PrefetchResponse>,
    wait_request<true>,
    items<wire::EngineRange>,
    items<wire::EngineWrite>,
    request<wire::OpenRangesRequest>,
    response<wire::MappedRegion>,
    engine_descriptor,
    request<wire::ClusterMapRequest>,
    cluster_map,
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const auto bytes = std::as_bytes(std::span(data, size));
  kTargets[static_cast<size_t>(bytes[0]) % std::size(kTargets)](bytes.subspan(1));
  return 0;
}
