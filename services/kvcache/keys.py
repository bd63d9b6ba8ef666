"""Block keys of a request: the one rule that gateways and engines both follow.

A key chain is rooted in the passport with the request's salt as `tenant_salt`. With a public prefix the first complete
blocks come from the chain of the public salt and the others from the private chain over all tokens: what others may
share is named by content alone, what follows stays the tenant's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from mooncache.client.keys import KEY_BYTES
from mooncache.errors import InvalidArgument
from mooncache.kvcache.media import Medium, chain_keys
from mooncache.kvcache.passport import Passport

_PASSPORTS_CACHED = 4096

# Equal for every engine and tenant: its keys tell "same tokens, other passport or tenant" and can never read a block.
CONTENT_ENGINE = "content"


@lru_cache(maxsize=_PASSPORTS_CACHED)
def salted(passport: Passport, salt: str) -> Passport:
    """The passport under a request's salt."""
    return dataclasses.replace(passport, tenant_salt=salt)


@lru_cache(maxsize=_PASSPORTS_CACHED)
def adapted(passport: Passport, lora: str) -> Passport:
    """The passport of what an engine computes under an adapter, which `lora` names by its content; "": under none."""
    return dataclasses.replace(passport, lora=lora)


@lru_cache(maxsize=64)
def content_passport(block_tokens: int) -> Passport:
    """Passport that stands for tokens alone."""
    return Passport(
        weights_digest="-",
        config_digest="-",
        tokenizer_digest="-",
        engine=CONTENT_ENGINE,
        kv_dtype="-",
        kv_layout="-",
        block_tokens=block_tokens,
    )


def request_keys(
    passport: Passport,
    tokens: Any,
    *,
    salt: str = "",
    public_tokens: int = 0,
    public_salt: str = "",
    media: Sequence[Medium] = (),
    private: bytes | None = None,
) -> bytes:
    """Keys of the complete blocks of `tokens`, 32 bytes each, concatenated.

    Args:
        passport: the engine's, with an empty tenant salt.
        tokens: token ids (see Passport.chain_keys).
        salt: the request's private salt; "" for engines without tenants.
        public_tokens: leading tokens that may be shared under `public_salt`; rounded down to complete blocks.
        media: images, sounds and videos in the place of tokens.
        private: the chain under `salt` where it is known already.

    Raises:
        InvalidArgument: invalid token ids, or public tokens without a public salt.
    """
    if private is None:
        private = chain_keys(salted(passport, salt), tokens, media)
    if public_tokens < passport.block_tokens or not private:
        return private
    if not public_salt:
        raise InvalidArgument("public_tokens need a public_salt")
    blocks = min(public_tokens // passport.block_tokens, len(private) // KEY_BYTES)
    public = chain_keys(salted(passport, public_salt), tokens[: blocks * passport.block_tokens], media)
    return public + private[len(public) :]


def shard_count(passport: Passport) -> int:
    """Shards of the engine: each keeps its own part of every block, under a key of its own."""
    return passport.tp_size * passport.pp_size


def other_shards(passport: Passport) -> list[Passport]:
    """The passports of the engine's other shards, in the order of their ranks.

    All have the layout of this one, which is so for tensor parallelism. Stages of a pipeline with different numbers of
    layers have other layouts; keys that are made of these passports then name no block.
    """
    ranks = [(pp_rank, tp_rank) for pp_rank in range(passport.pp_size) for tp_rank in range(passport.tp_size)]
    ranks.remove((passport.pp_rank, passport.tp_rank))
    return [dataclasses.replace(passport, pp_rank=pp_rank, tp_rank=tp_rank) for pp_rank, tp_rank in ranks]


def other_shard_keys(
    passport: Passport,
    tokens: Any,
    blocks: int,
    *,
    salt: str = "",
    public_tokens: int = 0,
    public_salt: str = "",
) -> bytes:
    """Keys of the first complete blocks of `tokens`, at most `blocks`, under `other_shards`, one after the other.

    Raises InvalidArgument as `request_keys` does.
    """
    leading = tokens[: blocks * passport.block_tokens]
    public = min(public_tokens, len(leading))
    return b"".join(
        request_keys(shard, leading, salt=salt, public_tokens=public, public_salt=public_salt)
        for shard in other_shards(passport)
    )


def passport_to_json(passport: Passport) -> str:
    """The passport as a JSON object of its fields."""
    import json

    return json.dumps(dataclasses.asdict(passport))


def passport_from_json(text: str) -> Passport:
    """Back from `passport_to_json`. Raises InvalidArgument for anything else: the text came over a socket."""
    import json

    try:
        fields = json.loads(text)
        kinds = {field.name: field.type for field in dataclasses.fields(Passport)}
        for name, value in fields.items():
            if (kinds[name] == "int") is not (type(value) is int) or not isinstance(value, int | str):
                raise InvalidArgument(f"passport field {name} has the wrong type")
        return Passport(**fields)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InvalidArgument(f"not a passport: {error!r:.200}") from None
