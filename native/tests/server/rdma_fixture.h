// The fake devices of the tests of this folder.
#pragma once

#include "rdma/fake/fake_verbs.h"
#include "server/peer.h"

namespace mooncache::testing {

inline FakeVerbs& fake() {
  return fake_verbs(MOONCACHE_FAKE_VERBS);
}

}  // namespace mooncache::testing
