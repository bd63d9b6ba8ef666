#include "rdma/device.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>

namespace mooncache::rdma {

namespace {

class Registration final : public Memory {
 public:
  Registration(std::shared_ptr<Protection> protection, ibv_mr* mr, uint64_t address)
      : protection_(std::move(protection)), mr_(mr), address_(address) {}
  ~Registration() override { (void)protection_->verbs().dereg_mr(mr_); }
  uint32_t local_key() const override { return mr_->lkey; }
  uint32_t remote_key() const override { return mr_->rkey; }
  uint64_t remote_address() const override { return address_; }

 private:
  const std::shared_ptr<Protection> protection_;
  ibv_mr* const mr_;
  const uint64_t address_;
};

class ProtectionDomain final : public Domain {
 public:
  explicit ProtectionDomain(std::shared_ptr<Protection> protection) : protection_(std::move(protection)) {}

  Result<std::unique_ptr<Memory>> expose(Slice memory, bool writable) override {
    return enroll(memory,
                  writable ? IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE : IBV_ACCESS_REMOTE_READ,
                  address_in_page(memory));
  }
  Result<std::unique_ptr<Memory>> attach(Slice memory) override {
    // requests of this side name their memory by where it lies
    return enroll(memory, IBV_ACCESS_LOCAL_WRITE, reinterpret_cast<uintptr_t>(memory.data));
  }
  Result<std::unique_ptr<Endpoint>> make_endpoint(uint32_t depth) override {
    return make_queue_pair(protection_, depth);
  }

 private:
  // Addresses as the peer sees them begin in the first page: nothing about this process shows.
  static uint64_t address_in_page(Slice memory) {
    static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    return reinterpret_cast<uintptr_t>(memory.data) & (page - 1);
  }

  Result<std::unique_ptr<Memory>> enroll(Slice memory, int access, uint64_t address) {
    errno = 0;
    ibv_mr* mr = protection_->verbs().reg_mr_iova(protection_->pd, memory.data, memory.size, address, access);
    if (mr == nullptr) {
      const int error = errno;
      if (error == ENOMEM) {
        return unavailable("registering " + std::to_string(memory.size) +
                           " bytes failed for want of memory; look at `ulimit -l` (memlock)");
      }
      return refused("ibv_reg_mr_iova of " + std::to_string(memory.size) + " bytes", error);
    }
    return std::unique_ptr<Memory>(std::make_unique<Registration>(protection_, mr, address));
  }

  const std::shared_ptr<Protection> protection_;
};

}  // namespace

Result<std::unique_ptr<Domain>> Port::make_domain() {
  errno = 0;
  ibv_pd* pd = device_->verbs.alloc_pd(device_->context);
  if (pd == nullptr) return refused("ibv_alloc_pd on " + info_.device, errno);
  return std::unique_ptr<Domain>(
      std::make_unique<ProtectionDomain>(std::make_shared<Protection>(shared_from_this(), pd)));
}

Watcher::Watcher(std::vector<std::shared_ptr<Device>> devices, std::vector<std::shared_ptr<Port>> ports)
    : devices_(std::move(devices)), ports_(std::move(ports)), wake_fd_(eventfd(0, EFD_CLOEXEC)) {
  for (const auto& device : devices_) {
    const int fd = device->context->async_fd;
    (void)fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
  }
  thread_ = std::thread([this] { run(); });
}

Watcher::~Watcher() {
  const uint64_t one = 1;
  (void)!::write(wake_fd_, &one, sizeof one);
  thread_.join();
  (void)::close(wake_fd_);
}

void Watcher::run() {
  std::vector<pollfd> watched{{wake_fd_, POLLIN, 0}};
  for (const auto& device : devices_) watched.push_back({device->context->async_fd, POLLIN, 0});
  for (;;) {
    if (poll(watched.data(), watched.size(), -1) < 0 && errno != EINTR) return;
    if (watched[0].revents != 0) return;
    for (size_t i = 0; i < devices_.size(); ++i) {
      const short seen = watched[i + 1].revents;
      if ((seen & POLLIN) != 0) take_events(*devices_[i]);
      if ((seen & (POLLERR | POLLHUP | POLLNVAL)) != 0) {
        devices_[i]->dead.store(true);
        watched[i + 1].fd = -1;
      }
    }
  }
}

void Watcher::take_events(Device& device) {
  ibv_async_event event{};
  while (device.verbs.get_async_event(device.context, &event) == 0) {
    const bool down = event.event_type == IBV_EVENT_PORT_ERR;
    if (down || event.event_type == IBV_EVENT_PORT_ACTIVE) {
      for (const auto& port : ports_) {
        const bool same =
            &port->device() == &device && static_cast<int>(port->info().port) == event.element.port_num;
        if (same) port->set_active(!down);
      }
    } else if (event.event_type == IBV_EVENT_DEVICE_FATAL) {
      device.dead.store(true);
    }
    device.verbs.ack_async_event(&event);
  }
}

}  // namespace mooncache::rdma
