#include "wire/frame.h"

#include <cstring>
#include <string>

#include "mooncache/bytes.h"
#include "mooncache/crc32c.h"

namespace mooncache::wire {

namespace {

constexpr size_t kCheckedBytes = 28;

void store_le(std::byte* at, auto value) {
  std::memcpy(at, &value, sizeof value);
}

}  // namespace

std::string_view opcode_name(Opcode opcode) {
  switch (opcode) {
    case Opcode::kHello:
      return "HELLO";
    case Opcode::kAuth:
      return "AUTH";
    case Opcode::kPut:
      return "PUT";
    case Opcode::kGet:
      return "GET";
    case Opcode::kLookup:
      return "LOOKUP";
    case Opcode::kRelease:
      return "RELEASE";
    case Opcode::kReserve:
      return "RESERVE";
    case Opcode::kWrite:
      return "WRITE";
    case Opcode::kCommit:
      return "COMMIT";
    case Opcode::kAbort:
      return "ABORT";
    case Opcode::kMatch:
      return "MATCH";
    case Opcode::kRemove:
      return "REMOVE";
    case Opcode::kPin:
      return "PIN";
    case Opcode::kUnpin:
      return "UNPIN";
    case Opcode::kStat:
      return "STAT";
    case Opcode::kRead:
      return "READ";
    case Opcode::kAttach:
      return "ATTACH";
    case Opcode::kList:
      return "LIST";
    case Opcode::kNodeStat:
      return "NODE_STAT";
    case Opcode::kPing:
      return "PING";
    case Opcode::kEndpoint:
      return "ENDPOINT";
    case Opcode::kWait:
      return "WAIT";
    case Opcode::kGiveUp:
      return "GIVE_UP";
    case Opcode::kPrefetch:
      return "PREFETCH";
    case Opcode::kReadRanges:
      return "READ_RANGES";
    case Opcode::kWriteRanges:
      return "WRITE_RANGES";
    case Opcode::kOpenRanges:
      return "OPEN_RANGES";
    case Opcode::kCloseRanges:
      return "CLOSE_RANGES";
    case Opcode::kMapRegion:
      return "MAP_REGION";
    case Opcode::kNotify:
      return "NOTIFY";
    case Opcode::kDescribe:
      return "DESCRIBE";
    case Opcode::kClusterMap:
      return "CLUSTER_MAP";
  }
  return "UNKNOWN";
}

HeaderBytes encode_header(FrameHeader header, std::span<const std::byte> meta) {
  HeaderBytes bytes{};
  const auto opcode =
      static_cast<uint8_t>(static_cast<uint8_t>(header.opcode) | (header.response ? kResponseBit : 0));
  store_le(bytes.data() + 0, kMagic);
  store_le(bytes.data() + 4, kVersion);
  store_le(bytes.data() + 5, opcode);
  store_le(bytes.data() + 6, header.flags);
  store_le(bytes.data() + 8, header.request_id);
  store_le(bytes.data() + 16, header.payload_bytes);
  store_le(bytes.data() + 24, static_cast<uint32_t>(meta.size()));
  const uint32_t check = crc32c(meta, crc32c(std::span(bytes).first(kCheckedBytes)));
  store_le(bytes.data() + kCheckedBytes, check);
  return bytes;
}

Result<FrameHeader> decode_header(std::span<const std::byte, kHeaderBytes> bytes) {
  Reader reader(bytes);
  if (reader.u32() != kMagic) return {Code::kProtocolError, "not a Mooncache data-plane frame (wrong magic)"};
  const uint8_t version = reader.u8();
  if (version != kVersion) {
    return {Code::kVersionSkew, "the peer speaks data-plane version " + std::to_string(version) +
                                    ", this side speaks " + std::to_string(kVersion)};
  }
  FrameHeader header;
  const uint8_t opcode = reader.u8();
  header.response = (opcode & kResponseBit) != 0;
  const uint8_t number = opcode & static_cast<uint8_t>(~kResponseBit);
  if (number == 0 || number > kMaxOpcode) {
    return {Code::kProtocolError, "unknown opcode " + std::to_string(number)};
  }
  header.opcode = static_cast<Opcode>(number);
  header.flags = reader.u16();
  header.request_id = reader.u64();
  header.payload_bytes = reader.u64();
  header.meta_bytes = reader.u32();
  header.check = reader.u32();
  if (header.meta_bytes > kMaxMetaBytes) {
    return {Code::kProtocolError, "meta of " + std::to_string(header.meta_bytes) +
                                      " bytes is over the limit of " + std::to_string(kMaxMetaBytes)};
  }
  if (header.payload_bytes > kMaxPayloadBytes) {
    return {Code::kProtocolError, "payload of " + std::to_string(header.payload_bytes) +
                                      " bytes is over the limit of " + std::to_string(kMaxPayloadBytes)};
  }
  return header;
}

Status verify_check(std::span<const std::byte, kHeaderBytes> header_bytes, std::span<const std::byte> meta) {
  uint32_t expected;
  std::memcpy(&expected, header_bytes.data() + kCheckedBytes, sizeof expected);
  if (crc32c(meta, crc32c(header_bytes.first<kCheckedBytes>())) == expected) return Status::ok();
  return {Code::kProtocolError, "frame check failed: header or meta bytes were damaged in transit"};
}

}  // namespace mooncache::wire
