// Blocks on a GPU that RDMA devices reach: a fake GPU, whose memory is a dma-buf for fake devices.
// What a grant opens, and when it ends.
#include <dlfcn.h>

#include <fstream>

#include "rdma/fabric.h"
#include "server/rdma_fixture.h"
#include "store/device_memory.h"
#include "wire/rdma_address.h"

namespace mooncache::testing {
namespace {

rdma::Options options(const std::filesystem::path& sysfs) {
  rdma::Options options;
  options.library = MOONCACHE_FAKE_VERBS;
  options.sysfs_folder = sysfs;
  return options;
}

struct Granted {
  Code code = Code::kOk;
  uint64_t grant = 0;
  uint64_t size = 0;
  wire::Exposure exposure;
};

// A peer that has a device, too.
class PeerDevice {
 public:
  explicit PeerDevice(const StoreServer& server) : peer(server) {}
  bool open(const rdma::Options& options) {
    auto fabric = rdma::open_fabric(options);
    if (!fabric || !peer.login()) return false;
    fabric_ = *fabric;
    auto domain = fabric_->rails()[0]->make_domain();
    if (!domain) return false;
    domain_ = std::move(*domain);
    buffer.resize(kMiB);
    auto memory = domain_->attach({buffer.data(), buffer.size()});
    if (!memory) return false;
    memory_ = std::move(*memory);
    return meet() == Code::kOk;
  }
  // A new pair of endpoints: those that were refused something are of no use any more.
  Code meet() {
    auto endpoint = domain_->make_endpoint(4);
    if (!endpoint) return endpoint.code();
    endpoint_ = std::move(*endpoint);
    Writer meta;
    const auto mine = wire::to_wire(endpoint_->address());
    wire::encode_items<wire::RdmaAddress>(meta, std::span(&mine, 1));
    const auto answer = peer.call(Opcode::kEndpoint, meta);
    if (!answer) return Code::kConnectionLost;
    if (!answer->status) return answer->status.code;
    Reader reader(answer->body);
    const auto theirs = wire::decode_items<wire::RdmaAddress>(reader);
    if (!theirs || theirs->size() != 1) return Code::kProtocolError;
    if (theirs->front().code != Code::kOk) return theirs->front().code;
    return endpoint_->connect(wire::from_wire<rdma::EndpointAddress>(theirs->front())).code;
  }
  Granted look_up(const Key& key) {
    return granted<wire::LookupResult>(Opcode::kLookup, Peer::keys_meta({key}));
  }
  Granted reserve(const Key& key, uint64_t size) {
    Writer meta;
    wire::ReserveRequest{0, {{key, size}}}.encode(meta);
    return granted<wire::ReserveResult>(Opcode::kReserve, meta);
  }
  rdma::WorkOutcome move(bool write, const Granted& to, int64_t offset, uint32_t length) {
    rdma::Post post;
    post.write = write;
    post.add(buffer.data(), length, memory_->local_key());
    post.remote_address = to.exposure.address + static_cast<uint64_t>(offset);
    post.remote_key = to.exposure.keys[0];
    if (endpoint_->post(std::span(&post, 1)) != 1) return rdma::WorkOutcome::kFailed;
    rdma::Reaped reaped{0, rdma::WorkOutcome::kFailed, 0};
    const Deadline deadline = Deadline::after(kPatience);
    while (endpoint_->poll(std::span(&reaped, 1)) == 0) {
      if (deadline.expired()) return rdma::WorkOutcome::kGone;
      std::this_thread::yield();
    }
    if (reaped.outcome != rdma::WorkOutcome::kDone) {
      EXPECT_EQ(meet(), Code::kOk);
    }
    return reaped.outcome;
  }
  rdma::WorkOutcome read(const Granted& from) {
    return move(false, from, 0, static_cast<uint32_t>(from.size));
  }
  bool holds(const Bytes& block) const { return std::equal(block.begin(), block.end(), buffer.begin()); }

  Peer peer;
  Bytes buffer;

 private:
  template <typename Result>
  Granted granted(Opcode opcode, const Writer& meta) {
    Granted out;
    const auto answer = peer.call(opcode, meta, {}, wire::kFlagExpose);
    if (!answer) return {Code::kConnectionLost, 0, 0, {}};
    Reader reader(answer->body);
    const auto results = wire::decode_items<Result>(reader);
    const auto exposures = wire::decode_items<wire::Exposure>(reader);
    if (!results || !exposures || results->size() != 1 || exposures->size() != 1)
      return {Code::kProtocolError, 0, 0, {}};
    out.code = results->front().code;
    out.grant = results->front().extent.grant;
    out.size = results->front().extent.size;
    out.exposure = exposures->front();
    return out;
  }

  std::shared_ptr<rdma::Fabric> fabric_;
  std::unique_ptr<rdma::Domain> domain_;
  std::unique_ptr<rdma::Registration> memory_;
  std::unique_ptr<rdma::Endpoint> endpoint_;
};

class GpuRdmaTest : public ServerTest {
 protected:
  void SetUp() override {
    ServerTest::SetUp();
    fake().reset(1);
    sysfs = folder / "sys";
    std::filesystem::create_directories(sysfs);
    config.unix_path.clear();
    config.store.open_arena = store::device_arena(0, MOONCACHE_FAKE_CUDA);
    config.store.capacity_bytes = 8 * kMiB;
    config.rdma = options(sysfs);
    void* const library = dlopen(MOONCACHE_FAKE_CUDA, RTLD_NOW | RTLD_LOCAL);
    fail = reinterpret_cast<decltype(fail)>(dlsym(library, "fake_cuda_fail"));
    hang = reinterpret_cast<decltype(hang)>(dlsym(library, "fake_cuda_hang"));
    flushes = reinterpret_cast<decltype(flushes)>(dlsym(library, "fake_cuda_flushes"));
    tell = reinterpret_cast<decltype(tell)>(dlsym(library, "fake_cuda_on_dma_buf"));
    tell([](int fd, void* memory, size_t size) { fake().set_dma_buf(fd, memory, size); });
  }
  void TearDown() override {
    hang(0);
    fail("", 0, 0);
    ServerTest::TearDown();
    server.reset();
    tell(nullptr);
    EXPECT_EQ(fake().live_objects(), 0u);
    fake().reset(1);
  }
  bool logged(std::string_view event, std::string_view words) {
    for (auto& entry : server->drain_log(1000)) log.push_back(std::move(entry));
    return std::any_of(log.begin(), log.end(), [&](const ServerLogEvent& entry) {
      return entry.event == event && entry.message.find(words) != std::string::npos;
    });
  }
  std::filesystem::path sysfs;
  std::vector<ServerLogEvent> log;
  void (*fail)(const char*, int, int) = nullptr;
  void (*hang)(int) = nullptr;
  int (*flushes)() = nullptr;
  void (*tell)(void (*)(int, void*, size_t)) = nullptr;
};

TEST_F(GpuRdmaTest, AGrantOpensItsBytesAndNoOthers) {
  start();
  EXPECT_TRUE(logged("rdma_arena", "cuda:0 (Fake GPU) by dma-buf"));
  PeerDevice reader(*server);
  ASSERT_TRUE(reader.open(config.rdma));
  // extents that begin and end anywhere in their pages, each beside that of another block
  const std::vector<size_t> sizes = {700, 5'000, 4'096, 70'001, 1, 300'000, 511};
  for (const size_t size : sizes) ASSERT_EQ(reader.peer.put(key_of(size), block_of(size, size)), Code::kOk);
  for (const size_t size : sizes) {
    SCOPED_TRACE(size);
    const Granted granted = reader.look_up(key_of(size));
    ASSERT_EQ(granted.exposure.code, Code::kOk);
    ASSERT_EQ(granted.size, size);
    EXPECT_LT(granted.exposure.address, 64u << 10) << "the name tells nothing about where it lies";
    EXPECT_EQ(reader.read(granted), rdma::WorkOutcome::kDone);
    EXPECT_TRUE(reader.holds(block_of(size, size)));
    const auto end = static_cast<int64_t>(size);
    EXPECT_EQ(reader.move(false, granted, end, 1), rdma::WorkOutcome::kRefused);
    EXPECT_EQ(reader.move(false, granted, -1, 1), rdma::WorkOutcome::kRefused);
    EXPECT_EQ(reader.move(false, granted, 0, static_cast<uint32_t>(size) + 1), rdma::WorkOutcome::kRefused);
    EXPECT_EQ(reader.move(true, granted, 0, 1), rdma::WorkOutcome::kRefused);
    EXPECT_EQ(reader.read(granted), rdma::WorkOutcome::kDone);
    PeerDevice other(*server);
    ASSERT_TRUE(other.open(config.rdma));
    EXPECT_EQ(other.read(granted), rdma::WorkOutcome::kRefused);
    ASSERT_TRUE(reader.peer.call(Opcode::kRelease, Peer::grants_meta({granted.grant})));
    EXPECT_EQ(reader.read(granted), rdma::WorkOutcome::kRefused);
  }
  EXPECT_EQ(fake().registrations(), 1u) << "only that of this side";
}

TEST_F(GpuRdmaTest, WhatIsWrittenInPlaceIsSeenByTheGpuAndEndsWithTheCommit) {
  start();
  PeerDevice writer(*server);
  ASSERT_TRUE(writer.open(config.rdma));
  ASSERT_EQ(writer.peer.put(key_of(1), block_of(1, 1'000)), Code::kOk);
  const Bytes block = block_of(2, 70'001);
  const Granted room = writer.reserve(key_of(2), block.size());
  ASSERT_EQ(room.exposure.code, Code::kOk);
  ASSERT_EQ(writer.peer.put(key_of(3), block_of(3, 1'000)), Code::kOk);
  std::copy(block.begin(), block.end(), writer.buffer.begin());
  EXPECT_EQ(writer.move(true, room, 0, 70'001), rdma::WorkOutcome::kDone);
  EXPECT_EQ(writer.move(true, room, 70'001, 1), rdma::WorkOutcome::kRefused);
  EXPECT_EQ(writer.move(false, room, 0, 1), rdma::WorkOutcome::kRefused);
  const int before = flushes();
  EXPECT_EQ(writer.peer.commit(room.grant, crc32c(block), wire::CommitItem::kFlagOneSided), Code::kOk);
  EXPECT_EQ(flushes(), before + 1);
  EXPECT_EQ(writer.move(true, room, 0, 1), rdma::WorkOutcome::kRefused);
  EXPECT_EQ(writer.peer.get(key_of(2)).second, block);
  EXPECT_EQ(writer.peer.get(key_of(1)).second, block_of(1, 1'000));
  EXPECT_EQ(writer.peer.get(key_of(3)).second, block_of(3, 1'000));
}

TEST_F(GpuRdmaTest, AWriteThatTheGpuDoesNotConfirmIsNoBlock) {
  start();
  PeerDevice writer(*server);
  ASSERT_TRUE(writer.open(config.rdma));
  const Granted room = writer.reserve(key_of(2), 5'000);
  ASSERT_EQ(room.exposure.code, Code::kOk);
  fail("cuFlushGPUDirectRDMAWrites", 700, 0);
  EXPECT_NE(writer.peer.commit(room.grant, 0, wire::CommitItem::kFlagOneSided), Code::kOk);
  EXPECT_EQ(writer.look_up(key_of(2)).code, Code::kNotFound);
  EXPECT_EQ(stat("store_reservations"), 0u);
  const Granted again = writer.reserve(key_of(2), 5'000);
  ASSERT_EQ(again.exposure.code, Code::kOk);
  fail("cuFlushGPUDirectRDMAWrites", 801, 0);  // this GPU has no such thing: it needs none
  EXPECT_EQ(writer.peer.commit(again.grant, 0, wire::CommitItem::kFlagOneSided), Code::kOk);
}

TEST_F(GpuRdmaTest, WithoutDmaBufThroughPeerMemoryWithoutBothOverTcp) {
  fail("cuMemGetHandleForAddressRange", 801, 0);
  start();
  EXPECT_TRUE(logged("rdma_unavailable", "the devices refuse cuda:0 (Fake GPU)"));
  EXPECT_TRUE(logged("rdma_unavailable", "cuMemGetHandleForAddressRange"));
  EXPECT_TRUE(logged("rdma_unavailable", "nvidia-peermem is not loaded"));
  {
    PeerDevice reader(*server);
    EXPECT_FALSE(reader.open(config.rdma));
    EXPECT_EQ(reader.meet(), Code::kTransportUnavailable);
    ASSERT_EQ(reader.peer.put(key_of(1), block_of(1, 5'000)), Code::kOk);
    EXPECT_EQ(reader.peer.get(key_of(1)).second, block_of(1, 5'000));
  }
  server->stop(Deadline::after_ms(1000));
  server.reset();
  fake().set_dma_buf_supported(0, false);
  std::filesystem::create_directories(sysfs / "module" / "nvidia_peermem");
  start();
  EXPECT_TRUE(logged("rdma_arena", "by nvidia-peermem, because fake0 and its driver cannot register"));
  PeerDevice reader(*server);
  ASSERT_TRUE(reader.open(config.rdma));
  ASSERT_EQ(reader.peer.put(key_of(1), block_of(1, 5'000)), Code::kOk);
  EXPECT_EQ(reader.look_up(key_of(1)).exposure.code, Code::kOk);
  fake().fail("ibv_reg_mr_iova", ENOMEM, -1);
  EXPECT_EQ(reader.look_up(key_of(1)).exposure.code, Code::kTransportUnavailable) << "this one by TCP";
  fake().fail("ibv_reg_mr_iova", 0, 0);
  EXPECT_EQ(reader.peer.get(key_of(1)).second, block_of(1, 5'000));
}

TEST_F(GpuRdmaTest, AGpuThatStopsEndsItsGrantsAndComesBack) {
  start();
  PeerDevice reader(*server);
  ASSERT_TRUE(reader.open(config.rdma));
  ASSERT_EQ(reader.peer.put(key_of(1), block_of(1, 5'000)), Code::kOk);
  ASSERT_EQ(reader.peer.put(key_of(2), block_of(2, 5'000)), Code::kOk);
  const Granted held = reader.look_up(key_of(1));
  const Granted room = reader.reserve(key_of(3), 5'000);
  ASSERT_EQ(reader.read(held), rdma::WorkOutcome::kDone);
  hang(1);
  Peer witness(*server);
  ASSERT_TRUE(witness.login());
  EXPECT_NE(witness.get(key_of(2)).first, Code::kOk);
  ASSERT_TRUE(eventually("arena_lost_bytes", 8 * kMiB));
  EXPECT_EQ(stat("store_draining"), 1u);
  EXPECT_TRUE(logged("arena_damaged", "until it answers again"));
  const Deadline deadline = Deadline::after(kPatience);
  while (fake().registrations() > 1 && !deadline.expired()) std::this_thread::yield();
  EXPECT_EQ(reader.read(held), rdma::WorkOutcome::kRefused);
  EXPECT_EQ(reader.move(true, room, 0, 1), rdma::WorkOutcome::kRefused);
  EXPECT_EQ(reader.look_up(key_of(1)).exposure.code, Code::kTransportUnavailable);
  EXPECT_EQ(reader.peer.commit(room.grant, 0, wire::CommitItem::kFlagOneSided), Code::kNodeUnavailable);
  EXPECT_EQ(stat("store_reservations"), 0u);
  EXPECT_EQ(reader.reserve(key_of(4), 100).code, Code::kDraining);
  EXPECT_EQ(reader.peer.get(key_of(1)).first, Code::kNodeUnavailable) << "and is not given up for it";
  hang(0);
  ASSERT_TRUE(eventually("arena_lost_bytes", 0));
  EXPECT_EQ(stat("store_draining"), 0u);
  EXPECT_TRUE(logged("arena_back", "answers again"));
  EXPECT_EQ(reader.read(held), rdma::WorkOutcome::kRefused) << "what ended stays ended";
  const Granted again = reader.look_up(key_of(1));
  ASSERT_EQ(again.exposure.code, Code::kOk);
  EXPECT_EQ(reader.read(again), rdma::WorkOutcome::kDone);
  EXPECT_TRUE(reader.holds(block_of(1, 5'000)));
  ASSERT_EQ(reader.peer.put(key_of(4), block_of(4, 5'000)), Code::kOk);
  EXPECT_EQ(reader.peer.get(key_of(4)).second, block_of(4, 5'000));
}

}  // namespace
}  // namespace mooncache::testing
