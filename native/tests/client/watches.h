// What the tests of watches share.
#pragma once

#include <algorithm>
#include <map>

#include "client/pool.h"

namespace mooncache::testing {

using Positions = std::vector<uint32_t>;

inline std::vector<Key> keys_from(uint64_t first, size_t count) {
  std::vector<Key> keys;
  for (size_t i = 0; i < count; ++i) keys.push_back(key_of(first + i));
  return keys;
}

// Until all these watches have ended: what each of them said, in one news.
inline std::map<std::string, WatchNews> ends_of(BlockWatch& watch, size_t count) {
  std::map<std::string, WatchNews> ends, open;
  const Deadline until = Deadline::after_ms(20'000);
  while (ends.size() < count && !until.expired()) {
    CallOptions options;
    options.deadline = until;
    const auto news = watch.next(options);
    if (!news) {
      ADD_FAILURE() << news.status().message;
      break;
    }
    for (const WatchNews& item : *news) {
      WatchNews& all = open[item.name];
      EXPECT_FALSE(ends.contains(item.name)) << "news after the end";
      all.positions.insert(all.positions.end(), item.positions.begin(), item.positions.end());
      all.state = item.state;
      all.code = item.code;
      std::sort(all.positions.begin(), all.positions.end());
      if (item.state != WatchState::kMore) ends[item.name] = all;
    }
  }
  EXPECT_EQ(ends.size(), count);
  return ends;
}

}  // namespace mooncache::testing
