"""Passports: roots, differences, key chains."""

from __future__ import annotations

import dataclasses
import struct

import blake3
import numpy as np
import pytest

from mooncache import _native
from mooncache.client.keys import split_keys
from mooncache.errors import InvalidArgument
from mooncache.kvcache.passport import Passport, key_of_name

BASE = Passport(
    weights_digest="aa11",
    config_digest="bb22",
    tokenizer_digest="cc33",
    engine="vllm-0.9",
    kv_dtype="bfloat16",
    kv_layout="HND",
    block_tokens=16,
    tp_rank=1,
    tp_size=4,
    pp_size=2,
)
OTHER_VALUES = {
    "weights_digest": "ab", "config_digest": "x", "tokenizer_digest": "y", "engine": "sglang", "kv_dtype": "fp8",
    "kv_layout": "NHD", "block_tokens": 32, "tp_rank": 2, "tp_size": 8, "pp_rank": 1, "pp_size": 3,
    "lora": "adapter", "tenant_salt": "s", "schema_version": 2,
}  # fmt: skip


def test_every_field_changes_the_root_and_is_named() -> None:
    assert {field.name for field in dataclasses.fields(Passport)} == set(OTHER_VALUES)
    roots = {BASE.root()}
    for name, value in OTHER_VALUES.items():
        other = dataclasses.replace(BASE, **{name: value})
        assert BASE.diff(other) == [(name, str(getattr(BASE, name)), str(value))]
        roots.add(other.root())
    assert len(roots) == len(OTHER_VALUES) + 1
    assert BASE.diff(dataclasses.replace(BASE)) == []


def test_root_follows_its_definition() -> None:
    entries = sorted((name.encode(), value.encode()) for name, value in BASE.entries())
    encoding = struct.pack("<II", 1, len(entries))
    for pair in entries:
        for text in pair:
            encoding += struct.pack("<I", len(text)) + text
    assert BASE.root() == blake3.blake3(encoding, derive_key_context="mooncache passport v1").digest()


def test_equal_passports_have_their_root_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []

    def counted(entries: list[tuple[str, str]]) -> bytes:
        made.append(entries)
        return real(entries)

    real = _native.passport_root
    monkeypatch.setattr(_native, "passport_root", counted)
    first = dataclasses.replace(BASE, tenant_salt="made once")
    again = dataclasses.replace(BASE, tenant_salt="made once")
    assert first.root() == again.root() == real(first.entries())
    assert len(made) == 1


def test_root_does_not_depend_on_the_order_of_fields() -> None:
    assert _native.passport_root(BASE.entries()[::-1]) == BASE.root()


@pytest.mark.parametrize(
    "fields",
    [[], [("", "x")], [("a", "1"), ("a", "1")], [("a", "x" * 70_000)], [(str(i), "") for i in range(300)]],
)
def test_bad_fields_are_refused(fields: list[tuple[str, str]]) -> None:
    with pytest.raises(ValueError, match="passport"):
        _native.passport_root(fields)


@pytest.mark.parametrize(
    ("name", "value"),
    [("weights_digest", ""), ("block_tokens", 0), ("tp_rank", 4), ("tp_rank", -1), ("pp_rank", 2), ("pp_size", 0),
     ("schema_version", 0)],
)  # fmt: skip
def test_impossible_values_are_refused(name: str, value: object) -> None:
    with pytest.raises(InvalidArgument):
        dataclasses.replace(BASE, **{name: value})


def test_chain_keys() -> None:
    tokens = list(range(50))
    keys = split_keys(BASE.chain_keys(tokens))
    assert len(keys) == 3
    assert BASE.chain_keys(np.arange(50)) == BASE.chain_keys(tuple(tokens)) == b"".join(keys)
    assert split_keys(BASE.chain_keys(tokens[16:], parent=keys[0])) == keys[1:]
    assert split_keys(dataclasses.replace(BASE, lora="x").chain_keys(tokens))[0] != keys[0]
    assert BASE.chain_keys([]) == b""


@pytest.mark.parametrize("tokens", [[-1] * 16, [1 << 32] * 16, ["a"], np.zeros(16), 5, "text"])
def test_bad_tokens_are_refused(tokens: object) -> None:
    with pytest.raises(InvalidArgument):
        BASE.chain_keys(tokens)


def test_key_of_name() -> None:
    expected = blake3.blake3("größe".encode(), derive_key_context="mooncache user key v1").digest()
    assert key_of_name("größe") == expected
    with pytest.raises(InvalidArgument):
        split_keys(b"x" * 33)
