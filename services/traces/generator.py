"""Traces that look like the public ones, made of nothing: for tests, for newcomers, and for traffic yet to come.

People open conversations as a Poisson process and come back after a log-normal pause, each time with the
conversation so far plus the last answer plus something new; now and then they ask the same again, or the window of
the application drops part of the history. The figures of `conversation()` are the published statistics of the one
hour trace of the Mooncake paper (FAST '25, section 3: lengths, gaps, turns), none of its rows. Everything is arrays:
requests are made turn by turn over all conversations, a million of them in seconds. Blocks get their ids in order of
arrival, as in the public format: a request that brings n new blocks gets the next n ids.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from mooncache.errors import InvalidArgument
from mooncache.traces.lengths import Lengths
from mooncache.traces.trace import BLOCK_TOKENS, Trace

if TYPE_CHECKING:
    import random

    from numpy.typing import NDArray

_TURNS_MAX = 64
_RETURN_GROWTH = 0.75
_REQUESTS_MAX = 20_000_000

CONVERSATION_FIRST = Lengths(
    (
        (0.0, 890),
        (0.10, 905),
        (0.24, 1_340),
        (0.5, 5_600),
        (0.75, 13_300),
        (0.9, 26_000),
        (0.95, 39_500),
        (0.99, 88_000),
        (1.0, 126_000),
    )
)
CONVERSATION_OUTPUT = Lengths(
    (
        (0.0, 2),
        (0.05, 10),
        (0.1, 24),
        (0.25, 157),
        (0.5, 350),
        (0.75, 472),
        (0.9, 597),
        (0.99, 1_119),
        (1.0, 2_000),
    )
)
CONVERSATION_MESSAGE = Lengths(
    ((0.0, 1), (0.15, 5), (0.5, 25), (0.72, 420), (0.88, 4_250), (0.95, 7_000), (1.0, 30_000))
)


@dataclass(frozen=True, slots=True)
class SystemPrompt:
    """A beginning that many prompts share; `weight` is its share of conversations relative to the others'."""

    tokens: int
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """What the traffic is like. The defaults are the public conversation trace: an hour, 12,031 requests.

    Either `requests` or `duration_s` ends the trace; with both, what comes first. `returning` scales the chance
    that a conversation goes on and so the share of blocks that are used again: 0 is one request per conversation.
    """

    requests: int | None = 12_031
    duration_s: float | None = None
    rate_per_s: float = 3.4
    tick_s: float = 3.0
    block_tokens: int = BLOCK_TOKENS
    context_tokens: int = 126_195
    system_prompts: tuple[SystemPrompt, ...] = (SystemPrompt(BLOCK_TOKENS),)
    first_tokens: Lengths = CONVERSATION_FIRST
    message_tokens: Lengths = CONVERSATION_MESSAGE
    output_tokens: Lengths = CONVERSATION_OUTPUT
    returning: float = 1.0
    return_first: float = 0.272
    return_later: float = 0.896
    same_again: float = 0.027
    history_cut: float = 0.15
    pause_median_s: float = 145.0
    pause_spread: float = 1.2
    tenants: int = 0
    tenant_skew: float = 1.0

    def __post_init__(self) -> None:
        problems = _problems(self)
        if problems:
            raise InvalidArgument(f"a trace cannot be generated: {'; '.join(problems)}")


def conversation(**changes: object) -> GenerateOptions:
    """Chat with one short shared system prompt: .37 of the blocks are hits in an unlimited cache."""
    return replace(GenerateOptions(), **changes)  # type: ignore[arg-type]


def tool_agent(**changes: object) -> GenerateOptions:
    """Tools and agents: few long system prompts, short answers, quick returns; hit ratio about .55 to .6."""
    base = GenerateOptions(
        requests=23_608,
        rate_per_s=6.67,
        system_prompts=(
            SystemPrompt(512, 0.463),
            SystemPrompt(12 * 512, 0.39),
            SystemPrompt(5 * 512, 0.146),
            SystemPrompt(512, 0.001),
        ),
        first_tokens=Lengths(
            (
                (0.0, 1_000),
                (0.25, 3_300),
                (0.5, 6_150),
                (0.75, 8_700),
                (0.9, 15_500),
                (0.99, 58_000),
                (1.0, 121_000),
            )
        ),
        message_tokens=Lengths(((0.0, 1), (0.5, 90), (0.8, 900), (0.95, 4_000), (1.0, 20_000))),
        output_tokens=Lengths(((0.0, 2), (0.5, 30), (0.75, 190), (0.9, 530), (0.99, 830), (1.0, 2_000))),
        pause_median_s=40.0,
        pause_spread=1.1,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def single_turn(**changes: object) -> GenerateOptions:
    """Independent requests as a Poisson process: nothing comes back, only the system prompt is shared."""
    return replace(GenerateOptions(returning=0.0, tick_s=0.0), **changes)  # type: ignore[arg-type]


def generate(options: GenerateOptions, rng: random.Random) -> Trace:
    """A trace with these statistics; the same options and the same state of `rng` give the same trace."""
    draws = np.random.default_rng(rng.getrandbits(128))
    plan = _plan_requests(options, draws)
    shared, inputs = _grow_prompts(options, plan, draws)
    ids, offsets = _blocks(options, plan, shared, inputs)
    arrival_s = plan.arrival_s
    if options.tick_s > 0:
        arrival_s = np.floor(arrival_s / options.tick_s) * options.tick_s
    tenant = None
    if options.tenants > 0:
        weights = 1.0 / np.arange(1, options.tenants + 1) ** options.tenant_skew
        of_session = draws.choice(options.tenants, plan.sessions, p=weights / weights.sum())
        tenant = of_session[plan.session].astype(np.int32)
    _, session = np.unique(plan.session, return_inverse=True)
    return Trace(
        # Whole milliseconds: a trace comes back from its file as it was.
        arrival_s=np.rint(arrival_s * 1000) / 1000,
        input_tokens=inputs.astype(np.int32),
        output_tokens=plan.outputs.astype(np.int32),
        offsets=offsets,
        hash_ids=ids,
        block_tokens=options.block_tokens,
        tenant=tenant,
        session=session.astype(np.int32),
    )


@dataclass(frozen=True, slots=True)
class _Plan:
    """Who asks when, in order of arrival; `parent` is the row of the turn before, or -1."""

    arrival_s: NDArray[np.float64]
    session: NDArray[np.int64]
    parent: NDArray[np.int64]
    outputs: NDArray[np.int64]
    sessions: int


def _plan_requests(options: GenerateOptions, draws: np.random.Generator) -> _Plan:
    """Turns of all conversations within the time of the trace.

    Conversations that began before the trace are there too (their first turn in it has no parent in it), so the
    rate is the same from the first second on.
    """
    wanted = options.requests if options.requests is not None else math.inf
    span_s = options.duration_s if options.duration_s is not None else math.inf
    reach_s = min(span_s, wanted / options.rate_per_s * 1.1 + 30)
    returns = _return_chances(options)
    turns_mean = 1.0 + float(np.cumprod(returns).sum())
    pause_mean_s = options.pause_median_s * math.exp(options.pause_spread**2 / 2)
    while True:
        before_s = 0.0 if turns_mean == 1.0 else min(20 * pause_mean_s, 4 * 3600.0)
        count = int(draws.poisson(options.rate_per_s / turns_mean * (reach_s + before_s)))
        starts_s = np.sort(draws.random(count)) * (reach_s + before_s) - before_s
        at_s, session, depth = _turns(options, starts_s, returns, draws)
        inside = np.flatnonzero((at_s >= 0) & (at_s < min(span_s, reach_s)))
        if len(inside) >= wanted or reach_s >= span_s:
            break
        reach_s *= 1.3
    order = inside[np.lexsort((session[inside], at_s[inside]))]
    if len(order) > wanted:
        order = order[: int(wanted)]
    at_s, session, depth = at_s[order], session[order], depth[order]
    parent = np.full(len(order), -1, np.int64)
    chain = np.lexsort((depth, session))
    follows = np.flatnonzero(session[chain][1:] == session[chain][:-1])
    parent[chain[follows + 1]] = chain[follows]
    outputs = options.output_tokens.sample(len(order), draws)
    return _Plan(at_s, session, parent, outputs, count)


def _return_chances(options: GenerateOptions) -> NDArray[np.float64]:
    """Chance that turn k is followed by another: people who came back once come back more."""
    turn = np.arange(_TURNS_MAX - 1)
    chance = options.return_later - (options.return_later - options.return_first) * _RETURN_GROWTH**turn
    scaled: NDArray[np.float64] = np.clip(chance * options.returning, 0.0, 0.97)
    return scaled


def _turns(
    options: GenerateOptions,
    starts_s: NDArray[np.float64],
    returns: NDArray[np.float64],
    draws: np.random.Generator,
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    alive, at_s = np.arange(len(starts_s)), starts_s
    times, sessions, depths = [at_s], [alive], [np.zeros(len(alive), np.int64)]
    for turn, chance in enumerate(returns, start=1):
        stays = np.flatnonzero(draws.random(len(alive)) < chance)
        if not len(stays):
            break
        alive = alive[stays]
        pause_s = options.pause_median_s * np.exp(options.pause_spread * draws.standard_normal(len(alive)))
        at_s = at_s[stays] + np.maximum(pause_s, 1e-3)
        times.append(at_s)
        sessions.append(alive)
        depths.append(np.full(len(alive), turn, np.int64))
    return np.concatenate(times), np.concatenate(sessions), np.concatenate(depths)


def _systems(options: GenerateOptions, plan: _Plan, draws: np.random.Generator) -> NDArray[np.int64]:
    """Which system prompt each request begins with; a conversation keeps its own."""
    weights = np.array([prompt.weight for prompt in options.system_prompts], float)
    if not len(weights):
        return np.full(len(plan.session), -1, np.int64)
    of_session = draws.choice(len(weights), plan.sessions, p=weights / weights.sum()).astype(np.int64)
    return of_session[plan.session]


def _grow_prompts(
    options: GenerateOptions, plan: _Plan, draws: np.random.Generator
) -> tuple[tuple[NDArray[np.int64], NDArray[np.int64]], NDArray[np.int64]]:
    """((row whose blocks a request begins with or -1, how many), input tokens) of all requests."""
    count = len(plan.session)
    system = _systems(options, plan, draws)
    system_tokens = np.array([prompt.tokens for prompt in options.system_prompts] or [0], np.int64)[system]
    inputs = options.first_tokens.sample(count, draws)
    inputs = np.minimum(np.maximum(inputs, system_tokens + 1), options.context_tokens)
    message = options.message_tokens.sample(count, draws)
    kind, kept = draws.random(count), draws.random(count)
    source = np.full(count, -1, np.int64)
    shared = np.zeros(count, np.int64)
    for number in range(len(options.system_prompts)):
        rows = np.flatnonzero((system == number) & (plan.parent < 0))
        if len(rows):
            source[rows[1:]] = rows[0]
            shared[rows[1:]] = options.system_prompts[number].tokens // options.block_tokens
    for rows in _generations(plan.parent):
        before = inputs[plan.parent[rows]]
        whole = before + plan.outputs[plan.parent[rows]] + message[rows]
        again = kind[rows] < options.same_again
        # A window that is full loses its oldest turns, like one that an application has cut.
        cut = (kind[rows] >= 1 - options.history_cut) | (whole > options.context_tokens)
        kept_tokens = system_tokens[rows] + (kept[rows] * (before - system_tokens[rows])).astype(np.int64)
        whole = np.where(cut, kept_tokens + message[rows] + plan.outputs[plan.parent[rows]], whole)
        inputs[rows] = np.where(again, before, np.minimum(whole, options.context_tokens))
        common = np.where(cut, np.minimum(kept_tokens, inputs[rows]), before) // options.block_tokens
        source[rows] = plan.parent[rows]
        shared[rows] = np.where(again, -(-before // options.block_tokens), common)
    return (source, shared), inputs


def _generations(parent: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Rows with a parent, parents before their children."""
    level = np.zeros(len(parent), np.int64)
    rows = np.flatnonzero(parent >= 0)
    for row in rows.tolist():
        level[row] = level[parent[row]] + 1
    return [np.flatnonzero(level == depth) for depth in range(1, int(level.max(initial=0)) + 1)]


def _blocks(
    options: GenerateOptions,
    plan: _Plan,
    shared: tuple[NDArray[np.int64], NDArray[np.int64]],
    inputs: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(hash ids, offsets): the shared beginning is copied from its source, the rest are new ids in order of arrival."""
    source, common = shared
    counts = -(-inputs // options.block_tokens)
    fresh = counts - common
    offsets = np.r_[0, np.cumsum(counts)].astype(np.int64)
    first_new = np.cumsum(fresh) - fresh
    ids = _ranges(first_new - common, counts)
    roots = np.flatnonzero((plan.parent < 0) & (common > 0))
    for rows in (roots, *_generations(plan.parent)):
        ids[_ranges(offsets[rows], common[rows])] = ids[_ranges(offsets[source[rows]], common[rows])]
    return ids, offsets


def _ranges(begins: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """begins[0], begins[0] + 1, ... counts[0] of them, then those of the next row, in one array."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    ranges: NDArray[np.int64] = np.arange(total) + np.repeat(begins - (ends - counts), counts)
    return ranges


def _problems(options: GenerateOptions) -> list[str]:
    """What makes these options impossible, as sentences."""
    asked = (
        (options.requests is None and options.duration_s is None, "give requests or duration_s"),
        (not 1 <= (options.requests or 1) <= _REQUESTS_MAX, f"requests is 1 to {_REQUESTS_MAX:,}"),
        (options.duration_s is not None and not 0 < options.duration_s < math.inf, "duration_s is above 0"),
        (not 0 < options.rate_per_s < math.inf, f"rate_per_s is above 0, here {options.rate_per_s}"),
        (
            options.requests is None and (options.duration_s or 0.0) * options.rate_per_s > _REQUESTS_MAX,
            f"duration_s times rate_per_s is more than {_REQUESTS_MAX:,} requests",
        ),
        (not 0 <= options.tick_s < math.inf, f"tick_s is 0 (exact times) or more, here {options.tick_s}"),
        (options.block_tokens < 1, f"block_tokens is 1 or more, here {options.block_tokens}"),
        (
            any(prompt.tokens < 1 or not prompt.weight > 0 for prompt in options.system_prompts),
            "a system prompt has at least one token and a weight above 0",
        ),
        (
            any(prompt.tokens >= options.context_tokens for prompt in options.system_prompts),
            f"a system prompt is shorter than context_tokens, here {options.context_tokens}",
        ),
        (not 0 <= options.returning < math.inf, f"returning is 0 or more, here {options.returning}"),
        (not 0 < options.pause_median_s < math.inf, "pause_median_s is above 0"),
        (not 0 <= options.pause_spread <= 3, "pause_spread is 0 to 3"),
        (options.tenants < 0, "tenants is 0 or more"),
        (
            not 0 <= options.same_again <= 1 - options.history_cut <= 1,
            "same_again and history_cut are shares, together at most 1",
        ),
        (
            not all(0 <= chance < 1 for chance in (options.return_first, options.return_later)),
            "return_first and return_later are shares below 1",
        ),
    )
    return [sentence for is_wrong, sentence in asked if is_wrong]
