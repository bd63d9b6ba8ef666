// What the SSD tier moves, through the store above it, and how fast a start finds what lies on a disk. Used
// by `mooncache bench tiers`.
#pragma once

#include <cstdint>
#include <string>

#include "mooncache/status.h"

namespace mooncache {

struct DiskRatesOptions {
  std::string path;  // a folder; its file stays, for the next call
  uint64_t disk_bytes = 2ull << 30;
  uint64_t memory_bytes = 512ull << 20;
  uint64_t block_bytes = 1ull << 20;
  uint32_t depth = 32;  // blocks that are asked for at once
  uint32_t write_ms = 5000, read_ms = 5000;
  bool encrypted = false;  // with a key of the tenant
};

struct DiskRates {
  double written_bytes_per_s = 0, read_bytes_per_s = 0, reads_per_s = 0;
  // Processor time of the whole process for each byte that the disk moved.
  double write_cpu_ns_per_kib = 0, read_cpu_ns_per_kib = 0;
  uint64_t admitted_bytes = 0, written_bytes = 0;  // all of the call, with what a full disk gives up
  uint64_t encrypted_bytes = 0;                    // of the same
  uint64_t read_misses = 0, corrupt_blocks = 0;
  std::string queue;  // what moves the bytes: "io_uring..."
};

// Fills the disk once, then measures: puts at the pace of the disk, then reads of random blocks that are on
// the disk alone. Every block is checked on its way up. INVALID_ARGUMENT; what the store answers.
Result<DiskRates> disk_rates_benchmark(const DiskRatesOptions& options);

struct DiskStartOptions {
  std::string path;
  uint64_t records = 1'000'000;
};

struct DiskStart {
  uint64_t records = 0, index_bytes = 0;
  double cpu_s = 0, wall_s = 0;  // of opening the device
};

// Writes so many blocks of 64 bytes to a new disk, then opens it again.
Result<DiskStart> disk_start_benchmark(const DiskStartOptions& options);

}  // namespace mooncache
