"""The keys of a hot prefix under the passports of all shards, for a conductor that wants to copy it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import aiohttp
import pytest
from tokenizers import Tokenizer

from mooncache.auth import cache_salt
from mooncache.kvcache.keys import (
    other_shard_keys,
    other_shards,
    passport_to_json,
    request_keys,
    shard_count,
)
from mooncache.kvcache.passport import Passport
from mooncache.proto.v1 import conductor_pb2 as pb
from tests.conditions import until
from tests.gateway.model_folder import instance_fields, passport_of
from tests.gateway.stand_in import MODEL, FakeEngine, running
from tests.gateway.test_two_legs import CHAT, RENDERED, post


def _passport(**more: int) -> Passport:
    fields = dict.fromkeys(
        ("weights_digest", "config_digest", "tokenizer_digest", "engine", "kv_dtype", "kv_layout"), "x"
    )
    return Passport(**fields, block_tokens=4, **more)


@pytest.mark.parametrize(("tp_size", "pp_size"), [(1, 1), (4, 1), (2, 2)])
def test_the_other_shards_are_all_ranks_but_ones_own(tp_size: int, pp_size: int) -> None:
    mine = _passport(tp_size=tp_size, pp_size=pp_size)
    others = other_shards(mine)
    assert len(others) + 1 == shard_count(mine) == tp_size * pp_size
    roots = [shard.root() for shard in (mine, *others)]
    assert len(set(roots)) == len(roots)
    ranks = [(shard.pp_rank, shard.tp_rank) for shard in others]
    assert ranks == sorted(ranks)
    tokens = list(range(11))
    assert other_shard_keys(mine, tokens, 2, salt="s") == b"".join(
        request_keys(shard, tokens[:8], salt="s") for shard in others
    )
    assert other_shard_keys(mine, tokens, 9, salt="s") == other_shard_keys(mine, tokens, 2, salt="s")


def test_public_blocks_have_the_public_salt_in_every_shard() -> None:
    mine = _passport(tp_size=2)
    (other,) = other_shards(mine)
    tokens = list(range(16))
    public = {"public_tokens": 8, "public_salt": "all"}
    whole = request_keys(other, tokens, salt="s", **public)
    assert other_shard_keys(mine, tokens, 3, salt="s", **public) == whole[: 3 * 32]
    assert other_shard_keys(mine, tokens, 1, salt="s", **public) == whole[:32]


async def test_the_next_report_brings_the_keys_that_a_plan_asks_for(
    tmp_path: Path, tokenizer_folder: Path, http: aiohttp.ClientSession
) -> None:
    passport = dataclasses.replace(passport_of(tokenizer_folder), tp_size=2)
    fields = {**instance_fields(tokenizer_folder), "passport_json": passport_to_json(passport)}
    async with running(tmp_path, [FakeEngine("d1", pb.INSTANCE_ROLE_BOTH)], instance=fields) as bench:
        model = bench.gateway.state.fleet.models[MODEL]
        await bench.gateway.state.tokenizers.prepare(model)
        await until(lambda: bench.gateway.state.tokenizers._entries[MODEL].reader is not None)
        asks, does_not = bench.plan("d1"), bench.plan("d1", decision_id="d-2")
        asks.shard_blocks = 2
        bench.conductor.plans = [asks, does_not]
        await post(bench, http, CHAT)
        await post(bench, http, CHAT)
        await until(lambda: bench.conductor.phases().count("FINISHED") == 2)
        told = [(each.decision_id, each.shard_keys) for each in bench.conductor.updates if each.shard_keys]
        tokens = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json")).encode(RENDERED).ids
        salt = cache_salt(bench.gateway.token, "alice", "")
        assert bench.conductor.scheduled[0].keys == request_keys(passport, tokens, salt=salt)
        (other,) = other_shards(passport)
        assert told == [("d-1", request_keys(other, tokens, salt=salt)[: 2 * 32])]
