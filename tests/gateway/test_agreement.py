"""POST /agreement: what a gateway and engines that read prompts in another way say of one prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from mooncache.gateway.core.agreement import first_difference, tokens_said
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


async def test_who_may_ask_and_what(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with running(tmp_path, [FakeEngine("e")]) as bench:
        admin = {"authorization": f"Bearer {bench.gateway.token.text}"}
        for headers, body, status in (
            (bench.auth(), b"{}", 403),
            ({}, b"{}", 401),
            (admin, b"[", 400),
            (admin, b'{"model": "unknown"}', 404),
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
