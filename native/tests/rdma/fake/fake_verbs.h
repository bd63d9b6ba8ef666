// How tests steer the fake libibverbs (fake_verbs.cpp). Both ends of a connection are in this process
// and see the same fake network; its one thread moves the bytes, so that data lands while nobody polls,
// as with a real device.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <string>

namespace mooncache::testing {

class FakeVerbs {
 public:
  virtual ~FakeVerbs() = default;
  // Back to `devices` devices of one active RoCE port each, without faults. Nothing may be open.
  virtual void reset(uint32_t devices) = 0;
  // The call `name` ("ibv_reg_mr_iova", "post_send", ...) fails with `error` `times` times, after `skip` good
  // ones. Negative times: from then on always.
  virtual void fail(const std::string& name, int error, int times = 1, int skip = 0) = 0;
  // The call `name` (of registering, deregistering, making a queue pair) waits once it was made `after` times
  // more; for a minute at most. Negative: it waits no more.
  virtual void hold(const std::string& name, int after) = 0;
  virtual bool wait_until_held(const std::string& name) = 0;
  virtual void set_infiniband(uint32_t device) = 0;  // link layer and GID type; before it is opened
  virtual void set_port_active(uint32_t device, bool active) = 0;  // with the event that says so
  virtual void set_latency_us(uint32_t device, uint32_t us) = 0;   // per request
  virtual void set_mtu(uint32_t device, int mtu) = 0;    // as verbs number it; before the device is opened
  virtual void cut_path(uint32_t device, bool cut) = 0;  // requests end with RETRY_EXC, no event
  virtual void hang(uint32_t device, bool hung) = 0;     // moves, flushes and reports nothing
  virtual void remove(uint32_t device) = 0;              // surprise removal
  // The port's GID becomes another one (0 = it has none), with the event that says so.
  virtual void set_address(uint32_t device, uint8_t last) = 0;
  // From now on `fd` is a dma-buf over this memory; null takes it back.
  virtual void set_dma_buf(int fd, void* memory, uint64_t size) = 0;
  // A device without dma-buf: EOPNOTSUPP for every one. Before anything is registered.
  virtual void set_dma_buf_supported(uint32_t device, bool supported) = 0;
  // What a port takes in one message; a longer one ends with LOC_LEN_ERR. Before it is opened.
  virtual void set_max_message(uint32_t device, uint32_t bytes) = 0;
  // Ranges of one request; more are refused. Before it is opened.
  virtual void set_max_gather(uint32_t device, int ranges) = 0;
  // Reports of different queue pairs overtake each other; those of one do not.
  virtual void shuffle_reports(uint64_t seed) = 0;
  // The next report appears twice, or is followed by one about a request that nobody posted.
  virtual void repeat_report() = 0;
  virtual void invent_report(uint64_t id) = 0;
  virtual void flip_bits(uint32_t count) = 0;                       // in that many of the next requests
  virtual void fail_after(uint32_t device, uint64_t requests) = 0;  // then as if the path were cut; 0 = never

  virtual uint64_t bytes_moved(uint32_t device) const = 0;  // by requests posted there
  virtual uint64_t requests(uint32_t device) const = 0;
  virtual uint64_t live_objects() const = 0;  // domains, registrations, queues, queue pairs, channels
  virtual uint64_t registrations() const = 0;
  virtual int last_retry_count() const = 0;
  virtual int path_mtu(uint32_t device) const = 0;  // of the queue pair that was connected last
};

// The library that was built beside the tests; loaded once.
inline FakeVerbs& fake_verbs(const std::string& path) {
  static FakeVerbs* fake = [&] {
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    auto* entry = reinterpret_cast<FakeVerbs* (*)()>(dlsym(library, "mooncache_fake_verbs"));
    return entry();
  }();
  return *fake;
}

}  // namespace mooncache::testing
