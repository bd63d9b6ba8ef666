"""The requests of each experiment: the traces that were given, generated stand-ins for the others, public datasets.

A stand-in has the published statistics of what it stands for, nothing more; its users say so. The datasets
of the arXiv paper (summaries, exams over documents, prompts of one length) are documents with questions: a
Poisson process of requests, each about a document that others ask about too.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np

from mooncache.errors import InvalidArgument
from mooncache.reproduce.setting import BLOCK_TOKENS, SEED, TICK_S
from mooncache.traces import Trace, generate, read
from mooncache.traces.generator import conversation, tool_agent

CONVERSATION, TOOLAGENT, SYNTHETIC = "conversation", "toolagent", "synthetic"
PUBLISHED: Final = (CONVERSATION, TOOLAGENT, SYNTHETIC)
ALL = "all mixed"


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the traces are; what is None is generated."""

    conversation: Path | None = None
    toolagent: Path | None = None
    synthetic: Path | None = None
    first: int = 0  # so many requests of each only (0: all)

    def path(self, name: str) -> Path | None:
        """The file of a workload, or None when it is generated."""
        found: Path | None = getattr(self, name, None)
        return found

    def stand_in(self, name: str) -> bool:
        """Whether this is one of the paper's traces without its file."""
        wanted = PUBLISHED if name == ALL else (name,)
        return any(part in PUBLISHED and self.path(part) is None for part in wanted)


@dataclass(frozen=True, slots=True)
class Documents:
    """A dataset: `requests` in a Poisson process, each a document (log-normal length) and a question about it."""

    requests: int
    rate_per_s: float
    document_tokens: float
    spread: float
    questions: int  # how many requests share a document
    output_tokens: int
    question_tokens: int = 60
    shared: float = 1.0  # the share of a document that they have in common


# arXiv Table 2: input, output, share of cache hits.
DATASETS: Final = {
    "arxiv-summarization": Documents(2000, 1.0, 8088, 0.6, 1, 229),
    "l-eval": Documents(2000, 1.0, 19019, 0.6, 8, 72),
    "simulated-16k": Documents(600, 1.0, 16384, 0.0, 10_000, 512, 0, 0.5),
    "simulated-32k": Documents(600, 1.0, 32768, 0.0, 10_000, 512, 0, 0.5),
    "simulated-64k": Documents(400, 1.0, 65536, 0.0, 10_000, 512, 0, 0.5),
    "simulated-128k": Documents(300, 1.0, 131072, 0.0, 10_000, 512, 0, 0.5),
}
DATASET_PART: Final = 4  # a shortened run takes this part of its number of requests from a dataset


@lru_cache(maxsize=16)
def load(sources: Sources, name: str) -> Trace:
    """The requests of one workload, spread over their clock ticks."""
    path = sources.path(name)
    if path is not None:
        trace = read(path)
    elif name == CONVERSATION:
        trace = generate(conversation(), random.Random(SEED))
    elif name == TOOLAGENT:
        trace = generate(tool_agent(), random.Random(SEED))
    elif name == SYNTHETIC:
        trace = synthetic(3993, 3.91, SEED)
    elif name == ALL:
        return mixed([load(sources, part) for part in PUBLISHED])
    elif name in DATASETS:
        trace = documents(DATASETS[name], SEED)
    else:
        raise InvalidArgument(f"there is no workload {name!r}")
    if sources.first:
        trace = trace.first(sources.first // DATASET_PART if name in DATASETS else sources.first)
    return trace.spread(TICK_S)


def mixed(traces: Sequence[Trace]) -> Trace:
    """The requests of several traces by their time, without a block in common."""
    arrival_s = np.concatenate([trace.arrival_s for trace in traces])
    order = np.argsort(arrival_s, kind="stable")
    shifts = np.cumsum([0] + [int(trace.hash_ids.max(initial=-1)) + 1 for trace in traces[:-1]])
    chains = [
        trace.hash_ids[trace.offsets[row] : trace.offsets[row + 1]] + shift
        for trace, shift in zip(traces, shifts, strict=True)
        for row in range(len(trace))
    ]
    chosen = [chains[row] for row in order]
    return Trace(
        arrival_s=arrival_s[order],
        input_tokens=np.concatenate([trace.input_tokens for trace in traces])[order],
        output_tokens=np.concatenate([trace.output_tokens for trace in traces])[order],
        offsets=np.concatenate([[0], np.cumsum([len(chain) for chain in chosen])]).astype(np.int64),
        hash_ids=np.concatenate(chosen).astype(np.int64),
        block_tokens=traces[0].block_tokens,
    )


def documents(options: Documents, seed: int) -> Trace:
    """Requests about documents; the questions of one document are shuffled over the whole time."""
    draws = np.random.default_rng(seed)
    count = options.requests
    mean = np.log(options.document_tokens) - options.spread**2 / 2
    kinds = -(-count // options.questions)
    lengths = np.maximum(1, np.rint(draws.lognormal(mean, options.spread, kinds))).astype(int)
    which = draws.permutation(np.arange(count) // options.questions)
    prompts = [
        (
            int(document),
            int(lengths[document] * options.shared),
            int(lengths[document]) + options.question_tokens,
        )
        for document in which
    ]
    outputs = np.full(count, options.output_tokens)
    return _poisson(prompts, outputs, options.rate_per_s, draws)


def synthetic(requests: int, rate_per_s: float, seed: int) -> Trace:
    """A stand-in of the synthetic trace of FAST'25: dialogues, exams, long documents, a third of the requests each.

    Dialogues grow by every turn (ShareGPT), questions share their document (L-Eval 19k tokens, LooGLE 24k tokens).
    """
    draws = np.random.default_rng(seed)
    third = requests // 3
    prompts: list[tuple[int, int, int]] = []
    group = 0
    for document_tokens, questions, count in ((19_000, 6, third), (24_000, 6, third)):
        for begin in range(0, count, questions):
            length = int(draws.lognormal(np.log(document_tokens) - 0.18, 0.6))
            prompts += [(group, length, length + int(draws.integers(20, 200)))] * min(
                questions, count - begin
            )
            group += 1
    while len(prompts) < requests:
        length = 0
        for _ in range(min(int(draws.geometric(0.28)), requests - len(prompts))):
            before, length = length, length + int(draws.lognormal(6.2, 0.9))
            prompts.append((group, before, length))
        group += 1
    order = draws.permutation(len(prompts))
    # The turns of a dialogue keep their order: the places that a group drew are given out shortest first.
    places: dict[int, list[int]] = {}
    for place in order:
        places.setdefault(prompts[place][0], []).append(int(place))
    mixed = []
    for place in order:
        mixed.append(prompts[min(places[prompts[place][0]])])
        places[prompts[place][0]].remove(min(places[prompts[place][0]]))
    outputs = np.minimum(893, np.maximum(2, draws.lognormal(4.3, 1.2, requests))).astype(int)
    return _poisson(mixed, outputs, rate_per_s, draws)


def _poisson(
    prompts: list[tuple[int, int, int]], outputs: np.ndarray, rate_per_s: float, draws: np.random.Generator
) -> Trace:
    """A trace of (group, tokens shared within the group, tokens) with Poisson arrivals.

    Only whole blocks are shared; a later prompt of a group shares what the shorter of both has in common.
    """
    arrival_s = np.cumsum(draws.exponential(1 / rate_per_s, len(prompts)))
    known: dict[int, list[int]] = {}
    offsets, ids, fresh = [0], [], 0
    for group, shared_tokens, tokens in prompts:
        common = known.setdefault(group, [])
        blocks = -(-tokens // BLOCK_TOKENS)
        chain = common[: min(shared_tokens // BLOCK_TOKENS, blocks)]
        grown = list(range(fresh, fresh + blocks - len(chain)))
        fresh += len(grown)
        chain = chain + grown
        if len(chain) > len(common):
            known[group] = chain  # the next one shares as much of it as it says
        ids += chain
        offsets.append(len(ids))
    return Trace(
        arrival_s=np.rint((arrival_s - arrival_s[0]) * 1000) / 1000,
        input_tokens=np.array([tokens for _, _, tokens in prompts], np.int32),
        output_tokens=np.asarray(outputs, np.int32),
        offsets=np.array(offsets, np.int64),
        hash_ids=np.array(ids, np.int64),
        block_tokens=BLOCK_TOKENS,
    )
