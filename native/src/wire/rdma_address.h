// The address of an RDMA endpoint, as it is on the wire and as the devices' side knows it. A template,
// because neither side may know the other's types.
#pragma once

#include "wire/messages.h"

namespace mooncache::wire {

template <typename EndpointAddress>
RdmaAddress to_wire(const EndpointAddress& address) {
  RdmaAddress out;
  out.lid = address.lid;
  out.layer = static_cast<uint8_t>(address.layer);
  out.mtu = address.mtu;
  out.outstanding_reads = address.outstanding_reads;
  out.queue_pair = address.queue_pair;
  out.first_packet = address.first_packet;
  out.gid = address.gid;
  return out;
}

// What the peer wrote, not checked; connect() refuses values that are not possible.
template <typename EndpointAddress>
EndpointAddress from_wire(const RdmaAddress& in) {
  EndpointAddress address;
  address.lid = in.lid;
  address.layer = static_cast<decltype(address.layer)>(in.layer);
  address.mtu = in.mtu;
  address.outstanding_reads = in.outstanding_reads;
  address.queue_pair = in.queue_pair;
  address.first_packet = in.first_packet;
  address.gid = in.gid;
  return address;
}

}  // namespace mooncache::wire
