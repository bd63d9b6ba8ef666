// Messages about where a node has blocks: in memory, or on a disk alone.
#include "wire/messages.h"

namespace mooncache::wire {

void MatchResponse::encode(Writer& out) const {
  out.u32(leading_run);
  out.u32(present);
  out.raw(bitmap);
  out.raw(on_disk);
  out.raw(shared);
}

std::optional<MatchResponse> MatchResponse::decode(Reader& in, uint32_t key_count) {
  MatchResponse response;
  response.leading_run = in.u32();
  response.present = in.u32();
  const size_t bytes = (size_t{key_count} + 7) / 8;
  const auto bits = in.take(bytes);
  const auto on_disk = in.take(in.remaining() > 0 ? bytes : 0);
  const auto shared = in.take(in.remaining() > 0 ? bytes : 0);
  if (!in.done() || response.leading_run > key_count || response.present > key_count) return std::nullopt;
  response.bitmap.assign(bits.begin(), bits.end());
  response.on_disk.assign(on_disk.begin(), on_disk.end());
  response.shared.assign(shared.begin(), shared.end());
  return response;
}

void PrefetchRequest::encode(Writer& out) const {
  out.u32(timeout_ms);
  out.u64(max_bytes);
  encode_keys(out, keys);
}

std::optional<PrefetchRequest> PrefetchRequest::decode(Meta meta) {
  Reader in(meta);
  PrefetchRequest request;
  request.timeout_ms = in.u32();
  request.max_bytes = in.u64();
  auto keys = decode_keys(in);
  if (!keys || !in.done()) return std::nullopt;
  request.keys = std::move(*keys);
  return request;
}

void PrefetchResponse::encode(Writer& out) const {
  out.u32(blocks);
  out.u64(bytes);
}

std::optional<PrefetchResponse> PrefetchResponse::decode(Reader& in) {
  PrefetchResponse response;
  response.blocks = in.u32();
  response.bytes = in.u64();
  return in.done() ? std::optional(response) : std::nullopt;
}

}  // namespace mooncache::wire
