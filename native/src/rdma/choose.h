// How bytes are shared out among rails: decisions over plain values, without a device, a clock or a lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace mooncache::rdma {

// A piece never costs more in requests than it gains in balance: below the first size the request itself
// counts, above the second one a rail that stalls holds up too much.
inline constexpr uint32_t kPieceBytesMin = 64 << 10;
inline constexpr uint32_t kPieceBytesMax = 1 << 20;

// Bytes of one piece of a transfer of `length` bytes in registered memory over `rails` rails: four for each
// rail, so that one that is slower than it says ends with fewer of them. Whole packets, and never more than
// a device takes in one message (0: it does not say).
uint32_t piece_bytes(uint64_t length, size_t rails, uint32_t max_message_bytes);

// Where a PCI device sits: its host bridge, the bridges below it and the device itself, from the root down,
// "pci0000:3a/0000:3a:00.0/0000:3b:00.0". Empty, -1: unknown.
struct PciPlace {
  std::string path;
  int numa_node = -1;
};

// From near to far, in the words of `nvidia-smi topo`: one switch between them; several; the host bridge; two
// host bridges of one NUMA node; the link between NUMA nodes.
enum class Distance : uint8_t { kPix = 1, kPxb, kPhb, kNode, kSys, kUnknown };
const char* distance_name(Distance distance);  // "PIX" and so on
Distance distance(const PciPlace& one, const PciPlace& other);
// Of a device to the memory of a NUMA node.
Distance distance(int device_node, int memory_node);

// How much slower each rail counts for memory at these distances: the nearest as they are, all others half as
// fast. So a far rail carries bytes only when the near ones are down, or have more than twice as much to do.
std::vector<uint32_t> slowness(std::span<const Distance> rails);

// What a process has on one of its rails, over all of its connections.
struct RailLoad {
  uint64_t megabits_per_s = 0;
  uint64_t in_flight_bytes = 0;
  uint32_t links = 0;  // with a queue pair on it
  bool far = false;    // of the memory that matters
};

// Rails for a new connection, best first: the near ones, the fastest; among those of one speed the one with
// the fewest connections, then with the least under way; among equals they go round, beginning with the one
// that `turn` names, so that neither the connections of a process nor the processes of a host all begin at
// the first.
std::vector<size_t> order_rails(std::span<const RailLoad> rails, size_t turn);

// A number for how late `bytes` more would be through: by what is under way on the rail, of any link.
uint64_t time_through(const RailLoad& rail, uint64_t bytes, uint32_t slowness);

}  // namespace mooncache::rdma
