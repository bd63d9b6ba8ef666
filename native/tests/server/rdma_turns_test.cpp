// What devices have to be told takes long. Between two commands of one connection the others of its loop are
// served.
#include "rdma/fabric.h"
#include "server/rdma_fixture.h"
#include "wire/rdma_address.h"

namespace mooncache::testing {
namespace {

constexpr int kBlocks = 8;

class RdmaTurnsTest : public ServerTest {
 protected:
  void SetUp() override {
    ServerTest::SetUp();
    fake().reset(1);
    std::filesystem::create_directories(folder / "sys");
    config.unix_path.clear();
    config.rdma.library = MOONCACHE_FAKE_VERBS;
    config.rdma.sysfs_folder = folder / "sys";
    start();
    auto fabric = rdma::open_fabric(config.rdma);
    ASSERT_TRUE(fabric) << fabric.status().message;
    fabric_ = *fabric;
    auto domain = fabric_->rails()[0]->make_domain();
    ASSERT_TRUE(domain);
    domain_ = std::move(*domain);
    for (int i = 0; i < 4; ++i) {
      auto endpoint = domain_->make_endpoint(4);
      ASSERT_TRUE(endpoint);
      addresses_.push_back(wire::to_wire((*endpoint)->address()));
      endpoints_.push_back(std::move(*endpoint));
    }
    busy_ = std::make_unique<Peer>(*server);
    other_ = std::make_unique<Peer>(*server);
    ASSERT_TRUE(busy_->login());
    ASSERT_TRUE(other_->login());
  }
  void TearDown() override {
    for (const char* name : {"ibv_reg_mr_iova", "ibv_dereg_mr", "ibv_create_qp"}) fake().hold(name, -1);
    busy_.reset();
    other_.reset();
    endpoints_.clear();
    domain_.reset();
    fabric_.reset();
    ServerTest::TearDown();
    server.reset();
    EXPECT_EQ(fake().live_objects(), 0u);
    fake().reset(1);
  }

  void meet() {
    Writer meta;
    wire::encode_items<wire::RdmaAddress>(meta, std::span(addresses_).first(1));
    ASSERT_TRUE(busy_->call(Opcode::kEndpoint, meta));
  }

  // The answer to `frame`, and that of another connection while `call` is held in the middle of it.
  std::optional<Reply> served_between(const std::string& call, const Bytes& frame) {
    fake().hold(call, 2);
    EXPECT_TRUE(busy_->send(frame));
    EXPECT_TRUE(fake().wait_until_held(call));
    EXPECT_TRUE(other_->send(Peer::frame(Opcode::kPing)));
    fake().hold(call, 2);
    EXPECT_TRUE(other_->reply()) << "nothing came in the middle of " << call;
    EXPECT_TRUE(fake().wait_until_held(call)) << "the others were served at the end only";
    fake().hold(call, -1);
    return busy_->reply();
  }
  template <typename Result>
  std::vector<uint64_t> grants_of(const std::optional<Reply>& reply) {
    if (!reply || !reply->status) return {};
    Reader reader(reply->body);
    const auto results = wire::decode_items<Result>(reader);
    const auto exposures = wire::decode_items<wire::Exposure>(reader);
    if (!results || !exposures || exposures->size() != results->size()) return {};
    std::vector<uint64_t> grants;
    for (size_t i = 0; i < results->size(); ++i) {
      if ((*results)[i].code != Code::kOk || (*exposures)[i].code != Code::kOk) continue;
      grants.push_back((*results)[i].extent.grant);
    }
    return grants;
  }
  static Bytes reserve_frame() {
    wire::ReserveRequest request;
    for (int i = 0; i < kBlocks; ++i) request.items.push_back({key_of(i), kMiB});
    Writer meta;
    request.encode(meta);
    return Peer::frame(Opcode::kReserve, meta.view(), {}, wire::kFlagExpose);
  }
  std::vector<uint64_t> reserved() {
    EXPECT_TRUE(busy_->send(reserve_frame()));
    const auto grants = grants_of<wire::ReserveResult>(busy_->reply());
    EXPECT_EQ(grants.size(), kBlocks);
    return grants;
  }

  std::shared_ptr<rdma::Fabric> fabric_;
  std::unique_ptr<rdma::Domain> domain_;
  std::vector<std::unique_ptr<rdma::Endpoint>> endpoints_;
  std::vector<wire::RdmaAddress> addresses_;
  std::unique_ptr<Peer> busy_, other_;
};

TEST_F(RdmaTurnsTest, QueuePairs) {
  Writer meta;
  wire::encode_items<wire::RdmaAddress>(meta, addresses_);
  fake().hold("ibv_create_qp", 1);
  ASSERT_TRUE(busy_->send(Peer::frame(Opcode::kEndpoint, meta.view())));
  ASSERT_TRUE(fake().wait_until_held("ibv_create_qp"));
  ASSERT_TRUE(other_->send(Peer::frame(Opcode::kPing)));
  fake().hold("ibv_create_qp", 1);
  EXPECT_TRUE(other_->reply());
  EXPECT_TRUE(fake().wait_until_held("ibv_create_qp"));
  fake().hold("ibv_create_qp", -1);
  const auto answer = busy_->reply();
  ASSERT_TRUE(answer);
  Reader reader(answer->body);
  const auto theirs = wire::decode_items<wire::RdmaAddress>(reader);
  ASSERT_TRUE(theirs);
  ASSERT_EQ(theirs->size(), addresses_.size());
  for (const auto& address : *theirs) EXPECT_EQ(address.code, Code::kOk);
}

TEST_F(RdmaTurnsTest, GrantsToRead) {
  std::vector<Key> keys;
  for (int i = 0; i < kBlocks; ++i) {
    keys.push_back(key_of(i));
    ASSERT_EQ(busy_->put(keys.back(), block_of(i, kMiB)), Code::kOk);
  }
  meet();
  const auto frame = Peer::frame(Opcode::kLookup, Peer::keys_meta(keys).view(), {}, wire::kFlagExpose);
  const auto grants = grants_of<wire::LookupResult>(served_between("ibv_reg_mr_iova", frame));
  ASSERT_EQ(grants.size(), kBlocks);
  const auto released =
      served_between("ibv_dereg_mr", Peer::frame(Opcode::kRelease, Peer::grants_meta(grants).view()));
  ASSERT_TRUE(released);
  EXPECT_TRUE(released->status);
  EXPECT_EQ(stat("pins_held"), 0u);
  EXPECT_EQ(fake().registrations(), 0u);
}

TEST_F(RdmaTurnsTest, GrantsToWriteThatAreAborted) {
  meet();
  const auto grants = grants_of<wire::ReserveResult>(served_between("ibv_reg_mr_iova", reserve_frame()));
  ASSERT_EQ(grants.size(), kBlocks);
  const auto aborted =
      served_between("ibv_dereg_mr", Peer::frame(Opcode::kAbort, Peer::grants_meta(grants).view()));
  EXPECT_EQ(Peer::codes(aborted), std::vector<Code>(kBlocks, Code::kOk));
  EXPECT_EQ(fake().registrations(), 0u);
}

TEST_F(RdmaTurnsTest, GrantsToWriteThatAreCommitted) {
  meet();
  std::vector<wire::CommitItem> items;
  for (const uint64_t grant : reserved()) items.push_back({grant, 0, wire::CommitItem::kFlagOneSided});
  Writer meta;
  wire::encode_items<wire::CommitItem>(meta, items);
  const auto committed = served_between("ibv_dereg_mr", Peer::frame(Opcode::kCommit, meta.view()));
  EXPECT_EQ(Peer::codes(committed), std::vector<Code>(kBlocks, Code::kOk));
  EXPECT_EQ(fake().registrations(), 0u);
}

// Memory that outlives the process keeps its blocks, and none of what devices were told of it.
class RdmaKeptTest : public RdmaTurnsTest {
 protected:
  void SetUp() override {
    config.store.keep.enabled = true;
    RdmaTurnsTest::SetUp();
  }
};

TEST_F(RdmaKeptTest, BlocksComeBackAndAreRegisteredAnew) {
  const std::vector<Key> keys = {key_of(100), key_of(101)};
  for (const Key& key : keys) ASSERT_EQ(busy_->put(key, block_of(7, kMiB)), Code::kOk);
  meet();
  const auto exposed = [&] {
    EXPECT_TRUE(
        busy_->send(Peer::frame(Opcode::kLookup, Peer::keys_meta(keys).view(), {}, wire::kFlagExpose)));
    return grants_of<wire::LookupResult>(busy_->reply()).size();
  };
  EXPECT_EQ(exposed(), keys.size());
  EXPECT_EQ(reserved().size(), kBlocks);  // a device may write there until the process ends
  EXPECT_EQ(fake().registrations(), keys.size() + kBlocks);
  std::vector<int> held;
  for (const int fd : server->store().kept().fds) held.push_back(::dup(fd));
  server.reset();
  EXPECT_EQ(fake().registrations(), 0u) << "registrations end with the process";

  config.store.keep.fds = held;
  config.incarnation = 43;
  start();
  EXPECT_TRUE(server->store().kept().adopted) << server->store().kept().why_not;
  EXPECT_EQ(server->store().kept().blocks, keys.size());
  busy_ = std::make_unique<Peer>(*server);
  ASSERT_TRUE(busy_->login());
  EXPECT_EQ(fake().registrations(), 0u) << "adoption tells the devices nothing";
  for (const Key& key : keys) EXPECT_EQ(busy_->get(key), std::pair(Code::kOk, block_of(7, kMiB)));
  meet();
  EXPECT_EQ(exposed(), keys.size());
  EXPECT_EQ(fake().registrations(), keys.size());
  // What a device could write before is free again: nobody has it mapped.
  EXPECT_EQ(server->store().tend_kept(~uint64_t{0} >> 1).held_blocks, 0u);
  EXPECT_EQ(stat("reserved_bytes"), 0u);
  for (const int fd : held) ::close(fd);
}

TEST_F(RdmaTurnsTest, APeerThatLeavesInTheMiddleKeepsNothing) {
  meet();
  fake().hold("ibv_reg_mr_iova", 2);
  ASSERT_TRUE(busy_->send(reserve_frame()));
  ASSERT_TRUE(fake().wait_until_held("ibv_reg_mr_iova"));
  busy_->close();
  fake().hold("ibv_reg_mr_iova", -1);
  EXPECT_TRUE(eventually("connections_open", 1));
  EXPECT_EQ(stat("reservations_held"), 0u);
  EXPECT_EQ(fake().registrations(), 0u);
}

}  // namespace
}  // namespace mooncache::testing
