// HELLO: what a peer says of itself, before it has proved anything.
#include <algorithm>

#include "wire/messages.h"

namespace mooncache::wire {

namespace {

std::optional<std::string> take_writer_text(Reader& in) {
  std::string text = in.str16();
  if (!in.ok() || text.size() > kMaxWriterTextBytes) return std::nullopt;
  for (char& c : text) {
    if (c < 0x20 || c > 0x7e) c = '?';
  }
  return text;
}

}  // namespace

void HelloRequest::encode(Writer& out) const {
  out.u16(minor);
  out.u16(flags);
  out.u32(pid);
  out.raw(client_nonce);
  out.str16(tenant);
  out.str16(client_name);
  out.str16(software_version);
  if ((flags & kFlagExpires) != 0) out.u64(expires_unix_s);
  if ((flags & kFlagWriter) == 0) return;
  out.u64(writer.id);
  out.u64(writer.started_unix_s);
  out.str16(writer.instance);
  out.str16(writer.build);
}

std::optional<HelloRequest> HelloRequest::decode(Meta meta) {
  Reader in(meta);
  HelloRequest hello;
  hello.minor = in.u16();
  hello.flags = in.u16();
  hello.pid = in.u32();
  const auto nonce = in.take(hello.client_nonce.size());
  if (nonce.size() == hello.client_nonce.size())
    std::copy(nonce.begin(), nonce.end(), hello.client_nonce.begin());
  hello.tenant = in.str16();
  hello.client_name = in.str16();
  hello.software_version = in.str16();
  if ((hello.flags & kFlagExpires) != 0) hello.expires_unix_s = in.u64();
  if ((hello.flags & kFlagWriter) != 0) {
    hello.writer.id = in.u64();
    hello.writer.started_unix_s = in.u64();
    auto instance = take_writer_text(in), build = take_writer_text(in);
    if (!instance || !build) return std::nullopt;
    hello.writer.instance = std::move(*instance);
    hello.writer.build = std::move(*build);
  }
  // Trailing bytes are allowed here alone: a newer peer may say more about itself (N/N+1).
  if (!in.ok()) return std::nullopt;
  return hello;
}

}  // namespace mooncache::wire
