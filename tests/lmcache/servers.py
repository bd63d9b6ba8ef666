"""The L2 side of one LMCache server: our adapter as its own factory makes it, with objects in a real L1 buffer."""

from __future__ import annotations

import argparse
import json
import select
from collections.abc import Sequence
from typing import Any

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.memory_management import MemoryFormat, MemoryObj, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd

SHAPE = torch.Size([2, 2, 16, 64])
DTYPE = torch.float16
SIZE = SHAPE.numel() * DTYPE.itemsize
PLACES = 32
WAIT_MS = 60_000


def layout(shape: torch.Size = SHAPE, dtype: torch.dtype = DTYPE) -> dict[int, MemoryLayoutDesc]:
    """What LMCache says of its object groups when it asks."""
    return {0: MemoryLayoutDesc([shape], [dtype])}


def keys(
    *numbers: int, model: str = "tiny", rank: int = 0, group: int = 0, salt: str = ""
) -> list[ObjectKey]:
    """Keys of objects."""
    return [ObjectKey(number.to_bytes(32, "big"), model, rank, group, salt) for number in numbers]


class Server:
    """Tasks are waited for at the adapter's event fds, as LMCache's controllers wait."""

    def __init__(self, params: dict[str, Any]) -> None:
        spec = {
            "type": "plugin",
            "module_path": "mooncache.connectors.lmcache",
            "class_name": "MooncacheL2Adapter",
            "adapter_params": params,
        }
        arguments = argparse.Namespace(l2_adapter=[json.dumps(spec)])
        (config,) = parse_args_to_l2_adapters_config(arguments).adapters
        self.memory = torch.zeros(PLACES * SIZE, dtype=torch.uint8)
        desc = L1MemoryDesc(self.memory.data_ptr(), self.memory.numel(), 1)
        self.adapter = create_l2_adapter(config, l1_memory_desc=desc)

    def object(
        self, place: int, seed: int | None = None, shape: torch.Size = SHAPE, dtype: Any = DTYPE
    ) -> MemoryObj:
        """An object in L1, filled with random bytes of a seed."""
        raw = self.memory[place * SIZE : (place + 1) * SIZE]
        if seed is not None:
            maker = torch.Generator().manual_seed(seed)
            raw.copy_(torch.randint(0, 256, (SIZE,), dtype=torch.uint8, generator=maker))
        meta = MemoryObjMetadata(
            shape, dtype, place * SIZE, SIZE, 1, fmt=MemoryFormat.KV_2LTD, shapes=[shape], dtypes=[dtype]
        )
        return TensorMemoryObj(raw, meta, None)

    def objects(self, places: Sequence[int], seeds: Sequence[int | None]) -> list[MemoryObj]:
        """Objects in L1."""
        return [self.object(place, seed) for place, seed in zip(places, seeds, strict=True)]

    def store(self, asked: list[ObjectKey], objects: list[MemoryObj]) -> Any:
        """The result of a store."""
        number = self.adapter.submit_store_task(asked, objects)
        fd = self.adapter.get_store_event_fd()
        while True:
            _wait(fd)
            results = self.adapter.pop_completed_store_tasks()
            if number in results:
                return results[number]

    def lookup(self, asked: list[ObjectKey], descs: dict[int, MemoryLayoutDesc] | None = None) -> list[bool]:
        """For each object whether it is there."""
        number = self.adapter.submit_lookup_and_lock_task(asked, layout() if descs is None else descs)
        return self._bits(
            number,
            self.adapter.get_lookup_and_lock_event_fd(),
            self.adapter.query_lookup_and_lock_result,
            len(asked),
        )

    def load(self, asked: list[ObjectKey], objects: list[MemoryObj]) -> list[bool]:
        """For each object whether it came."""
        number = self.adapter.submit_load_task(asked, objects)
        return self._bits(
            number, self.adapter.get_load_event_fd(), self.adapter.query_load_result, len(asked)
        )

    def _bits(self, number: int, fd: int, query: Any, count: int) -> list[bool]:
        while True:
            _wait(fd)
            bitmap = query(number)
            if bitmap is not None:
                assert query(number) is None, "a result is given once"
                return [bool(bitmap.test(at)) for at in range(count)]

    def close(self) -> None:
        """End."""
        self.adapter.close()


def content(memory_obj: Any) -> bytes:
    """Bytes of an object."""
    return bytes(memory_obj.byte_array)


def _wait(fd: int) -> None:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    assert poller.poll(WAIT_MS), "no task ended"
    consume_fd(fd)
