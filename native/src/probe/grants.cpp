#include "probe/grants.h"

#include <cstring>
#include <deque>
#include <random>

#include "transport/grant_messages.h"
#include "transport/one_request.h"

namespace mooncache::probe {
namespace {

constexpr int64_t kAnswerTimeoutMs = 30'000;

class NodeGrants final : public Grants {
 public:
  NodeGrants(Link& link, bool expose, uint32_t seed)
      : session_(*link.session()), expose_(expose), random_(std::random_device{}() + seed) {}

  Result<std::vector<RemoteExtent>> reserve(uint32_t count, uint64_t size) override {
    wire::ReserveRequest wanted;
    keys_.clear();
    for (uint32_t i = 0; i < count; ++i) {
      Key key;
      for (size_t word = 0; word < kKeyBytes / 8; ++word) {
        const uint64_t value = random_();
        std::memcpy(key.bytes.data() + 8 * word, &value, 8);
      }
      keys_.push_back(key);
      wanted.items.push_back({key, size});
    }
    Request request;
    encode_reserve(request, wanted, expose_);
    return extents<wire::ReserveResult>(std::move(request), count);
  }

  Result<std::vector<RemoteExtent>> publish(std::span<const RemoteExtent> written,
                                            std::span<const uint32_t> crcs) override {
    std::vector<wire::CommitItem> items;
    for (size_t i = 0; i < written.size(); ++i)
      items.push_back({written[i].grant, crcs[i],
                       expose_ || session_.route() == Route::kUnix ? wire::CommitItem::kFlagOneSided : 0});
    Request commit;
    encode_commit(commit, items);
    if (Status status = codes(std::move(commit), items.size()); !status) return status;
    Request lookup;
    encode_lookup(lookup, keys_, expose_);
    return extents<wire::LookupResult>(std::move(lookup), written.size());
  }

  Status give_up(std::span<const RemoteExtent> reserved) override {
    std::vector<uint64_t> grants;
    for (const RemoteExtent& extent : reserved) grants.push_back(extent.grant);
    Request request;
    encode_abort(request, grants);
    return codes(std::move(request), grants.size());
  }

 private:
  template <typename Item>
  Result<std::vector<RemoteExtent>> extents(Request request, size_t count) {
    const auto answer = exchange(session_, std::move(request), Deadline::after_ms(kAnswerTimeoutMs));
    if (!answer) return answer.status();
    Reader in(*answer);
    const auto granted = decode_granted<Item>(Status::ok(), in, count, expose_);
    if (!granted) return granted.status();
    std::vector<RemoteExtent> extents;
    for (const auto& [item, extent] : *granted) {
      if (item.code != Code::kOk)
        return {item.code, "the node granted no extent: " + std::string(code_name(item.code))};
      if (expose_ && !extent.exposed)
        return {Code::kTransportUnavailable, "the node does not show an extent to its device"};
      extents.push_back(extent);
    }
    return extents;
  }

  Status codes(Request request, size_t count) {
    const auto answer = exchange(session_, std::move(request), Deadline::after_ms(kAnswerTimeoutMs));
    if (!answer) return answer.status();
    Reader in(*answer);
    const auto all = decode_outcomes(Status::ok(), in, count);
    if (!all) return all.status();
    for (const Code code : *all)
      if (code != Code::kOk) return {code, "the node refused: " + std::string(code_name(code))};
    return Status::ok();
  }

  Session& session_;
  const bool expose_;
  std::mt19937_64 random_;
  std::vector<Key> keys_;
};

class LoopbackGrants final : public Grants {
 public:
  explicit LoopbackGrants(std::unique_ptr<Link>& link) {
    auto made = make_loopback_transport(peer_)->connect({}, Deadline::after_ms(kAnswerTimeoutMs));
    if (made) link = std::move(*made);
  }
  Result<std::vector<RemoteExtent>> reserve(uint32_t count, uint64_t size) override {
    std::vector<RemoteExtent> extents;
    for (uint32_t i = 0; i < count; ++i) {
      memory_.emplace_back(size);
      extents.push_back(peer_->grant(peer_->add_segment(memory_.back()), 0, size, true));
    }
    return extents;
  }
  Result<std::vector<RemoteExtent>> publish(std::span<const RemoteExtent> written,
                                            std::span<const uint32_t>) override {
    std::vector<RemoteExtent> extents;
    for (const RemoteExtent& extent : written)
      extents.push_back(peer_->grant(extent.segment, extent.offset, extent.size, false));
    return extents;
  }
  Status give_up(std::span<const RemoteExtent>) override { return Status::ok(); }

 private:
  std::deque<std::vector<std::byte>> memory_;
  std::shared_ptr<LoopbackPeer> peer_ = make_loopback_peer();
};

}  // namespace

std::unique_ptr<Grants> node_grants(Link& link, bool expose, uint32_t seed) {
  return std::make_unique<NodeGrants>(link, expose, seed);
}

std::unique_ptr<Grants> loopback_grants(std::unique_ptr<Link>& link) {
  return std::make_unique<LoopbackGrants>(link);
}

}  // namespace mooncache::probe
