#include "rdma/device.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace mooncache::rdma {

namespace {

constexpr uint32_t kGidsMax = 256;
// A GPU's memory in pages as its driver pins them. Where a range lies in such a page shows in its name, so
// that the device can use pages of this size.
constexpr uint64_t kDevicePageBytes = 64 << 10;

class VerbsRegistration final : public Registration {
 public:
  VerbsRegistration(std::shared_ptr<Protection> protection, ibv_mr* mr, uint64_t address, std::string how)
      : protection_(std::move(protection)), mr_(mr), address_(address), how_(std::move(how)) {}
  ~VerbsRegistration() override {
    if (protection_->verbs().dereg_mr(mr_) != 0) protection_->sound = false;
  }
  uint32_t local_key() const override { return mr_->lkey; }
  uint32_t remote_key() const override { return mr_->rkey; }
  uint64_t remote_address() const override { return address_; }
  std::string how() const override { return how_; }

 private:
  const std::shared_ptr<Protection> protection_;
  ibv_mr* const mr_;
  const uint64_t address_;
  const std::string how_;
};

// Whether the kernel module is loaded that lets devices register addresses of a GPU as if they were pages.
bool has_peer_memory(const Options& options) {
  return access((options.sysfs_folder + "/module/nvidia_peermem").c_str(), F_OK) == 0 ||
         access((options.sysfs_folder + "/module/nv_peer_mem").c_str(), F_OK) == 0;
}

const char* const kNoPeerMemory = "nvidia-peermem is not loaded (modprobe nvidia-peermem)";
const char* const kOldLibrary = "this libibverbs lacks ibv_reg_dmabuf_mr (rdma-core 34 or newer is needed)";

// What an errno of ibv_reg_dmabuf_mr says. A device that cannot do it at all answers EOPNOTSUPP.
std::string why_no_dma_buf(const std::string& device, int error) {
  if (error == EOPNOTSUPP || error == EPROTONOSUPPORT || error == ENOSYS)
    return device + " and its driver cannot register a dma-buf";
  return "ibv_reg_dmabuf_mr on " + device + " failed: " + std::strerror(error);
}

class ProtectionDomain final : public Domain {
 public:
  explicit ProtectionDomain(std::shared_ptr<Protection> protection) : protection_(std::move(protection)) {}

  Result<std::unique_ptr<Registration>> expose(Slice memory, bool writable) override {
    return register_range(memory, rights_of_peer(writable), address_in_page(memory));
  }
  Result<std::unique_ptr<Registration>> attach(Slice memory) override {
    // requests of this side name their memory by where it lies
    return register_range(memory, IBV_ACCESS_LOCAL_WRITE, reinterpret_cast<uintptr_t>(memory.data));
  }
  Result<std::unique_ptr<Registration>> attach_device(const DeviceRange& memory) override {
    return register_device(memory, IBV_ACCESS_LOCAL_WRITE, memory.address);
  }
  Result<std::unique_ptr<Registration>> expose_device(const DeviceRange& memory, bool writable) override {
    return register_device(memory, rights_of_peer(writable), memory.address % kDevicePageBytes);
  }
  Result<std::unique_ptr<Endpoint>> make_endpoint(uint32_t depth) override {
    return make_queue_pair(protection_, depth);
  }
  bool sound() const override { return protection_->sound; }

 private:
  static int rights_of_peer(bool writable) {
    return writable ? IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE : IBV_ACCESS_REMOTE_READ;
  }

  // `named`: what requests call the first byte. The kernel wants it to lie in its page where the memory lies
  // in its own; the device lets no peer pass the first and the last byte, though it maps whole pages.
  Result<std::unique_ptr<Registration>> register_device(const DeviceRange& memory, int access,
                                                        uint64_t named) {
    const Verbs& verbs = protection_->verbs();
    const std::string& device = protection_->port->info().device;
    std::string why = memory.no_dma_buf.empty() ? "no dma-buf was exported" : memory.no_dma_buf;
    if (memory.dma_buf_fd >= 0 && verbs.reg_dmabuf_mr == nullptr) {
      why = kOldLibrary;
    } else if (memory.dma_buf_fd >= 0) {
      errno = 0;
      ibv_mr* mr = verbs.reg_dmabuf_mr(protection_->pd, memory.dma_buf_offset, memory.size, named,
                                       memory.dma_buf_fd, access);
      if (mr != nullptr) return registered(mr, named, "dma-buf");
      why = why_no_dma_buf(device, errno);
    }
    if (!has_peer_memory(protection_->port->options()))
      return unavailable("no device memory can be registered: " + why + "; " + kNoPeerMemory);
    errno = 0;
    ibv_mr* mr = verbs.reg_mr_iova(protection_->pd, reinterpret_cast<void*>(memory.address), memory.size,
                                   named, access);
    if (mr != nullptr) return registered(mr, named, "nvidia-peermem, because " + why);
    return unavailable("no device memory can be registered: " + why + "; through nvidia-peermem on " +
                       device + " it failed: " + std::strerror(errno));
  }

  // Addresses as the peer sees them begin in the first page: nothing about this process shows.
  static uint64_t address_in_page(Slice memory) {
    static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    return reinterpret_cast<uintptr_t>(memory.data) & (page - 1);
  }

  Result<std::unique_ptr<Registration>> register_range(Slice memory, int access, uint64_t address) {
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
    return registered(mr, address, "pages");
  }

  std::unique_ptr<Registration> registered(ibv_mr* mr, uint64_t address, std::string how) {
    return std::make_unique<VerbsRegistration>(protection_, mr, address, std::move(how));
  }

  const std::shared_ptr<Protection> protection_;
};

}  // namespace

Result<std::unique_ptr<Domain>> Port::make_domain() {
  errno = 0;
  ibv_pd* pd = device_->verbs.alloc_pd(device_->context);
  if (pd == nullptr) return refused("ibv_alloc_pd on " + info().device, errno);
  return std::unique_ptr<Domain>(
      std::make_unique<ProtectionDomain>(std::make_shared<Protection>(shared_from_this(), pd)));
}

void Port::read_gids() {
  RailInfo now = info();
  std::string why;
  const bool found = choose_gid(*device_, options_, kGidsMax, now, why);
  if (found && (now.gid != info().gid || now.gid_index != info().gid_index)) {
    infos_.push_back(std::move(now));
    info_.store(&infos_.back());
  }
  addressed_.store(found);
}

std::string gpu_direct_of(const VerbsDevice& device, const Options& options) {
  std::string why = kOldLibrary;
  if (device.verbs.reg_dmabuf_mr != nullptr) {
    errno = 0;
    ibv_pd* pd = device.verbs.alloc_pd(device.context);
    if (pd == nullptr) {
      why = std::string("ibv_alloc_pd failed: ") + std::strerror(errno);
    } else {
      constexpr size_t kSomeBytes = 4096;
      errno = 0;
      ibv_mr* mr = device.verbs.reg_dmabuf_mr(pd, 0, kSomeBytes, 0, -1, IBV_ACCESS_LOCAL_WRITE);
      const int error = errno;
      if (mr != nullptr) (void)device.verbs.dereg_mr(mr);
      (void)device.verbs.dealloc_pd(pd);
      if (mr != nullptr || error == EBADF) return "dma-buf";
      why = why_no_dma_buf(device.name, error);
    }
  }
  if (has_peer_memory(options)) return "nvidia-peermem, because " + why;
  return "none, because " + why + ", and " + kNoPeerMemory;
}

Watcher::Watcher(std::vector<std::shared_ptr<VerbsDevice>> devices, std::vector<std::shared_ptr<Port>> ports)
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
      const bool lost = (seen & POLLIN) != 0 && !take_events(*devices_[i]);
      if (lost || (seen & (POLLERR | POLLHUP | POLLNVAL)) != 0) {
        devices_[i]->dead.store(true);
        watched[i + 1].fd = -1;
      }
    }
  }
}

// False: there will be no more events, as after a surprise removal.
bool Watcher::take_events(VerbsDevice& device) {
  ibv_async_event event{};
  errno = 0;
  while (device.verbs.get_async_event(device.context, &event) == 0) {
    const bool down = event.event_type == IBV_EVENT_PORT_ERR;
    const bool readdressed = event.event_type == IBV_EVENT_GID_CHANGE;
    if (down || readdressed || event.event_type == IBV_EVENT_PORT_ACTIVE) {
      for (const auto& port : ports_) {
        if (&port->device() != &device || static_cast<int>(port->info().port) != event.element.port_num)
          continue;
        if (!down) port->read_gids();  // an address may have come or gone while the port was down
        if (!readdressed) port->set_active(!down);
      }
    } else if (event.event_type == IBV_EVENT_DEVICE_FATAL) {
      device.dead.store(true);
    }
    device.verbs.ack_async_event(&event);
    errno = 0;
  }
  return errno == 0 || errno == EAGAIN || errno == EINTR;
}

}  // namespace mooncache::rdma
