// How fast a transport moves bytes between this process and a node: the native half of the transfer
// benchmark.
//
// Each thread has a link of its own and one batch in flight: so many blocks, submitted together and polled
// until the last completion; or, continuously, always so many blocks. A batch counts only when every transfer
// came back OK, and for reads with the checksum of the bytes that were put there: a benchmark of wrong bytes
// says nothing.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "mooncache/rdma_config.h"
#include "mooncache/status.h"
#include "mooncache/transport.h"

namespace mooncache {

struct ProbeOptions {
  std::string transport = "tcp";  // loopback (a fake node in this process), shm, rdma or tcp
  PeerDescription peer;           // not looked at for loopback
  RdmaConfig rdma;
  Direction direction = Direction::kRead;
  uint64_t block_bytes = 1 << 20;
  uint32_t batch = 8;          // blocks under way at a time, per thread
  uint32_t threads = 1;        // 64 at most
  uint64_t duration_ms = 500;  // no batch begins after this; an hour at most
  uint64_t warm_up_batches = 2;
  // Each block that is through is followed by another one at once, as the wires' own tools do it: nothing is
  // waited for but a place among the `batch` under way. Needs extents that may be written again (one-sided).
  bool continuous = false;
  bool verify = true;  // false: leave out checksums where the transport can; shows what they cost
};

struct ProbeResult {
  uint64_t bytes = 0;            // moved in the batches that count
  double seconds = 0;            // from the common start until the last thread's last batch was through
  double cpu_seconds = 0;        // processor time of the moving threads in that span
  std::vector<double> batch_us;  // of each batch (continuous: of each block), unsorted
};

// INVALID_ARGUMENT for sizes out of range, TRANSPORT_UNAVAILABLE with the reason, or what a transfer ended
// with.
//
// Writes go into reservations that are given up afterwards, so nothing stays on the node. Over a one-sided
// transport a reservation is written to again and again; over TCP, where the node refuses to take the same
// range twice, each batch asks for new ones, and that is part of its time.
Result<ProbeResult> probe_transfers(const ProbeOptions& options);

}  // namespace mooncache
