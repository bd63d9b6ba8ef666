"""Tokens and keys of one prompt put together: the one rule for prompts read in the gateway and beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mooncache.gateway.core.prepared import TokenizedPrompt
from mooncache.kvcache.keys import content_passport, request_keys

if TYPE_CHECKING:
    from mooncache.gateway.tokens.prompt import Prompt
    from mooncache.gateway.tokens.reader import PromptReader
    from mooncache.kvcache.passport import Passport


def tokenized_of(
    fields: dict[str, Any],
    reader: PromptReader,
    prompt: Prompt,
    passport: Passport | None,
    *,
    salt: str,
    public_salt: str,
) -> TokenizedPrompt:
    """Put the tokens and the keys of one prompt together.

    Args:
        passport: of the model's engines; None: there are no keys.
        public_salt: "" while nothing is shared.
    """
    lengths = tuple(map(len, prompt.token_ids))
    if passport is None:
        return TokenizedPrompt(lengths, prompt.token_ids)
    longest = max(prompt.token_ids, key=len)
    public = reader.public_tokens(fields, prompt, scope=salt) if public_salt else 0
    return TokenizedPrompt(
        lengths,
        prompt.token_ids,
        keys=request_keys(passport, longest, salt=salt, public_tokens=public, public_salt=public_salt),
        content_keys=content_passport(passport.block_tokens).chain_keys(longest),
        public_tokens=public,
        block_tokens=passport.block_tokens,
        passport_root=passport.root(),
    )
