"""What the LoRA adapter of a request is: its content, by which two names of one adapter share blocks and no others do.

Idea: names, numbers and folders say nothing, files do. They are read on a thread of their own, once for each adapter;
vLLM's scheduler is answered "not known yet" meanwhile. For each request they are looked at again.

Files say what is in the engine's memory only if they are what they were when the engine read them. When that was is
not said, but it was after the engine's start: files that changed since then are refused, and so are those that change
later. The digest of an adapter stays under its id, so it cannot become another one's.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any, Final, NamedTuple

from mooncache.connectors.vllm.core.config_digest import LORA_HARMLESS, relevant
from mooncache.connectors.vllm.core.refusals import PoolRefusal, Uncached, said
from mooncache.connectors.vllm.inquiries import Inquiries
from mooncache.kvcache import identity
from mooncache.runtime.logs import Event, get_logger

_log = get_logger(__name__)
ADAPTERS_MAX: Final = 4096
"""That are remembered; an older one is read again."""
MARGIN_NS: Final = 2_000_000_000
"""Between the clock of a file system and that of this machine, beside coarse times of files."""


class _HashedAdapter(NamedTuple):
    marks: tuple[tuple[str, int, int, int, int, int], ...]
    digest: str


class Adapters:
    """Identities of adapters. All methods but the thread's are called on the scheduler's thread."""

    def __init__(
        self, state_dir: Path, lora_config: Any, *, started_ns: int, changed: threading.Event | None = None
    ) -> None:
        """
        Args:
            state_dir: where digests of files are remembered.
            lora_config: vLLM's LoRAConfig; None for an engine that takes no adapters.
            started_ns: wall clock at a time before which the engine has read no adapter.
            changed: set when an answer is there.
        """
        self._state_dir = state_dir
        self._settings = relevant(lora_config, LORA_HARMLESS) if lora_config is not None else None
        self._started_ns = started_ns
        self._asked: Inquiries[str | PoolRefusal] = Inquiries(
            "mooncache-adapter", changed or threading.Event()
        )
        self._known: OrderedDict[tuple[int, str], _HashedAdapter] = OrderedDict()  # the thread's
        self._refused: set[str] = set()  # the thread's: sentences that are in the log

    def ask(self, request_id: str, lora: Any) -> str | PoolRefusal | None:
        """The identity of a request's adapter, or why it has none; None while it is not known yet.

        Args:
            lora: vLLM's LoRARequest, None for a request without an adapter, whose identity is "".
        """
        if lora is None:
            return ""
        return self._asked.ask(request_id, lambda: self._identify(lora))

    def forget(self, request_id: str) -> None:
        """The request is over."""
        self._asked.forget(request_id)

    @property
    def pending(self) -> bool:
        """True while an answer is missing."""
        return self._asked.pending

    def close(self) -> None:
        """End the thread after the file that it reads."""
        self._asked.close()

    # --- the thread ------------------------------------------------------------------------------------------

    def _identify(self, lora: Any) -> str | PoolRefusal:
        try:
            found = self._digest(lora)
        except Exception as error:  # noqa: BLE001  (whatever it is: this adapter has no identity)
            found = PoolRefusal(Uncached.LORA_UNREADABLE, f"the adapter {lora.lora_name}: {said(error)}")
        if isinstance(found, PoolRefusal) and found.text not in self._refused:
            if len(self._refused) < ADAPTERS_MAX:
                self._refused.add(found.text)
            _log.warning(Event.CONNECTOR_ADAPTER_REFUSED, code=found.code, reason=found.text)
        return found

    def _digest(self, lora: Any) -> str | PoolRefusal:
        folder = identity.resolve_model(lora.lora_path)
        marks = identity.adapter_marks(folder)
        newest_ns = max(max(mark[-2:]) for mark in marks)
        if newest_ns + MARGIN_NS > self._started_ns:
            return PoolRefusal(
                Uncached.LORA_CHANGED,
                f"the files of the adapter {lora.lora_name} changed after the engine was started, so they need not "
                "be what it has read",
            )
        name = (int(lora.lora_int_id), str(lora.lora_path))
        known = self._known.get(name)
        if known is None or known.marks != marks:
            digest = identity.adapter_digest(folder, state_dir=self._state_dir)
            if identity.adapter_marks(folder) != marks:
                return PoolRefusal(
                    Uncached.LORA_CHANGED,
                    f"the files of the adapter {lora.lora_name} change while they are read",
                )
            if known is not None and known.digest != digest:
                return PoolRefusal(
                    Uncached.LORA_CHANGED,
                    f"the adapter {lora.lora_name} is another one than it was under this id",
                )
            known = _HashedAdapter(marks, digest)
        self._known[name] = known
        self._known.move_to_end(name)
        while len(self._known) > ADAPTERS_MAX:
            self._known.popitem(last=False)
        is_3d = bool(getattr(lora, "is_3d_lora_weight", False))
        return identity.digest_of([known.digest, self._settings, is_3d])
