"""Tokens and block keys of a prompt, with the tokenizer of the model's engine.

A tokenizer is loaded once per model in the background. It is used only when its digest is the one in the engine's
passport: other tokens would give keys that nobody has. Without a usable one requests are served without keys.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mooncache import auth
from mooncache.clock import Clock
from mooncache.errors import ConfigInvalid
from mooncache.gateway.core.body import Inquiry
from mooncache.gateway.core.fleet import Model
from mooncache.gateway.metrics import GatewayMetrics
from mooncache.kvcache.identity import tokenizer_digest
from mooncache.kvcache.keys import content_passport, request_keys
from mooncache.logs import Event, get_logger
from mooncache.passport import Passport

if TYPE_CHECKING:
    from array import array

    from mooncache.gateway.tokens import Prompt, PromptReader

# Keys of fewer tokens are made on the loop: a millisecond of hashing, less than a hop to a thread costs under load.
_INLINE_TOKENS: Final = 65_536

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Known:
    """What is known about one request's prompt. `keys` are those of its longest prompt."""

    prompts: list[array[int]]
    token_count: int
    keys: bytes = b""
    content_keys: bytes = b""
    public_tokens: int = 0
    block_tokens: int = 0
    passport_root: bytes = b""


@dataclass(slots=True)
class _Entry:
    path: str
    digest: str = ""
    reader: PromptReader | None = None
    reason: str = "loading"


class Readers:
    """See the module's text.

    Args:
        cache_bytes, threads: see PromptReader.load.
        public_prefix: whether requests may share the cache of leading messages that they declare public.
    """

    def __init__(
        self,
        token: auth.Token,
        clock: Clock,
        stats: GatewayMetrics,
        *,
        cache_bytes: int,
        threads: int,
        public_prefix: bool,
    ) -> None:
        self._clock, self._stats = clock, stats
        self._cache_bytes, self._threads = cache_bytes, threads
        self._public_salt = auth.public_salt(token) if public_prefix else ""
        self._entries: dict[str, _Entry] = {}

    @property
    def public_salt(self) -> str:
        """Salt of public prefixes; "" while sharing is off."""
        return self._public_salt

    async def prepare(self, model: Model) -> None:
        """Load the model's tokenizer when it is not loaded yet. Failures are logged and kept as the reason."""
        known = self._entries.get(model.name)
        if not model.tokenizer_path or (known is not None and known.path == model.tokenizer_path):
            return
        entry = self._entries[model.name] = _Entry(model.tokenizer_path)
        folder = Path(model.tokenizer_path)
        try:
            entry.digest = await asyncio.to_thread(tokenizer_digest, folder)
            entry.reader = await asyncio.to_thread(self._load, folder)
            if entry.reader is None:
                raise ConfigInvalid("there is no tokenizer.json")
        except Exception as error:  # noqa: BLE001  (files of others; whatever is wrong, requests are served)
            entry.reason = "no_tokenizer"
            log.warning(Event.TOKENIZER_UNUSABLE, model=model.name, path=str(folder), reason=str(error)[:500])
            return
        log.info(Event.TOKENIZER_LOADED, model=model.name, path=str(folder))
        if model.passport is not None and model.passport.tokenizer_digest != entry.digest:
            log.warning(Event.TOKENIZER_UNUSABLE, model=model.name, path=str(folder), reason="digest differs")

    async def know(self, inquiry: Inquiry, model: Model, salt: str) -> Known | None:
        """Tokens and keys of a request; None when they cannot be known for sure (counted with the reason)."""
        entry = self._entries.get(model.name)
        if entry is None or entry.reader is None:
            self._stats.no_keys.labels(entry.reason if entry is not None else "no_tokenizer").inc()
            return None
        if model.passport is not None and model.passport.tokenizer_digest != entry.digest:
            self._stats.no_keys.labels("other_tokenizer").inc()  # its tokens would mean something else there
            return None
        started_s = self._clock.now_s()
        # The salt as scope: what one tenant's prompts left in the tokens' cache never speeds up another's.
        prompt = await entry.reader.read_async(inquiry.body, inquiry.chat, scope=salt)
        if prompt is None or not prompt.token_ids:
            self._stats.no_keys.labels("unreadable").inc()
            return None
        passport = model.passport
        if passport is None:
            self._stats.no_keys.labels("no_passport").inc()
            return Known(prompt.token_ids, prompt.token_count)
        work = (inquiry, entry.reader, prompt, passport, salt)
        if prompt.token_count <= _INLINE_TOKENS:
            known = self._keys(*work)
        else:
            known = await asyncio.to_thread(self._keys, *work)
        self._stats.tokenise.observe(self._clock.now_s() - started_s)
        return known

    def close(self) -> None:
        """End the threads."""
        for entry in self._entries.values():
            if entry.reader is not None:
                entry.reader.close()

    def _load(self, folder: Path) -> PromptReader | None:
        from mooncache.gateway.tokens import PromptReader

        return PromptReader.load(folder, cache_bytes=self._cache_bytes, threads=self._threads)

    def _keys(
        self, inquiry: Inquiry, reader: PromptReader, prompt: Prompt, passport: Passport, salt: str
    ) -> Known:
        longest = max(prompt.token_ids, key=len)
        public = reader.public_tokens(inquiry.body, prompt, scope=salt) if self._public_salt else 0
        return Known(
            prompts=prompt.token_ids,
            token_count=prompt.token_count,
            keys=request_keys(
                passport, longest, salt=salt, public_tokens=public, public_salt=self._public_salt
            ),
            content_keys=content_passport(passport.block_tokens).chain_keys(longest),
            public_tokens=public,
            block_tokens=passport.block_tokens,
            passport_root=passport.root(),
        )
