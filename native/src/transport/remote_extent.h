// What a node's answer to LOOKUP or RESERVE says of an extent, as a link takes it.
#pragma once

#include "mooncache/transport.h"
#include "wire/messages.h"

namespace mooncache {

inline RemoteExtent remote_extent(const wire::WireExtent& from) {
  RemoteExtent extent;
  extent.grant = from.grant;
  extent.segment = from.segment;
  extent.slot = from.slot;
  extent.generation = from.generation;
  extent.offset = from.offset;
  extent.size = from.size;
  return extent;
}

inline RemoteExtent remote_extent(const wire::WireExtent& from, const wire::Exposure& exposure) {
  RemoteExtent extent = remote_extent(from);
  extent.exposed = exposure.code == Code::kOk;
  extent.address = exposure.address;
  extent.keys = exposure.keys;
  return extent;
}

}  // namespace mooncache
