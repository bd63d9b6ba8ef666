// An opened device, its ports, and the objects made on them. A device is watched by one thread of the fabric
// that only reads asynchronous events: ports going down and up, devices that die.
#pragma once

#include <atomic>
#include <list>
#include <thread>

#include "rdma/fabric.h"
#include "rdma/verbs.h"

namespace mooncache::rdma {

struct VerbsDevice {
  VerbsDevice(const Verbs& verbs_in, ibv_context* context_in, std::string name_in)
      : verbs(verbs_in), context(context_in), name(std::move(name_in)) {}
  ~VerbsDevice() { (void)verbs.close_device(context); }
  VerbsDevice(const VerbsDevice&) = delete;
  VerbsDevice& operator=(const VerbsDevice&) = delete;

  const Verbs& verbs;
  ibv_context* const context;
  const std::string name;
  std::atomic<bool> dead{false};
};

class Port final : public Rail, public std::enable_shared_from_this<Port> {
 public:
  Port(std::shared_ptr<VerbsDevice> device, RailInfo info, const Options& options)
      : device_(std::move(device)), options_(options) {
    infos_.push_back(std::move(info));
    info_.store(&infos_.back());
  }

  const RailInfo& info() const override { return *info_.load(); }
  bool up() const override { return active_.load() && addressed_.load() && !device_->dead.load(); }
  Result<std::unique_ptr<Domain>> make_domain() override;

  VerbsDevice& device() const { return *device_; }
  const Options& options() const { return options_; }
  void set_active(bool active) { active_.store(active); }
  // The table of addresses changed. Connections made from now on use what is best in it now; a port without
  // any usable address is down.
  void read_gids();

 private:
  const std::shared_ptr<VerbsDevice> device_;
  const Options options_;
  std::list<RailInfo> infos_;  // appended to by the watcher only; who holds an old one may go on reading it
  std::atomic<const RailInfo*> info_{nullptr};
  std::atomic<bool> active_{true};
  std::atomic<bool> addressed_{true};
};

// Puts the best address of the port into `info`. False and a reason when there is none that can be used.
bool choose_gid(const VerbsDevice& device, const Options& options, uint32_t table_length, RailInfo& info,
                std::string& why);

// RailReport::gpu_direct, asked of the device itself with a dma-buf that does not exist.
std::string gpu_direct_of(const VerbsDevice& device, const Options& options);

// A protection domain; kept by what was made in it.
struct Protection {
  Protection(std::shared_ptr<Port> port_in, ibv_pd* pd_in) : port(std::move(port_in)), pd(pd_in) {}
  ~Protection() { (void)port->device().verbs.dealloc_pd(pd); }
  Protection(const Protection&) = delete;
  Protection& operator=(const Protection&) = delete;
  const Verbs& verbs() const { return port->device().verbs; }

  const std::shared_ptr<Port> port;
  ibv_pd* const pd;
  std::atomic<bool> sound{true};  // Domain::sound()
};

Result<std::unique_ptr<Endpoint>> make_queue_pair(std::shared_ptr<Protection> protection, uint32_t depth);

// Reads the asynchronous events of all devices until it is destroyed.
class Watcher {
 public:
  Watcher(std::vector<std::shared_ptr<VerbsDevice>> devices, std::vector<std::shared_ptr<Port>> ports);
  ~Watcher();
  Watcher(const Watcher&) = delete;
  Watcher& operator=(const Watcher&) = delete;

 private:
  void run();
  bool take_events(VerbsDevice& device);

  const std::vector<std::shared_ptr<VerbsDevice>> devices_;
  const std::vector<std::shared_ptr<Port>> ports_;
  int wake_fd_ = -1;
  std::thread thread_;
};

}  // namespace mooncache::rdma
