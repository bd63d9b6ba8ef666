"""An instance of the model on some hardware: how fast it computes, how much KV it holds, whether it fits at all.

What was measured is used as it is. Other hardware is scaled from it by ratios of the numbers on data sheets, which
keeps the measured efficiency: computing terms by FLOPS, everything that reads memory by memory bandwidth, loading of
cached tokens by host bandwidth. Fixed costs stay. Such an instance is marked `measured = False`, and the plan says so.

Invariant: more FLOPS, bandwidth or memory never make an instance slower or smaller.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from mooncache.conductor.core.policy.pipeline import CHUNK_OVERHEAD_S, CHUNKS_TOKENS
from mooncache.errors import ModelDoesNotFit
from mooncache.plan.core.spec import GB
from mooncache.prices.core.hardware import GpuNode

Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class MeasuredModel:
    """A model as measured on one kind of instance: cost terms in seconds, and that instance's hardware."""

    name: str
    prefill_s: tuple[float, float, float, float]
    """a, b, c, d of T(n, p) = a + b (n - p) + c (n² - p²) + d p."""
    step_base_s: float
    step_per_sequence_s: float
    step_per_token_s: float
    weights_bytes: float
    kv_bytes_per_token: float
    gpus: int
    gpu_memory_gb: float
    gpu_memory_gb_per_s: float
    gpu_tflops: float
    host_gb_per_s: float
    load_bytes_per_s: float
    """Host memory to GPUs when a sequence joins a batch."""

    def describes(self, node: GpuNode, gpus: int) -> bool:
        """Whether an instance of `gpus` GPUs of this type is what was measured."""
        mine = (self.gpus, self.gpu_memory_gb, self.gpu_memory_gb_per_s, self.gpu_tflops)
        return mine == (gpus, node.gpu_memory_gb, node.gpu_memory_gb_per_s, node.gpu_tflops)


@dataclass(frozen=True, slots=True)
class InstanceType:
    """One kind of instance: `gpus` GPUs of machine type `node`, `per_node` of them on one machine."""

    node: GpuNode
    gpus: int
    per_node: int
    prefill: tuple[float, float, float, float]
    step_base_s: float
    step_per_sequence_s: float
    step_per_token_s: float
    kv_capacity_tokens: float
    kv_bytes_per_token: float
    load_bytes_per_s: float
    measured: bool

    @property
    def name(self) -> str:
        """Such as "A800 x8"."""
        return f"{self.node.name} x{self.gpus}"

    def prefill_s(self, tokens: Floats, cached: Floats) -> Floats:
        """Seconds to compute prompts of which the leading `cached` tokens are there, one instance."""
        a, b, c, d = self.prefill
        return a + b * (tokens - cached) + c * (tokens**2 - cached**2) + d * cached

    def pipelined_s(self, tokens: Floats, cached: Floats, stages: int) -> Floats:
        """The same on `stages` instances as a chunked pipeline, where that is faster: policy/pipeline.py for arrays."""
        best = alone = self.prefill_s(tokens, cached)
        if stages == 1:
            return alone
        a, b, c, d = self.prefill
        for chunk in CHUNKS_TOKENS:
            chunks = np.maximum(1.0, np.ceil((tokens - cached) / chunk))
            longest = np.zeros(len(tokens))
            for back in (1.0, 2.0, chunks):
                begin = cached + np.maximum(0.0, chunks - back) * chunk
                end = np.minimum(begin + chunk, tokens)
                first = np.where(begin == cached, a + d * cached, 0.0)
                longest = np.maximum(longest, b * (end - begin) + c * (end**2 - begin**2) + first)
            overhead = stages * CHUNK_OVERHEAD_S
            best = np.minimum(
                best, (alone + chunks * overhead + (stages - 1) * (longest + overhead)) / stages
            )
        return best

    def step_s(self, sequences: Floats, kv_tokens: Floats) -> Floats:
        """Seconds between two tokens of a batch."""
        return self.step_base_s + self.step_per_sequence_s * sequences + self.step_per_token_s * kv_tokens


def missing_gb(measured: MeasuredModel, node: GpuNode, gpus: int, memory_share: float) -> float:
    """GB that weights lack on `gpus` GPUs of this type; negative is what is left for KV."""
    return measured.weights_bytes / GB - gpus * node.gpu_memory_gb * memory_share


def engine(measured: MeasuredModel, node: GpuNode, gpus: int, memory_share: float) -> InstanceType | None:
    """The instance that `gpus` GPUs of this type make; None when the weights leave no room for KV."""
    room_gb = -missing_gb(measured, node, gpus, memory_share)
    if room_gb <= 0:
        return None
    computing = (measured.gpus * measured.gpu_tflops) / (gpus * node.gpu_tflops)
    reading = (measured.gpus * measured.gpu_memory_gb_per_s) / (gpus * node.gpu_memory_gb_per_s)
    per_node = node.gpus // gpus
    loading = measured.host_gb_per_s / (node.host_gb_per_s / per_node)
    a, b, c, d = measured.prefill_s
    effective_bytes_per_s = measured.kv_bytes_per_token / measured.step_per_token_s
    weights_s = min(measured.step_base_s, measured.weights_bytes / effective_bytes_per_s)
    return InstanceType(
        node=node,
        gpus=gpus,
        per_node=per_node,
        # Where loading a token takes longer than computing it, it is computed.
        prefill=(a, b * computing, c * computing, min(d * loading, b * computing)),
        step_base_s=measured.step_base_s - weights_s + weights_s * reading,
        step_per_sequence_s=measured.step_per_sequence_s,
        step_per_token_s=measured.step_per_token_s * reading,
        kv_capacity_tokens=room_gb * GB / measured.kv_bytes_per_token,
        kv_bytes_per_token=measured.kv_bytes_per_token,
        load_bytes_per_s=measured.load_bytes_per_s / loading,
        measured=measured.describes(node, gpus),
    )


def sizes(node: GpuNode, wanted: tuple[int, ...], measured: MeasuredModel) -> tuple[int, ...]:
    """GPUs per instance to try on this type: those asked for that fill machines, or the profile's and the machine's."""
    chosen = wanted or (measured.gpus, node.gpus)
    return tuple(sorted({gpus for gpus in chosen if node.gpus % gpus == 0}))


def engines(
    measured: dict[str, MeasuredModel],
    nodes: tuple[GpuNode, ...],
    wanted: tuple[int, ...],
    memory_share: float,
) -> list[InstanceType]:
    """All kinds of instances that the model fits on, per machine type by name in `measured` (its own profile).

    Raises ModelDoesNotFit when there is none: says how many GB are missing on the largest.
    """
    found: list[InstanceType] = []
    lacks: list[tuple[float, str]] = []
    for node in nodes:
        profile = measured[node.name]
        for gpus in sizes(node, wanted, profile):
            made = engine(profile, node, gpus, memory_share)
            if made is not None:
                found.append(made)
            else:
                lacks.append((missing_gb(profile, node, gpus, memory_share), f"{gpus} GPUs of {node.name}"))
    if found:
        return found
    if not lacks:
        raise ModelDoesNotFit(
            f"search.gpus_per_instance {list(wanted)}: no machine type has a number of GPUs that these divide."
        )
    least_gb, where = min(lacks)
    profile = measured[nodes[0].name]
    raise ModelDoesNotFit(
        f"{profile.name}: the weights take {profile.weights_bytes / GB:.1f} GB; {where} at memory_share "
        f"{memory_share:g} lack {max(least_gb, 0):.1f} GB before the first token of KV."
    )
