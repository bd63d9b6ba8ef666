"""POST /agreement: what a gateway and engines that read prompts in another way say of one prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from mooncache.gateway.core.agreement import answer_tokens, first_difference, probe_fields, tokens_said
from mooncache.gateway.core.read_back import expected_tokens, report_said, wait_ms
from mooncache.kvcache.keys import request_keys
from tests.conditions import until
from tests.gateway.model_folder import BLOCK_TOKENS, TEMPLATE, instance_fields, passport_of
from tests.gateway.stand_in import MODEL, FakeEngine, running


def bytes_of(messages: list[dict[str, str]], template: str = TEMPLATE) -> list[int]:
    """Token ids as the test's tokenizer gives them: one for each byte of the text, in the order of its alphabet."""
    from tokenizers import pre_tokenizers

    text = "".join(f"<{one['role']}>{one['content']}" for one in messages) + "<a>"
    alphabet = {symbol: number for number, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return [alphabet[symbol] for part, _ in split.pre_tokenize_str(text) for symbol in part]


def saying(change: Any = None) -> Any:
    async def behave(_: FakeEngine, __: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        found = bytes_of(body["messages"])
        return web.json_response({"prompt_token_ids": change(found) if change is not None else found})

    return behave


async def silent(_: FakeEngine, __: web.Request, ___: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"choices": []})


async def test_engines_are_compared_one_by_one(
    tmp_path: Path, tokenizer_folder: Path, http: aiohttp.ClientSession
) -> None:
    def other(tokens: list[int]) -> list[int]:
        return [*tokens[:7], 0, *tokens[7:]]

    engines = [FakeEngine("same", behave=saying()), FakeEngine("other", behave=saying(other))]
    engines.append(FakeEngine("silent", behave=silent))
    async with running(tmp_path, engines, instance=instance_fields(tokenizer_folder)) as bench:
        admin = {"authorization": f"Bearer {bench.gateway.token.text}"}

        async def asked() -> dict[str, Any]:
            async with http.post(bench.url + "/agreement", json={}, headers=admin) as answer:
                assert answer.status == 200, await answer.text()
                (model,) = (await answer.json())["models"]
                return dict(model)

        await until(
            lambda: bool(bench.gateway.state.tokenizers.source(bench.gateway.state.fleet.models[MODEL], ""))
        )
        model = await asked()
        assert (model["model"], model["block_tokens"], model["reason"]) == (MODEL, BLOCK_TOKENS, "")
        found = {one["instance_id"]: one for one in model["instances"]}
        assert found["same"]["first_difference"] == -1
        assert found["same"]["engine_tokens"] == model["prompt_tokens"] >= 2 * BLOCK_TOKENS
        assert found["other"]["first_difference"] == 7
        assert "return_token_ids" in found["silent"]["error"]
        sent = bench.engines["same"].requests[-1]
        expected = request_keys(
            passport_of(tokenizer_folder), bytes_of(sent["messages"]), salt=sent["cache_salt"]
        )
        assert "".join(found["same"]["keys"]) == expected.hex(), "keys as the engine itself makes them"
        salts = {engine.requests[-1]["cache_salt"] for engine in bench.engines.values()}
        assert len(salts) == 3, "blocks of each engine are its own"


def loading(loaded_tokens: int, chosen: int = 7) -> Any:
    """An engine that says so of requests with a hint, and then chooses that token."""

    async def behave(_: FakeEngine, __: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
        hint = asked.get("kv_transfer_params")
        said = {"mooncache": {"v": 1, "loaded_tokens": loaded_tokens, "outcome": "hit", "load_ms": 2.5}}
        more = {"kv_transfer_params": said} if hint else {}
        token_ids = [chosen if hint else 7] * asked["max_tokens"]
        answer = {"prompt_token_ids": bytes_of(asked["messages"]), "choices": [{"token_ids": token_ids}]}
        return web.json_response({**answer, **more})

    return behave


async def read_backs(
    tmp_path: Path, folder: Path, http: aiohttp.ClientSession, engines: list[FakeEngine]
) -> dict[str, Any]:
    """What POST /agreement says of blocks read back, by writer."""
    async with running(tmp_path, engines, instance=instance_fields(folder)) as bench:
        admin = {"authorization": f"Bearer {bench.gateway.token.text}"}
        state = bench.gateway.state
        await until(lambda: bool(state.tokenizers.source(state.fleet.models[MODEL], "")))
        async with http.post(
            bench.url + "/agreement", json={"read_back_ms": 60_000}, headers=admin
        ) as answer:
            (model,) = (await answer.json())["models"]
        return {one["writer"]: one for one in model["read_backs"]}


async def test_each_engine_is_asked_to_load_what_another_one_saved(
    tmp_path: Path, tokenizer_folder: Path, http: aiohttp.ClientSession
) -> None:
    engines = [FakeEngine("a", behave=loading(48)), FakeEngine("b", behave=loading(32, chosen=8))]
    found = await read_backs(tmp_path, tokenizer_folder, http, engines)
    assert {writer: one["reader"] for writer, one in found.items()} == {"a": "b", "b": "a"}
    assert (found["b"]["loaded_tokens"], found["b"]["first_difference"]) == (48, -1)
    assert (found["a"]["loaded_tokens"], found["a"]["first_difference"]) == (32, 0)
    assert (found["a"]["outcome"], found["a"]["load_ms"], found["a"]["error"]) == ("hit", 2.5, "")
    written, read = engines[0].requests[0], engines[1].requests[-1]
    hint = read.pop("kv_transfer_params")["mooncache"]
    assert read == written, "the same prompt under the same salt"
    tokens = len(bytes_of(written["messages"]))
    assert (hint["role"], hint["load_always"], hint["public_salt"]) == ("decode", True, "")
    assert hint["wait_tokens"] == tokens // BLOCK_TOKENS * BLOCK_TOKENS
    assert found["a"]["expected_tokens"] == expected_tokens(tokens, BLOCK_TOKENS)
    assert 0 < hint["wait_ms"] <= 2000


async def test_an_engine_without_another_one_reads_its_own_blocks_under_another_salt(
    tmp_path: Path, tokenizer_folder: Path, http: aiohttp.ClientSession
) -> None:
    """vLLM's own cache goes by the salt, so it computes or loads; the keys are those of the first request."""
    engine = FakeEngine("only", behave=loading(48))
    found = await read_backs(tmp_path, tokenizer_folder, http, [engine])
    assert found["only"]["reader"] == "only"
    written, read = engine.requests
    hint = read["kv_transfer_params"]["mooncache"]
    assert read["cache_salt"] != written["cache_salt"] == hint["public_salt"]
    passport, tokens = passport_of(tokenizer_folder), bytes_of(written["messages"])
    named = request_keys(
        passport,
        tokens,
        salt=read["cache_salt"],
        public_tokens=hint["public_tokens"],
        public_salt=hint["public_salt"],
    )
    assert named == request_keys(passport, tokens, salt=written["cache_salt"])


async def test_an_engine_that_reports_nothing(
    tmp_path: Path, tokenizer_folder: Path, http: aiohttp.ClientSession
) -> None:
    found = await read_backs(tmp_path, tokenizer_folder, http, [FakeEngine("plain", behave=saying())])
    assert (found["plain"]["outcome"], found["plain"]["first_difference"]) == ("", -1)


def test_probe_prompts_are_new_each_time_and_answers_complete_no_block() -> None:
    one, same, other = (probe_fields("m", salt, 16, 4096)["messages"] for salt in ("s", "s", "t"))
    assert one == same != other
    for tokens in range(1, 70):
        generated = answer_tokens(tokens, 16)
        assert 1 <= generated <= 4
        assert (tokens + generated - 1) // 16 == tokens // 16, "of the last one there is no KV yet"


def test_how_long_a_reader_may_wait() -> None:
    assert [wait_ms(left_ms) for left_ms in (9000, 2500, 1599, -5)] == [2000, 1000, 0, 0]


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"kv_transfer_params": 3}', b"\xff"])
def test_answers_without_a_report(data: bytes) -> None:
    assert report_said(data) is None


async def test_who_may_ask_and_what(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with running(tmp_path, [FakeEngine("e")]) as bench:
        admin = {"authorization": f"Bearer {bench.gateway.token.text}"}
        for headers, body, status in (
            (bench.auth(), b"{}", 403),
            ({}, b"{}", 401),
            (admin, b"[", 400),
            (admin, b'{"model": "unknown"}', 404),
            (admin, b'{"read_back_ms": 600001}', 400),
            (admin, b'{"read_back_ms": -1}', 400),
            (admin, b"x" * 5000, 413),
        ):
            async with http.post(bench.url + "/agreement", data=body, headers=headers) as answer:
                assert answer.status == status, await answer.text()
        assert not bench.engines["e"].requests, "no engine heard of it"
        async with http.post(bench.url + "/agreement", headers=admin) as answer:
            (model,) = (await answer.json())["models"]
        assert "no passport" in model["reason"]


def test_where_prompts_differ() -> None:
    assert first_difference([1, 2], [1, 2]) == -1
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2], [1]) == 1
    assert first_difference([], [1]) == 0


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{", b'{"prompt_token_ids": "x"}', b'{"prompt_token_ids": [true]}']
)
def test_hostile_answers_of_engines(data: bytes) -> None:
    with pytest.raises(ValueError, match="return_token_ids"):
        tokens_said(data)
