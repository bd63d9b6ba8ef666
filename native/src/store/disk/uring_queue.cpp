// io_uring by its system calls: two rings of memory shared with the kernel, and one call that submits and
// waits. The wake-up of other threads is a read of an eventfd, which ends like any other.
#include <linux/io_uring.h>
#include <linux/time_types.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstring>
#include <utility>

#include "store/disk/io_queue.h"

namespace mooncache::store::disk {

namespace {

constexpr uint64_t kWakeCookie = ~uint64_t{0};

class Mapping {
 public:
  Mapping() = default;
  Mapping(int fd, uint64_t offset, size_t size) : size_(size) {
    void* at = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd,
                      static_cast<off_t>(offset));
    at_ = at == MAP_FAILED ? nullptr : static_cast<std::byte*>(at);
  }
  ~Mapping() {
    if (at_ != nullptr) ::munmap(at_, size_);
  }
  Mapping(Mapping&& other) noexcept : at_(std::exchange(other.at_, nullptr)), size_(other.size_) {}
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(at_, other.at_);
    std::swap(size_, other.size_);
    return *this;
  }
  bool ok() const { return at_ != nullptr; }
  template <typename T>
  T* as(uint64_t offset) const {
    return static_cast<T*>(static_cast<void*>(at_ + offset));
  }

 private:
  std::byte* at_ = nullptr;
  size_t size_ = 0;
};

class UringQueue final : public IoQueue {
 public:
  ~UringQueue() override {
    if (ring_fd_ >= 0) ::close(ring_fd_);
    if (wake_fd_ >= 0) ::close(wake_fd_);
  }

  Status open(int fd, std::span<const iovec> buffers, uint32_t depth) {
    fd_ = fd;
    io_uring_params params{};
    // One thread submits and waits, so the kernel need not interrupt it. Older kernels do not know the flags.
    params.flags = IORING_SETUP_CQSIZE | kSingleIssuer | kDeferTaskrun;
    params.cq_entries = std::bit_ceil(depth + 1) * 2;
    const uint32_t entries = std::bit_ceil(depth + 1);
    ring_fd_ = setup(entries, params);
    if (ring_fd_ < 0 && errno == EINVAL) {
      params = {};
      ring_fd_ = setup(entries, params);
    }
    if (ring_fd_ < 0) return {Code::kUnsupported, std::string("io_uring_setup: ") + std::strerror(errno)};
    if ((params.features & IORING_FEAT_EXT_ARG) == 0 || (params.features & IORING_FEAT_SINGLE_MMAP) == 0)
      return {Code::kUnsupported, "io_uring of this kernel has no waits with a time limit"};
    if (Status mapped = map(params); !mapped) return mapped;
    depth_ = std::min(depth, params.sq_entries - 1);
    registered_ = !buffers.empty() && ::syscall(SYS_io_uring_register, ring_fd_, IORING_REGISTER_BUFFERS,
                                                buffers.data(), buffers.size()) == 0;
    wake_fd_ = ::eventfd(0, EFD_CLOEXEC);
    if (wake_fd_ < 0) return {Code::kInternal, "eventfd"};
    return Status::ok();
  }

  bool submit(const Io& io) override {
    if (under_way_ >= depth_) return false;
    io_uring_sqe& entry = next_entry();
    entry.fd = fd_;
    entry.off = io.offset;
    entry.user_data = io.cookie;
    if (io.kind == Io::Kind::kSync) {
      entry.opcode = IORING_OP_FSYNC;
      entry.fsync_flags = IORING_FSYNC_DATASYNC;
    } else {
      const bool read = io.kind == Io::Kind::kRead;
      const bool fixed = registered_ && io.buffer >= 0;
      entry.opcode = fixed ? (read ? IORING_OP_READ_FIXED : IORING_OP_WRITE_FIXED)
                           : (read ? IORING_OP_READ : IORING_OP_WRITE);
      entry.addr = reinterpret_cast<uint64_t>(io.memory.data);
      entry.len = static_cast<uint32_t>(io.memory.size);
      if (fixed) entry.buf_index = static_cast<uint16_t>(io.buffer);
    }
    ++under_way_;
    return true;
  }

  void begin() override {
    if (left_in_ring() > 0)
      (void)::syscall(SYS_io_uring_enter, ring_fd_, left_in_ring(), 0u, 0u, nullptr, size_t{0});
  }

  void wait(std::vector<IoEnd>& ends, int timeout_ms) override {
    arm_wake();
    __kernel_timespec limit{timeout_ms / 1000, (timeout_ms % 1000) * 1'000'000L};
    io_uring_getevents_arg argument{};
    argument.ts = reinterpret_cast<uint64_t>(&limit);
    // What the kernel does not take now (EAGAIN, EINTR) stays in the ring for the next call.
    (void)::syscall(SYS_io_uring_enter, ring_fd_, left_in_ring(), 1u,
                    IORING_ENTER_GETEVENTS | IORING_ENTER_EXT_ARG, &argument, sizeof argument);
    // Before the owner looks for what other threads want: what they ask for from here on wakes it again.
    woken_.store(false);
    reap(ends);
  }

  void wake() override {
    if (woken_.exchange(true)) return;  // it has not looked since the last one
    const uint64_t one = 1;
    (void)!::write(wake_fd_, &one, sizeof one);
  }

  std::string description() const override {
    return registered_ ? "io_uring with registered buffers" : "io_uring";
  }

 private:
  static constexpr uint32_t kSingleIssuer = 1u << 12, kDeferTaskrun = 1u << 13;  // Linux 6.0, 6.1

  static int setup(uint32_t entries, io_uring_params& params) {
    return static_cast<int>(::syscall(SYS_io_uring_setup, entries, &params));
  }
  static std::atomic_ref<uint32_t> shared(uint32_t* at) { return std::atomic_ref<uint32_t>(*at); }

  Status map(const io_uring_params& params) {
    const size_t rings = std::max<size_t>(params.sq_off.array + params.sq_entries * sizeof(uint32_t),
                                          params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe));
    rings_ = Mapping(ring_fd_, IORING_OFF_SQ_RING, rings);
    entries_ = Mapping(ring_fd_, IORING_OFF_SQES, params.sq_entries * sizeof(io_uring_sqe));
    if (!rings_.ok() || !entries_.ok()) return {Code::kUnsupported, "the rings of io_uring cannot be mapped"};
    sq_head_ = rings_.as<uint32_t>(params.sq_off.head);
    sq_tail_ = rings_.as<uint32_t>(params.sq_off.tail);
    sq_mask_ = *rings_.as<uint32_t>(params.sq_off.ring_mask);
    sq_array_ = rings_.as<uint32_t>(params.sq_off.array);
    cq_head_ = rings_.as<uint32_t>(params.cq_off.head);
    cq_tail_ = rings_.as<uint32_t>(params.cq_off.tail);
    cq_mask_ = *rings_.as<uint32_t>(params.cq_off.ring_mask);
    ends_ = rings_.as<io_uring_cqe>(params.cq_off.cqes);
    return Status::ok();
  }

  // There is room: at most `depth_` and the wake-up are under way, and the ring has one entry more.
  io_uring_sqe& next_entry() {
    const uint32_t tail = *sq_tail_;
    const uint32_t at = tail & sq_mask_;
    io_uring_sqe& entry = entries_.as<io_uring_sqe>(0)[at];
    entry = {};
    sq_array_[at] = at;
    shared(sq_tail_).store(tail + 1, std::memory_order_release);
    return entry;
  }
  uint32_t left_in_ring() const { return *sq_tail_ - shared(sq_head_).load(std::memory_order_acquire); }

  void arm_wake() {
    if (std::exchange(wake_armed_, true)) return;
    io_uring_sqe& entry = next_entry();
    entry.opcode = IORING_OP_READ;
    entry.fd = wake_fd_;
    entry.addr = reinterpret_cast<uint64_t>(&wake_count_);
    entry.len = sizeof wake_count_;
    entry.user_data = kWakeCookie;
  }

  void reap(std::vector<IoEnd>& ends) {
    uint32_t head = *cq_head_;
    const uint32_t tail = shared(cq_tail_).load(std::memory_order_acquire);
    for (; head != tail; ++head) {
      const io_uring_cqe& end = ends_[head & cq_mask_];
      if (end.user_data == kWakeCookie) {
        wake_armed_ = false;
        continue;
      }
      ends.push_back({end.user_data, end.res});
      --under_way_;
    }
    shared(cq_head_).store(head, std::memory_order_release);
  }

  int fd_ = -1, ring_fd_ = -1, wake_fd_ = -1;
  Mapping rings_, entries_;
  uint32_t *sq_head_ = nullptr, *sq_tail_ = nullptr, *sq_array_ = nullptr;
  uint32_t *cq_head_ = nullptr, *cq_tail_ = nullptr;
  uint32_t sq_mask_ = 0, cq_mask_ = 0;
  io_uring_cqe* ends_ = nullptr;
  uint32_t depth_ = 0, under_way_ = 0;
  bool registered_ = false, wake_armed_ = false;
  std::atomic<bool> woken_{false};
  uint64_t wake_count_ = 0;
};

}  // namespace

Result<std::unique_ptr<IoQueue>> open_uring_queue(int fd, std::span<const iovec> buffers, uint32_t depth) {
  auto queue = std::make_unique<UringQueue>();
  if (Status opened = queue->open(fd, buffers, depth); !opened) return opened;
  return std::unique_ptr<IoQueue>(std::move(queue));
}

std::unique_ptr<IoQueue> open_io_queue(int fd, std::span<const iovec> buffers,
                                       const IoQueueOptions& options) {
  std::string why = "io_uring is switched off";
  if (options.allow_uring) {
    auto queue = open_uring_queue(fd, buffers, options.depth);
    if (queue) return std::move(*queue);
    why = queue.status().message;
  }
  return open_thread_queue(fd, options.depth, options.threads, std::move(why));
}

}  // namespace mooncache::store::disk
