"""Tokens and block keys of a prompt, with the tokenizer of the model's engine.

A tokenizer is loaded once per model in the background. It is used only when its digest is the one in the engine's
passport: other tokens would give keys that no engine has. Without a usable one requests are served without keys.
Engines name folders of their own machines; the one is taken that this machine has, too, with the same content.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mooncache import auth
from mooncache.errors import ConfigInvalid
from mooncache.gateway.core.body import Content, InferenceRequest, TokenizedPrompt
from mooncache.gateway.core.fleet import FleetModel
from mooncache.gateway.core.prepared import TokenizerSource
from mooncache.gateway.metrics import GatewayMetrics
from mooncache.kvcache.identity import tokenizer_digest
from mooncache.kvcache.keys import passport_to_json
from mooncache.runtime.clock import Clock
from mooncache.runtime.logs import Event, get_logger
from mooncache.runtime.metrics import observe

if TYPE_CHECKING:
    from mooncache.gateway.tokens import PromptReader

# Keys of fewer tokens are made on the loop: a millisecond of hashing, less than a hop to a thread costs under load.
_INLINE_TOKENS: Final = 65_536
_DIFFERENCES_MAX: Final = 3
_OFF_S: Final = 600.0

log = get_logger(__name__)


class NoKeys(StrEnum):
    """Why a request is served without block keys."""

    LOADING = "loading"
    NO_TOKENIZER = "no_tokenizer"
    UNREADABLE = "unreadable"
    """Only the engine can know the tokens of this prompt."""
    NO_PASSPORT = "no_passport"
    OTHER_COUNTS = "other_counts"
    """The engine counts other tokens."""
    OTHER_TOKENIZER = "other_tokenizer"
    """The engine has another tokenizer."""


@dataclass(slots=True)
class _Entry:
    path: str
    candidates: tuple[str, ...]
    digest: str = ""
    reader: PromptReader | None = None
    reason: NoKeys = NoKeys.LOADING
    differences: int = 0
    off_until_s: float = 0.0


def _holds(known: _Entry, candidates: tuple[str, ...], model: FleetModel) -> bool:
    """Whether what is known need not be looked for again: nothing has changed, or it is right and still named."""
    if known.candidates == candidates:
        return True
    right = model.passport is not None and known.digest == model.passport.tokenizer_digest
    return known.reader is not None and right and known.path in candidates


def _find(candidates: Sequence[str], wanted: str) -> tuple[Path, str]:
    """The first folder with the wanted digest, else the first one, and its digest. Raises what reading raises."""
    found: tuple[Path, str] | None = None
    error: Exception | None = None
    for candidate in candidates:
        try:
            digest = tokenizer_digest(Path(candidate))
        except Exception as refused:  # noqa: BLE001 - files of others; the next folder may do
            error = error or refused
            continue
        if digest == wanted or (not wanted and Path(candidate).exists()):
            return Path(candidate), digest
        found = found or (Path(candidate), digest)
    if found is None:
        raise error or ConfigInvalid("there is no folder with a tokenizer")
    return found


class Tokenizers:
    """Tokenizers of the engines' models, loaded in the background.

    Args:
        salts: the root of the salts, as it is then.
        cache_bytes, threads: see PromptReader.load.
        public_prefix: whether requests may share the cache of leading messages that they declare public.
        folders: of models on this machine, besides those that engines name.
    """

    def __init__(
        self,
        salts: Callable[[], auth.Token],
        clock: Clock,
        stats: GatewayMetrics,
        *,
        cache_bytes: int,
        threads: int,
        public_prefix: bool,
        folders: Sequence[str] = (),
    ) -> None:
        self._clock, self._stats = clock, stats
        self._cache_bytes, self._threads = cache_bytes, threads
        self._salts, self._public_prefix = salts, public_prefix
        self._folders = tuple(folders)
        self._entries: dict[str, _Entry] = {}

    @property
    def public_salt(self) -> str:
        """Salt of public prefixes; "" while sharing is off."""
        return auth.public_salt(self._salts()) if self._public_prefix else ""

    async def prepare(self, model: FleetModel) -> None:
        """Load the model's tokenizer when it is not loaded yet. Failures are logged and kept as the reason."""
        known = self._entries.get(model.name)
        candidates = tuple(dict.fromkeys((*model.tokenizer_paths, *self._folders)))
        if not candidates or (known is not None and _holds(known, candidates, model)):
            return
        entry = self._entries[model.name] = _Entry(candidates[0], candidates)
        folder = Path(entry.path)
        try:
            wanted = model.passport.tokenizer_digest if model.passport is not None else ""
            folder, entry.digest = await asyncio.to_thread(_find, candidates, wanted)
            entry.path = str(folder)
            entry.reader = await asyncio.to_thread(self._load, folder)
            if entry.reader is None:
                raise ConfigInvalid("there is no tokenizer.json")
        except Exception as error:  # noqa: BLE001  (files of others; whatever is wrong, requests are served)
            entry.reason = NoKeys.NO_TOKENIZER
            log.warning(Event.TOKENIZER_UNUSABLE, model=model.name, path=str(folder), reason=str(error)[:500])
            return
        log.info(Event.TOKENIZER_LOADED, model=model.name, path=str(folder))
        if model.passport is not None and model.passport.tokenizer_digest != entry.digest:
            log.warning(
                Event.TOKENIZER_UNUSABLE,
                model=model.name,
                path=str(folder),
                reason="the engine's tokenizer or chat template differs",
            )

    def source(self, model: FleetModel, salt: str) -> TokenizerSource | None:
        """Whose tokens the prompts of a model have; None when they cannot be known for sure (counted)."""
        entry = self._usable(model)
        if entry is None:
            return None
        passport = passport_to_json(model.passport) if model.passport is not None else ""
        return TokenizerSource(entry.path, entry.digest, passport, salt, self.public_salt)

    async def tokenize(
        self, request: InferenceRequest, content: Content, model: FleetModel, salt: str
    ) -> TokenizedPrompt | None:
        """Tokens and keys of a request; None when they cannot be known for sure (counted with the reason)."""
        entry = self._usable(model)
        if entry is None or entry.reader is None:
            return None
        started_s = self._clock.now_s()
        # The salt as scope: what one tenant's prompts left in the tokens' cache never speeds up another's.
        prompt = await entry.reader.read_async(content.fields, request.chat, scope=salt)
        if prompt is None or not prompt.token_ids:
            self.note(model, None, 0.0)
            return None
        make = partial(
            entry.reader.tokenized,
            content.fields,
            prompt,
            model.passport,
            salt=salt,
            public_salt=self.public_salt,
        )
        if prompt.token_count <= _INLINE_TOKENS:
            tokenized = make()
        else:
            tokenized = await asyncio.to_thread(make)
        self.note(model, tokenized, self._clock.now_s() - started_s)
        return tokenized

    def note(self, model: FleetModel, tokenized: TokenizedPrompt | None, elapsed_s: float) -> None:
        """Count what came of a prompt, wherever it was read."""
        if tokenized is None:
            self._stats.no_keys.labels(NoKeys.UNREADABLE).inc()
        elif model.passport is None:
            self._stats.no_keys.labels(NoKeys.NO_PASSPORT).inc()
        else:
            observe(self._stats.tokenise, elapsed_s)

    def compare(self, model: str, tokens: int, engine_tokens: int) -> None:
        """Take an engine's count of a prompt that was tokenised here.

        Engines whose count differs again and again read prompts in another way, most likely by another chat template:
        keys of such tokens are keys that no engine has, and each decode leg would wait until its limit. So there are
        none for a while.
        """
        entry = self._entries.get(model)
        if entry is None:
            return
        entry.differences = 0 if tokens == engine_tokens else entry.differences + 1
        if entry.differences >= _DIFFERENCES_MAX:
            entry.differences, entry.off_until_s = 0, self._clock.now_s() + _OFF_S
            reason = f"the engine counts {engine_tokens} tokens where this tokenizer and chat template give {tokens}"
            log.warning(Event.TOKENIZER_UNUSABLE, model=model, path=entry.path, reason=reason)

    def _usable(self, model: FleetModel) -> _Entry | None:
        """The model's tokenizer when its tokens are the engine's."""
        entry = self._entries.get(model.name)
        if entry is None or entry.reader is None:
            self._stats.no_keys.labels(entry.reason if entry is not None else NoKeys.NO_TOKENIZER).inc()
            return None
        if self._clock.now_s() < entry.off_until_s:
            self._stats.no_keys.labels(NoKeys.OTHER_COUNTS).inc()
            return None
        if model.passport is not None and model.passport.tokenizer_digest != entry.digest:
            self._stats.no_keys.labels(
                NoKeys.OTHER_TOKENIZER
            ).inc()  # its tokens would mean something else there
            return None
        return entry

    def close(self) -> None:
        """End the threads."""
        for entry in self._entries.values():
            if entry.reader is not None:
                entry.reader.close()

    def _load(self, folder: Path) -> PromptReader | None:
        from mooncache.gateway.tokens import PromptReader

        return PromptReader.load(folder, cache_bytes=self._cache_bytes, threads=self._threads)
