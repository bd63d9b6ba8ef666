// The fake devices and the network between them, behind the calls of fake_verbs.cpp. One lock guards
// everything; the network's thread executes one request at a time under it, so whoever holds it finds no byte
// under way.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "rdma/abi.h"
#include "rdma/fake/fake_verbs.h"

namespace mooncache::testing {

using namespace verbs;  // NOLINT: their names all begin with ibv_

struct Fault {
  int error = 0;
  int times = 0;
  int skip = 0;
};

struct DeviceState {
  bool infiniband = false;
  bool active = true;
  bool cut = false;
  bool removed = false;
  bool hung = false;
  bool dma_buf = true;
  uint8_t address = 1;  // the last byte of its GID; 0 = it has none
  uint32_t latency_us = 0;
  ibv_mtu mtu = IBV_MTU_4096;
  ibv_mtu path_mtu = IBV_MTU_256;
  uint64_t fail_after = 0;
  uint32_t max_message_bytes = 8 << 20;
  int max_gather = 16;
  uint64_t bytes = 0;
  uint64_t requests = 0;
};

struct FakeDevice {
  ibv_device device{};
  uint32_t index = 0;
};

struct FakeContext {
  ibv_context context{};
  uint32_t index = 0;
  int event_pipe[2] = {-1, -1};
};

struct FakeMr {
  ibv_mr mr{};
  uint64_t iova = 0;
  int access = 0;
};

struct FakeCq {
  ibv_cq cq{};
  std::deque<ibv_wc> entries;
  bool armed = false;
};

struct FakeChannel {
  ibv_comp_channel channel{};
  int write_fd = -1;
};

struct FakeQp {
  ibv_qp qp{};
  uint32_t device = 0;
  uint32_t peer = 0;
  int access = 0;
  uint32_t depth = 0;
  uint32_t gathers = 0;
  ibv_qp_state state = IBV_QPS_RESET;
  struct Pending {
    ibv_send_wr request{};
    std::vector<ibv_sge> pieces;
    uint64_t length = 0;          // of all pieces
    std::vector<std::byte> copy;  // of inline data
    std::chrono::steady_clock::time_point due;
  };
  std::deque<Pending> pending;
};

class Network final : public FakeVerbs {
 public:
  Network();
  ~Network() override;

  void reset(uint32_t devices) override;
  void fail(const std::string& name, int error, int times, int skip) override;
  void hold(const std::string& name, int after) override;
  bool wait_until_held(const std::string& name) override;
  void set_infiniband(uint32_t device) override;
  void set_port_active(uint32_t device, bool active) override;
  void set_latency_us(uint32_t device, uint32_t us) override;
  void set_mtu(uint32_t device, int mtu) override;
  void cut_path(uint32_t device, bool cut) override;
  void hang(uint32_t device, bool hung) override;
  void remove(uint32_t device) override;
  void set_address(uint32_t device, uint8_t last) override;
  void set_dma_buf(int fd, void* memory, uint64_t size) override;
  void set_dma_buf_supported(uint32_t device, bool supported) override;
  void shuffle_reports(uint64_t seed) override;
  void repeat_report() override;
  void invent_report(uint64_t id) override;
  void flip_bits(uint32_t count) override;
  void fail_after(uint32_t device, uint64_t requests) override;
  void set_max_message(uint32_t device, uint32_t bytes) override;
  void set_max_gather(uint32_t device, int ranges) override;
  uint64_t bytes_moved(uint32_t device) const override;
  uint64_t requests(uint32_t device) const override;
  uint64_t live_objects() const override;
  uint64_t registrations() const override;
  int last_retry_count() const override { return retry_count.load(); }
  int path_mtu(uint32_t device) const override;

  // Without the lock below: others go on while it waits.
  void pass_gate(const std::string& name);
  // 0, or the errno that a test asked for.
  int fault(const std::string& name);
  void complete(FakeQp& qp, uint64_t id, ibv_wc_status status);
  void flush(FakeQp& qp);
  void say(uint32_t device, ibv_event_type what);
  DeviceState& state(const ibv_context* context);

  struct Gate {
    int left = -1;  // calls that pass; negative: all
    bool held = false;
  };
  std::mutex gate_mutex;
  std::condition_variable gate_changed;
  std::map<std::string, Gate> gates;

  mutable std::recursive_mutex mutex;
  std::condition_variable_any changed;
  std::vector<DeviceState> devices;
  std::vector<FakeDevice> handles;
  std::map<std::string, Fault> faults;
  std::map<uint32_t, FakeQp*> queue_pairs;
  std::map<uint32_t, FakeMr*> by_key;
  bool has_kept_memory(const ibv_pd* pd) const;
  std::vector<uint32_t> kept;         // keys of by_key whose memory could not be given back
  std::vector<ibv_pd*> kept_domains;  // that could not be given back because of such keys
  std::set<FakeContext*> contexts;
  uint64_t objects = 0;
  uint32_t next_number = 17;
  uint32_t next_key = 0x1000;
  uint32_t flips = 0;
  bool repeats = false;
  std::optional<uint64_t> invented;
  struct DmaBuf {
    std::byte* memory = nullptr;
    uint64_t size = 0;
  };
  std::map<int, DmaBuf> dma_bufs;
  std::atomic<int> retry_count{0};

 private:
  FakeQp* next_to_run(std::chrono::steady_clock::time_point now);
  void run();
  bool execute_one(std::chrono::steady_clock::time_point now);
  void execute(FakeQp& qp, const FakeQp::Pending& pending);
  ibv_wc_status move(FakeQp& from, FakeQp& to, const FakeQp::Pending& pending);
  std::byte* local(const FakeQp& from, const ibv_sge& piece, bool write) const;

  bool stopping_ = false;
  bool shuffled_ = false;
  std::mt19937_64 random_;
  std::thread thread_;
};

Network& network();

}  // namespace mooncache::testing
