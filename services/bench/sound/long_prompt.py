"""What a long prompt costs vLLM's scheduler, which every other request waits for: keys, question, answer.

Each rank of a tensor-parallel engine has keys of its own, so that eight ranks hash eight chains. The hash alone stands
beside it: what is left is all that the connector does.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from statistics import median

from mooncache.connectors.vllm.core.book import RequestBook
from mooncache.errors import Internal
from mooncache.kvcache.leg_hint import CacheOutcome
from mooncache.kvcache.passport import Passport
from mooncache.reporting.rows import Row, bar_row

_TOKENS = 131_072
_RANKS = 8
_BLOCK_TOKENS = 16
_PASSPORT = Passport(
    weights_digest="bench",
    config_digest="bench",
    tokenizer_digest="bench",
    engine="bench",
    kv_dtype="float32",
    kv_layout="bench",
    block_tokens=_BLOCK_TOKENS,
)


def run(quick: bool, progress: Callable[[str], None]) -> list[Row]:
    """Medians over prompts that were never sent before, for one rank and for eight."""
    rounds = 5 if quick else 25
    rows: list[Row] = []
    for ranks in (1, _RANKS):
        progress(f"{ranks} ranks")
        passports = [replace(_PASSPORT, tp_rank=rank, tp_size=ranks) for rank in range(ranks)]
        whole, hashing = [], []
        for number in range(rounds):
            tokens = list(range(number, number + _TOKENS))
            whole.append(_asked_s(passports, tokens))
            began_s = time.perf_counter()
            words = array("I", tokens)
            for passport in passports:
                passport.chain_keys(words)
            hashing.append(time.perf_counter() - began_s)
        label = f"prompt of {_TOKENS:,} tokens, {ranks} rank{'s' if ranks > 1 else ''}"
        alone = f"{label}: BLAKE3 alone"
        rows += [
            Row(alone, median(hashing) * 1e3, "ms"),
            bar_row(
                f"{label}: all of the scheduler",
                median(whole) * 1e3,
                "ms",
                against=alone,
                reference=median(hashing) * 1e3,
            ),
        ]
    return rows


def _asked_s(passports: list[Passport], tokens: list[int]) -> float:
    """Seconds of the scheduler's thread for a new request whose blocks the pool holds, all but the last."""
    book = RequestBook(passports)
    blocks, ranks = len(tokens) // _BLOCK_TOKENS, len(passports)
    present = (True,) * (ranks * (blocks - 1)) + (False,) * ranks
    began_s = time.perf_counter()
    book.add("r", tokens, salt="", params=None)
    book.match("r", 0, 0.0, pool_usable=True)
    book.answered("r", present, CacheOutcome.UNKNOWN, 0.0, 0.0)
    found = book.match("r", 0, 0.0, pool_usable=True)
    took_s = time.perf_counter() - began_s
    if found.tokens != _BLOCK_TOKENS * (blocks - 1):
        raise Internal(f"{found.tokens} tokens were found, not all but the last block")
    return took_s
