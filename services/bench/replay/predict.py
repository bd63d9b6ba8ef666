"""The simulator's word on the replay: the same requests on a description of the cluster that was calibrated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from mooncache.conductor.core.policy.types import AdmissionMode, Rules
from mooncache.errors import InvalidArgument
from mooncache.kvcache.instance_role import InstanceRole
from mooncache.simulate import ClusterSpec, InstanceGroup, Result, SimOptions, Slo, simulate
from mooncache.simulate.cluster import FirstToken, InlineMode
from mooncache.traces.stats import hit_blocks

if TYPE_CHECKING:
    from mooncache.bench.replay.calibrate import Calibration
    from mooncache.traces import Trace

# Blocks on each node when nothing is said: the caches of a replay are made large enough for all of it.
BLOCKS_PLENTY = 1 << 20


@dataclass(frozen=True, slots=True)
class Serving:
    """The cluster that serves: instances of each role, and what its engines are set to."""

    prefill: int = 0  # 0: the decode instances compute prompts themselves
    decode: int = 1
    batch_max: int = 16
    chunk_tokens: int = 512
    cache_blocks: int = BLOCKS_PLENTY  # blocks of the trace that one holds

    def __post_init__(self) -> None:
        if self.prefill < 0 or min(self.decode, self.batch_max, self.chunk_tokens) < 1:
            raise InvalidArgument(
                f"a replay has at least 1 decode instance (here {self.decode}) and no negative number for prefill "
                f"(here {self.prefill}); batch ({self.batch_max}) and chunk tokens ({self.chunk_tokens}) are at least 1"
            )


def describe(serving: Serving, calibration: Calibration, block_tokens: int) -> ClusterSpec:
    """The cluster as the simulator sees it. Admission is off, so the promises only colour tables."""
    decode = InstanceGroup(
        role=InstanceRole.DECODE if serving.prefill else InstanceRole.BOTH,
        count=serving.decode,
        dram_blocks=serving.cache_blocks,
        sequences_max=serving.batch_max,
        inline=InlineMode.CHUNKED,
        chunk_tokens=serving.chunk_tokens,
        fetch_latency_s=0.0,
    )
    groups: tuple[InstanceGroup, ...] = (decode,)
    if serving.prefill:
        groups = (
            InstanceGroup(
                role=InstanceRole.PREFILL,
                count=serving.prefill,
                dram_blocks=serving.cache_blocks,
                chunk_tokens=serving.chunk_tokens,
                fetch_latency_s=0.0,
            ),
            decode,
        )
    return ClusterSpec(
        instances=groups,
        name="replay",
        profile=calibration.profile,
        block_tokens=block_tokens,
        first_token=FirstToken.DECODE if serving.prefill else FirstToken.PREFILL,
        slo=Slo(ttft_s=60.0, tbt_s=5.0),
    )


def predict(trace: Trace, serving: Serving, calibration: Calibration, seed: int) -> Result:
    """What the simulator expects; TTFT as a client sees it, the fixed cost of a request included."""
    spec = describe(serving, calibration, trace.block_tokens)
    options = SimOptions(rules=Rules(admission=AdmissionMode.NONE), seed=seed, spread_tick_s=0.0)
    result = simulate(trace, spec, options)
    return replace(result, ttft_s=result.ttft_s + calibration.overhead_s)


def speed_for(trace: Trace, serving: Serving, calibration: Calibration, load: float) -> float:
    """How fast to play the trace so that its work keeps the engines busy for this share of the time.

    Steps of decoding count half of what a sequence alone takes: others share most of them.
    """
    prefill, decode = calibration.profile.prefill, calibration.profile.decode
    tokens = trace.input_tokens.astype(float)
    cached = np.minimum(hit_blocks(trace) * trace.block_tokens, tokens - 1)
    work_s = float(
        (
            prefill.a
            + prefill.b * (tokens - cached)
            + prefill.c * (tokens**2 - cached**2)
            + prefill.d * cached
            + trace.output_tokens * (decode.base_s / 2 + decode.per_sequence_s + decode.per_token_s * tokens)
        ).sum()
    )
    return trace.span_s * load * (serving.prefill + serving.decode) / work_s
