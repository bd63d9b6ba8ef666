#include "mooncache/cluster_client.h"

#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "client/absent_keys.h"
#include "client/impl.h"
#include "client/map_source.h"

namespace mooncache {

namespace {

constexpr size_t kSeedsMax = 64;
constexpr size_t kSearchKeysMax = 1024;  // keys that one search takes to every node
constexpr size_t kHostTries = 4;
constexpr uint32_t kHostTryMs = 1000;

// The id of this host, as nodes on it tell theirs: who answers on a socket of this file system with the name
// that the map has for it is here. Empty: no node is.
std::string find_host(const std::vector<NodeInfo>& nodes, const Credentials& credentials) {
  size_t tries = 0;
  for (const NodeInfo& node : nodes) {
    struct stat info {};
    if (node.unix_path.empty() || ::stat(node.unix_path.c_str(), &info) != 0 || !S_ISSOCK(info.st_mode))
      continue;
    PeerDescription peer;
    peer.node_id = node.node_id;
    peer.unix_path = node.unix_path;
    peer.credentials = credentials;
    const auto session = Session::connect(peer, Route::kUnix, Deadline::after_ms(kHostTryMs));
    if (session && (*session)->node().host_id == node.host_id) return node.host_id;
    if (++tries == kHostTries) break;
  }
  return {};
}

Result<std::unique_ptr<Client>> make_scout(const ClusterConfig& config, std::vector<NodeInfo> seeds) {
  ClientConfig settings;
  settings.credentials = config.client.credentials;
  settings.tls = config.client.tls;
  settings.connect_timeout_ms = config.client.connect_timeout_ms;
  for (const NodeInfo& seed : seeds)
    if (!seed.host_id.empty()) settings.host_id = seed.host_id;
  settings.lanes_per_node = 1;
  settings.rdma.enabled = false;
  settings.receive_pool_bytes = 0;
  settings.idle_timeout_ms = 10'000;
  auto scout = Client::create(std::move(settings));
  if (scout) (*scout)->set_map(1, std::move(seeds));
  return scout;
}

}  // namespace

struct ClusterClient::Impl {
  std::unique_ptr<Client> client;
  std::unique_ptr<MapSource> source;  // goes first: it uses the client
  AbsentKeys absent;
  std::string tenant;
  std::atomic<uint64_t> failures_seen{0};
  const uint64_t fork_generation = fork_generation_now();

  static Code code_of(Code code) { return code; }
  static Code code_of(const BlockStat& stat) { return stat.code; }

  // Behind each call: has the map asked for if it met a node that did not answer as it should, whether or not
  // another one took its place. A failure that another call met meanwhile counts as well.
  template <typename Answer>
  Answer seen(Answer answer) {
    if (fork_generation != fork_generation_now()) return answer;
    const uint64_t failures = client->node_failures();
    if (failures_seen.exchange(failures, std::memory_order_relaxed) != failures) source->wake();
    return answer;
  }

  // Positions of keys that were not found and whose place is known now, after a search of all nodes if there
  // was reason for one. Empty in clusters so small that every miss was looked for on all nodes.
  std::vector<uint32_t> found_elsewhere(std::span<const Key> keys, std::vector<uint32_t> missed,
                                        const CallOptions& options) {
    std::vector<Key> lost;
    for (const uint32_t i : missed) lost.push_back(keys[i]);
    if (lost.empty() || options.node || options.deadline.expired() || !search(lost, options)) return {};
    std::vector<bool> unknown(lost.size(), false);
    for (const uint32_t i : client->unlocated(lost)) unknown[i] = true;
    std::vector<uint32_t> found;
    for (size_t i = 0; i < lost.size(); ++i)
      if (!unknown[i]) found.push_back(missed[i]);
    return found;
  }

  // Looks for keys that no one has located on all nodes; true: some are there.
  bool search(std::span<const Key> lost, const CallOptions& options) {
    std::vector<Key> wanted;
    const uint64_t now_ms = steady_ms();
    for (const uint32_t i : client->unlocated(lost)) {
      if (wanted.size() < kSearchKeysMax && absent.due(lost[i], now_ms)) wanted.push_back(lost[i]);
    }
    if (wanted.empty()) return false;
    CallOptions everywhere = options;
    everywhere.all_nodes = true;
    everywhere.deadline =
        Deadline::after_ms(options.deadline.remaining_ms() / 2);  // the block has to be fetched, too
    const auto report = client->match(wanted, false, everywhere);
    bool any = false;
    for (size_t i = 0; i < wanted.size(); ++i) {
      const bool here = report && bit_at(report->bitmap, i);
      absent.remember(wanted[i], here, steady_ms());
      any = any || here;
    }
    return any;
  }

  // A question with one answer per key, and once more for those that are elsewhere.
  template <typename Answer, typename Ask>
  Status ask_codes(std::span<const Key> keys, const CallOptions& options, std::span<Answer> answers,
                   const Ask& ask) {
    if (Status status = seen(ask(keys, answers)); !status) return status;
    std::vector<uint32_t> missed;
    for (uint32_t i = 0; i < keys.size(); ++i)
      if (code_of(answers[i]) == Code::kNotFound) missed.push_back(i);
    const auto again = found_elsewhere(keys, std::move(missed), options);
    if (again.empty()) return Status::ok();
    std::vector<Key> some;
    for (const uint32_t i : again) some.push_back(keys[i]);
    std::vector<Answer> second(some.size());
    if (!ask(std::span<const Key>(some), std::span<Answer>(second)))
      return Status::ok();  // the first answers stand
    for (size_t i = 0; i < again.size(); ++i) answers[again[i]] = std::move(second[i]);
    return Status::ok();
  }

  void get_again(std::span<const GetBlock> blocks, const std::vector<uint32_t>& again, const GetOptions& how,
                 const CallOptions& options, std::span<GetOutcome> outcomes) {
    std::vector<GetBlock> some;
    for (const uint32_t i : again) some.push_back(blocks[i]);
    std::vector<GetOutcome> second(some.size());
    GetOptions same = how;
    if (how.allocate) {
      same.allocate = [&](size_t item, uint64_t bytes) { return how.allocate(again[item], bytes); };
    }
    if (!client->get(some, same, options, second)) return;
    for (size_t i = 0; i < again.size(); ++i) outcomes[again[i]] = second[i];
  }
};

ClusterClient::ClusterClient(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

ClusterClient::~ClusterClient() {
  if (impl_->fork_generation != fork_generation_now()) {
    (void)impl_.release();  // the thread is the parent's, and its locks may be held forever
    return;
  }
  close();
}

Result<std::unique_ptr<ClusterClient>> ClusterClient::connect(ClusterConfig config) {
  if (config.seeds.empty() || config.seeds.size() > kSeedsMax)
    return {Code::kInvalidArgument, "a cluster is found by 1 to 64 seeds"};
  if (config.refresh_ms < 10) return {Code::kConfigInvalid, "refresh_ms must be at least 10"};
  std::vector<NodeInfo> seeds;
  for (const std::string& text : config.seeds) {
    auto seed = seed_of(text, static_cast<uint32_t>(seeds.size()));
    if (!seed) return seed.status();
    seeds.push_back(std::move(*seed));
  }
  if (!config.token.empty()) {
    auto credentials = credentials_from_token(config.token);
    if (!credentials) return credentials.status();
    credentials->client_name = config.client.credentials.client_name;
    credentials->writer = config.client.credentials.writer;
    config.client.credentials = std::move(*credentials);
  }
  const auto count = static_cast<uint32_t>(seeds.size());
  auto scout = make_scout(config, std::move(seeds));
  if (!scout) return scout.status();
  auto impl = std::make_unique<Impl>();
  impl->tenant = config.client.credentials.tenant;
  auto source = std::make_unique<MapSource>(std::move(*scout), count, config.refresh_ms);
  if (Status first = source->first(Deadline::after_ms(config.connect_timeout_ms)); !first) return first;
  if (config.client.host_id.empty())
    config.client.host_id = find_host(source->nodes(), config.client.credentials);
  auto client = Client::create(std::move(config.client));
  if (!client) return client.status();
  impl->client = std::move(*client);
  source->follow(*impl->client);
  impl->source = std::move(source);
  return std::unique_ptr<ClusterClient>(new ClusterClient(std::move(impl)));
}

Status ClusterClient::put(std::span<const PutBlock> blocks, uint32_t replicas, const CallOptions& options,
                          std::span<PutOutcome> outcomes) {
  return impl_->seen(impl_->client->put(blocks, replicas, options, outcomes));
}

Status ClusterClient::get(std::span<const GetBlock> blocks, const GetOptions& how, const CallOptions& options,
                          std::span<GetOutcome> outcomes) {
  if (Status status = impl_->seen(impl_->client->get(blocks, how, options, outcomes)); !status) return status;
  std::vector<uint32_t> missed;
  for (uint32_t i = 0; i < outcomes.size(); ++i)
    if (outcomes[i].code == Code::kNotFound) missed.push_back(i);
  if (missed.empty()) return Status::ok();
  std::vector<Key> keys;
  for (const GetBlock& block : blocks) keys.push_back(block.key);
  const auto again = impl_->found_elsewhere(keys, std::move(missed), options);
  if (!again.empty()) impl_->get_again(blocks, again, how, options, outcomes);
  return Status::ok();
}

Result<MatchReport> ClusterClient::match(std::span<const Key> keys, bool touch, const CallOptions& options) {
  auto report = impl_->seen(impl_->client->match(keys, touch, options));
  if (!report) return report;
  std::vector<uint32_t> missed;
  for (uint32_t i = report->leading_run; i < keys.size(); ++i)
    if (!bit_at(report->bitmap, i)) missed.push_back(i);
  if (impl_->found_elsewhere(keys, std::move(missed), options).empty()) return report;
  auto second = impl_->client->match(keys, touch, options);
  return second ? second : report;
}

Status ClusterClient::exists(std::span<const Key> keys, const CallOptions& options, std::span<Code> codes) {
  if (codes.size() != keys.size()) return {Code::kInvalidArgument, "one code per key is needed"};
  const auto report = match(keys, false, options);
  if (!report) return report.status();
  const Code absent = report->unreachable_nodes > 0 ? Code::kNodeUnavailable : Code::kNotFound;
  for (size_t i = 0; i < keys.size(); ++i) codes[i] = bit_at(report->bitmap, i) ? Code::kOk : absent;
  return Status::ok();
}

Status ClusterClient::remove(std::span<const Key> keys, const CallOptions& options, std::span<Code> codes) {
  return impl_->ask_codes(keys, options, codes, [&](std::span<const Key> some, std::span<Code> answers) {
    return impl_->client->remove(some, options, answers);
  });
}

Status ClusterClient::pin(std::span<const Key> keys, uint32_t ttl_ms, const CallOptions& options,
                          std::span<Code> codes) {
  return impl_->ask_codes(keys, options, codes, [&](std::span<const Key> some, std::span<Code> answers) {
    return impl_->client->pin(some, ttl_ms, options, answers);
  });
}

Status ClusterClient::unpin(std::span<const Key> keys, const CallOptions& options, std::span<Code> codes) {
  return impl_->ask_codes(keys, options, codes, [&](std::span<const Key> some, std::span<Code> answers) {
    return impl_->client->unpin(some, options, answers);
  });
}

Status ClusterClient::stat(std::span<const Key> keys, const CallOptions& options,
                           std::span<BlockStat> stats) {
  return impl_->ask_codes(keys, options, stats, [&](std::span<const Key> some, std::span<BlockStat> answers) {
    return impl_->client->stat(some, options, answers);
  });
}

Status ClusterClient::register_buffer(Slice memory) {
  return impl_->client->register_buffer(memory);
}

Status ClusterClient::unregister_buffer(Slice memory) {
  return impl_->client->unregister_buffer(memory);
}

Client& ClusterClient::client() {
  return *impl_->client;
}

ClusterState ClusterClient::state() const {
  return impl_->fork_generation == fork_generation_now() ? impl_->source->state() : ClusterState{};
}

void ClusterClient::refresh() {
  if (impl_->fork_generation == fork_generation_now()) impl_->source->wake();
}

Status ClusterClient::set_token(const std::string& token) {
  const auto credentials = credentials_from_token(token);
  if (!credentials) return credentials.status();
  if (credentials->tenant != impl_->tenant)
    return {Code::kInvalidArgument, "a client stays with its tenant; make another client for another one"};
  impl_->client->set_key(credentials->key);
  if (impl_->fork_generation == fork_generation_now()) impl_->source->set_key(credentials->key);
  return Status::ok();
}

void ClusterClient::close() {
  if (impl_->fork_generation != fork_generation_now()) return;
  impl_->source->stop();
  impl_->client->close();
}

}  // namespace mooncache
