// What codes of a decision's record mean, in words. An unknown code is shown as it is.

export const REASONS = {
  never_seen: "never seen: these blocks were not computed before",
  evicted: "evicted: computed before, no longer reachable",
  other_tenant: "other tenant: computed under another tenant or salt",
  other_passport: "other passport: computed by engines whose blocks these engines cannot read",
  not_worth_fetching: "not worth fetching: computing was expected to be faster",
  computed_faster: "computed faster: the engine measured that it computes faster than it loads",
  load_cut: "load cut: loading turned out slower than computing; what had come was used",
  pool_unreachable: "pool unreachable: computed before, but the pool did not answer",
  load_failed: "load failed: the engine could not load what was expected in the pool",
  timed_out: "timed out: the blocks did not arrive in time",
  cache_off: "cache off: the engine must not or cannot use the pool for this request",
  no_complete_block: "no complete block: the end of a prompt is always computed",
  in_pool: "computing was priced lower, but engines load what the pool has",
  came_later: "the pool got the blocks after the plan was made",
  late: "the pool answered late",
};

export const PARTS = {
  plan: "scheduling",
  wait: "waiting for blocks",
  load: "transfer",
  queue: "queue",
  compute: "prefill",
  generate: "decode",
  unknown: "not said",
};

export const INLINING = {
  cheaper: "Computed where it is decoded: that costs less than a hand-over.",
  dearer: "Computed apart and handed over: computing it where it is decoded costs more.",
  too_long: "Computed apart: it is more than a decode instance may compute.",
  steps: "Computed apart: requests that are decoded there would wait longer for a token than promised.",
};

export const DIFFERENCES = { computed: "less came from caches", loaded: "more was loaded", waited: "waited longer" };

export const GIVEN_UP = {
  failed: "the prefill leg failed",
  not_stored: "the pool did not get them",
  ended: "the request or its engine was gone",
};

export const PHASES = {
  prefilled: "prompt computed",
  prefill_failed: "prefill failed",
  first_token: "first token",
  finished: "finished",
  failed: "failed",
  aborted: "client disconnected",
};

/** How a state looks: good, busy, bad or dim. */
export function tone(state) {
  if (["ready", "active", "finished", "admitted", "done", "pass", "valid"].includes(state)) return "good";
  if (["running", "starting", "draining", "goes on", "warn"].includes(state)) return "busy";
  if (["failed", "fail", "silent", "suspect", "dead", "refused", "lost", "expired", "revoked"].includes(state)) return "bad";
  return "dim";
}
