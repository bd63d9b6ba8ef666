// A connected pair of endpoints over the fake libibverbs, and what tests do with it.
#pragma once

#include <gtest/gtest.h>

#include <chrono>

#include "rdma/fabric.h"
#include "rdma/fake/fake_verbs.h"

namespace mooncache::testing {

using namespace rdma;  // NOLINT: tests of that namespace

inline Options fake_options() {
  Options options;
  options.library = MOONCACHE_FAKE_VERBS;
  return options;
}

// One side that asks and one that answers, connected.
struct Pair {
  std::unique_ptr<Domain> near_domain, far_domain;
  std::unique_ptr<Endpoint> near, far;
  Status connect(Rail& rail, Rail& far_rail, uint32_t depth = 8) {
    auto a = rail.make_domain();
    auto b = far_rail.make_domain();
    if (!a) return a.status();
    if (!b) return b.status();
    near_domain = std::move(*a);
    far_domain = std::move(*b);
    auto c = near_domain->make_endpoint(depth);
    auto d = far_domain->make_endpoint(0);
    if (!c) return c.status();
    if (!d) return d.status();
    near = std::move(*c);
    far = std::move(*d);
    if (Status status = near->connect(far->address()); !status) return status;
    return far->connect(near->address());
  }
};

class FabricTest : public ::testing::Test {
 protected:
  void SetUp() override { fake().reset(1); }
  void TearDown() override {
    fabric_.reset();
    EXPECT_EQ(fake().live_objects(), 0u);
  }
  static FakeVerbs& fake() { return fake_verbs(MOONCACHE_FAKE_VERBS); }
  Rail& rail(size_t i = 0) {
    if (!fabric_) {
      auto opened = open_fabric(options_);
      EXPECT_TRUE(opened) << opened.status().message;
      fabric_ = *opened;
    }
    return *fabric_->rails()[i];
  }
  static std::vector<Reaped> reap(Endpoint& endpoint, size_t count) {
    std::vector<Reaped> all;
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (all.size() < count && std::chrono::steady_clock::now() < until) {
      std::array<Reaped, 5> some;
      const size_t got = endpoint.poll(some);
      all.insert(all.end(), some.begin(), some.begin() + static_cast<ptrdiff_t>(got));
    }
    return all;
  }
  static Post post(bool write, std::span<std::byte> local, const Registration& mine,
                   const Registration& theirs, uint64_t id = 1) {
    Post made;
    made.id = id;
    made.write = write;
    made.add(local.data(), static_cast<uint32_t>(local.size()), mine.local_key());
    made.remote_address = theirs.remote_address();
    made.remote_key = theirs.remote_key();
    return made;
  }
  static Slice slice(std::vector<std::byte>& bytes) { return {bytes.data(), bytes.size()}; }
  Options options_ = fake_options();
  std::shared_ptr<Fabric> fabric_;
};

}  // namespace mooncache::testing
