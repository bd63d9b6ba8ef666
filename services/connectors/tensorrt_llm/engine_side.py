"""What scheduler and worker of one process share: the passport, the pool, and blocks on their way to the engine.

TensorRT-LLM has no way to say that a promised block has not come: it would answer with whatever lies in the page. So a
block is promised only when its verified bytes are in this process's memory, and a rank that cannot promise for the
others (tensor parallelism, where each rank is a process) does without the pool.
"""

from __future__ import annotations

import atexit
import importlib.metadata
import queue
import threading
from collections.abc import Sequence
from typing import Any, Final

import torch

from mooncache.config import load
from mooncache.connectors.named_blocks import NamedBlocks
from mooncache.connectors.tensorrt_llm.interface import check_version
from mooncache.errors import ConfigInvalid
from mooncache.kvcache import identity
from mooncache.kvcache.passport import Passport
from mooncache.kvcache.pool_link import PoolLink, connect_pool
from mooncache.runtime.logs import Event, get_logger

STAGED_BYTES_MAX: Final = 4 << 30
"""Of blocks that were promised and are not in the engine's memory yet."""
_STOP_S: Final = 10.0
_log = get_logger(__name__)


class EngineSide:
    """One engine's part of the pool. Thread-safe.

    Args:
        llm_args: the engine's arguments.

    Raises:
        ConfigInvalid: settings with which blocks cannot be shared, or another version of the engine.
    """

    def __init__(self, llm_args: Any) -> None:
        self._version = check_version()
        refuse_unsupported(llm_args)
        config = load()
        self._args, self._section = llm_args, config.connector
        self._state_dir = config.cluster.state_dir.expanduser()
        self.block_tokens = int(llm_args.kv_cache_config.tokens_per_block)
        self._passport: Passport | None = None
        self._block: tuple[torch.Size, torch.dtype] | None = None
        connect = connect_pool(
            master_targets="",
            state_dir=str(self._state_dir),
            name="tensorrt-llm",
            build=f"tensorrt_llm {importlib.metadata.version('tensorrt_llm')}",
        )
        self._link = PoolLink(connect)
        self._named = NamedBlocks(self._link, self._section)
        self._lock = threading.Lock()
        self._staged: dict[tuple[int, int], torch.Tensor] = {}
        self._waiting_bytes = 0
        self._saves: queue.Queue[tuple[list[bytes], torch.Tensor] | None] = queue.Queue()
        self._saver = threading.Thread(target=self._save_all, name="mooncache-saves", daemon=True)
        self._saver.start()

    @property
    def passport(self) -> Passport | None:
        """Of the blocks; None before the engine has registered its memory."""
        return self._passport

    @property
    def saves_decoded(self) -> bool:
        """Whether blocks that are filled while decoding are kept."""
        return self._section.save_decode_blocks

    def registered(self, cache: torch.Tensor) -> None:
        """The engine's memory: [blocks, ...]. Raises ConfigInvalid: the model's files cannot be read."""
        model = identity.resolve_model(str(self._args.model), getattr(self._args, "revision", None))
        shape = "x".join(map(str, cache.shape[1:]))
        self._block = (cache.shape[1:], cache.dtype)
        self._passport = Passport(
            weights_digest=identity.weights_digest(model, state_dir=self._state_dir),
            config_digest=identity.config_digest(model),
            tokenizer_digest=identity.tokenizer_digest(model),
            engine=f"tensorrt_llm {self._version}",
            kv_dtype=f"{self._args.kv_cache_config.dtype}/{cache.dtype}",
            kv_layout=shape,
            block_tokens=self.block_tokens,
        )
        _log.info(Event.CONNECTOR_STARTED, passport=self._passport.root().hex(), pool="kv")

    # --- loads --------------------------------------------------------------------------------------------------

    def fetch(self, request: int, keys: Sequence[bytes], first: int) -> int:
        """Bring leading blocks of `keys` into memory; how many came. Block `first` + n is then `take(request, ...)`."""
        if self._block is None or not keys:
            return 0
        shape, dtype = self._block
        block_bytes = int(torch.empty(0, dtype=dtype).element_size()) * shape.numel()
        with self._lock:
            room = max(0, STAGED_BYTES_MAX // block_bytes - len(self._staged))
        wanted = keys[: min(room, _leading(self._named.present(keys)))]
        blocks = [torch.empty(shape, dtype=dtype) for _ in wanted]
        views = [[memoryview(block.view(torch.uint8).reshape(-1).numpy())] for block in blocks]
        sizes = self._named.load(wanted, views)
        came = _leading([size == block_bytes for size in sizes])
        with self._lock:
            self._staged.update(((request, first + at), block) for at, block in enumerate(blocks[:came]))
        return came

    def take(self, request: int, number: int) -> torch.Tensor:
        """A block that was promised. Raises KeyError: it was not."""
        with self._lock:
            return self._staged.pop((request, number))

    def forget(self, request: int) -> None:
        """Blocks of a request that ended before it took them."""
        with self._lock:
            for name in [name for name in self._staged if name[0] == request]:
                del self._staged[name]

    # --- saves --------------------------------------------------------------------------------------------------

    def save(self, keys: list[bytes], blocks: torch.Tensor) -> None:
        """Store copies [keys, ...] in host memory, later; beyond the queue's limit they are dropped."""
        with self._lock:
            if self._waiting_bytes + blocks.nbytes > self._section.save_queue_bytes_max:
                return
            self._waiting_bytes += blocks.nbytes
        self._saves.put((keys, blocks))

    def _save_all(self) -> None:
        while (item := self._saves.get()) is not None:
            keys, blocks = item
            raw = blocks.contiguous().view(torch.uint8).reshape(len(keys), -1).numpy()
            there = self._named.present(keys)
            missing = [at for at, found in enumerate(there) if not found]
            self._named.save([keys[at] for at in missing], [[memoryview(raw[at])] for at in missing])
            with self._lock:
                self._waiting_bytes -= blocks.nbytes

    def close(self) -> None:
        """Store what waits, and leave the pool."""
        self._saves.put(None)
        self._saver.join(_STOP_S)
        self._link.close()


def _leading(there: Sequence[bool]) -> int:
    """How many from the first on."""
    return next((at for at, found in enumerate(there) if not found), len(there))


def refuse_unsupported(llm_args: Any) -> None:
    """Raises ConfigInvalid with every setting under which blocks cannot be shared."""
    found = {
        f"{name} above 1": int(getattr(llm_args, name, 1) or 1) > 1
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
    }
    found |= {
        "speculative_config": getattr(llm_args, "speculative_config", None) is not None,
        "enable_attention_dp": bool(getattr(llm_args, "enable_attention_dp", False)),
    }
    named = [name for name, given in found.items() if given]
    if named:
        raise ConfigInvalid(f"The connector for TensorRT-LLM does not support {', '.join(named)}.")


_sides: dict[int, EngineSide] = {}
_sides_lock = threading.Lock()


def side_of(llm_args: Any) -> EngineSide:
    """The one of these arguments in this process: the engine gives the same to its scheduler and to its worker."""
    with _sides_lock:
        if id(llm_args) not in _sides:
            _sides[id(llm_args)] = EngineSide(llm_args)
        return _sides[id(llm_args)]


def close_sides() -> None:
    """Leave the pool, in every engine of this process."""
    with _sides_lock:
        sides = list(_sides.values())
        _sides.clear()
    for side in sides:
        side.close()


atexit.register(close_sides)
