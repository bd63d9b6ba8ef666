"""Every parameter that the papers leave open or that we chose, once for all scenarios.

Nothing here is tuned to a single request or to one scenario. What a result depends on most (speed of the replay,
chunk size of the coupled engine) is also shown over a range by the scenario itself.
"""

from __future__ import annotations

from typing import Final

from mooncache.simulate.cluster import FirstToken
from mooncache.simulate.profile import LLAMA3_70B_8XA800, ModelProfile

PROFILE: Final[ModelProfile] = LLAMA3_70B_8XA800  # the papers' dummy model on their nodes
BLOCK_TOKENS: Final = 512  # of the published traces; the FAST experiments used 256
SEED: Final = 1
PAPERS_POLICY: Final = "algorithm1"  # FAST'25, Algorithm 1
OUR_POLICY: Final = "mooncache"

# FAST'25 testbed (section 4.1): 16 nodes, 4 x 200 Gbps each, of which the engine reaches 87 GB/s.
NODES: Final = 16
NODE_NETWORK_GBPS: Final = 87 * 8.0
POOL_TOKENS_PER_NODE: Final = 3_000_000  # Figure 10: about 1 TB of DRAM
POOL_BLOCKS_PER_NODE: Final = POOL_TOKENS_PER_NODE // BLOCK_TOKENS
PREFILL_NODES: Final = 8  # the split of Figures 1, 5, 6, 7 is not printed; Figure 15 finds 1:1 best
DECODE_NODES: Final = 8

TTFT_SLO_S: Final = 30.0
TBT_SLO_S: Final = 0.1
CAPACITY_SHARE: Final = 0.95  # effective capacity: the speed at which this share of requests keeps both
TICK_S: Final = 3.0  # stamps of the public traces; requests of one tick are spread over it

# Speed of the replay: the traces' own. With it the coupled baselines of Figure 6 come out on the synthetic trace
# without any fitting. On the conversation trace they do at about 1.45x, which Figure 6 therefore shows as well.
SPEED: Final = 1.0
FIGURE_6_SPEED: Final = 1.45
OVERLOAD_SPEED: Final = 2.0  # arXiv Table 3 says "2x speed" of a trace that is not public
# Who sends the first token: the decode node, when the KV has come. So TTFT has the hand-over in it, as in the
# paper's "-86 %" of Figure 14, and no gap has; else short answers to long prompts miss 0.1 s (Figure 15: 99 % do not).
FIRST_TOKEN: Final = FirstToken.DECODE
THRESHOLD: Final = 1.5  # kvcache_balancing_threshold; not published, and 1 to 3 differ little

# vLLM 0.5.1. 2,048 tokens is the chunk size at which both published facts come out: the prefill GPU time of
# Figure 8 (+22 %) and the shape of the TBT curve of Figure 6. The engine's default of 512 is shown beside it.
CHUNK_TOKENS: Final = 2048
CHUNK_TOKENS_DEFAULT: Final = 512
SEQUENCES_MAX: Final = 256

HIT_BLOCKS_BAR: Final = 0.245  # hit ratio at 10,000 blocks, issue bar

# `--quick`: so many requests from the beginning of each trace.
QUICK_REQUESTS: Final = 600

# Refusals (overload). FULL_SPEED: what Algorithm 1 carries on 8P+8D (scenario `capacity`), rounded; overload is twice.
# BOTH_FULL: the split at which the conversation trace fills prefill and decode nodes at the same speed. By the profile
# and a hit ratio of .36 prefill needs 3.85 nodes at the trace's own speed; at 119 sequences, where a decode step takes
# 0.1 s, decoding needs 0.98. So 13 + 3 are full together, at 3.2 times the trace's speed.
FULL_SPEED: Final = 2.0
BOTH_FULL_PREFILL: Final = 13
BOTH_FULL_SPEED: Final = 3.2
