"""GPU memory as source and destination in place: RDMA devices read and write it, the processor never does.

Only memory that is registered (`Client.register_buffer`) goes this way, in batches that would go over RDMA from host
memory too, and only where the GPU computes the checksums. Each block ends with an answer, or it is left to staging
(mooncache.client.device) for what remains of the call's time. How devices reach a GPU is logged when it turns out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from mooncache.client.device import (
    GET_LATE,
    PUT_LATE,
    BlockAnswer,
    BlockParts,
    DeviceStaging,
    DeviceView,
    GetAnswer,
    GroupCall,
    HostParts,
    PutAnswer,
    in_device,
    parts_of,
)
from mooncache.client.native_call import call_native
from mooncache.client.staging import Slices
from mooncache.errors import TransportUnavailable
from mooncache.runtime.logs import Event, get_logger

if TYPE_CHECKING:
    from mooncache._native import Client as NativeClient
    from mooncache._native import Registration

_log = get_logger(__name__)

InPlace = Callable[[Sequence[int], Slices, float], Sequence[BlockAnswer]]
"""(positions, their slices in GPU memory, limit_s) -> their answers."""
Staged = Callable[[Sequence[int], HostParts, float], Sequence[BlockAnswer]]
"""(positions, their parts in host memory, limit_s) -> their answers."""


_Stage = Callable[[Sequence[BlockParts], float, GroupCall[BlockAnswer]], list[BlockAnswer]]


class GpuDirect:
    """The registered GPU memory of one client. Thread-safe."""

    def __init__(self, staging: DeviceStaging) -> None:
        self._staging = staging
        self._lock = threading.Lock()
        self._said: dict[int, str] = {}  # by ordinal, of those that ever had a registered buffer

    def register(self, core: NativeClient, view: DeviceView) -> Registration:
        """The native registration of a range.

        Raises:
            InvalidArgument: it is empty, or overlaps one that is registered.
            TransportUnavailable: no CUDA here.
        """
        gpu = self._staging.device(view.ordinal)
        made = call_native(core.register_device_buffer, gpu, view.address, view.nbytes, view.owner)
        with self._lock:
            self._said.setdefault(view.ordinal, "")
        return made

    def put(
        self,
        core: NativeClient,
        sources: Sequence[BlockParts],
        limit_s: float,
        direct: InPlace[PutAnswer],
        staged: Staged[PutAnswer],
    ) -> list[PutAnswer]:
        """The answers of all sources in order: in place what can be, the others staged, all within `limit_s`."""

        def rest(values: Sequence[BlockParts], left_s: float, call: GroupCall[PutAnswer]) -> list[PutAnswer]:
            return self._staging.put(values, left_s, call)

        return self._move(core, sources, limit_s, direct, staged, rest, PUT_LATE)

    def get(
        self,
        core: NativeClient,
        targets: Sequence[BlockParts],
        limit_s: float,
        direct: InPlace[GetAnswer] | None,
        staged: Staged[GetAnswer],
    ) -> list[GetAnswer]:
        """As put, for a get; without `direct` all is staged."""

        def rest(values: Sequence[BlockParts], left_s: float, call: GroupCall[GetAnswer]) -> list[GetAnswer]:
            return self._staging.get(values, left_s, call)

        return self._move(core, targets, limit_s, direct, staged, rest, GET_LATE)

    def _move(
        self,
        core: NativeClient,
        values: Sequence[BlockParts],
        limit_s: float,
        direct: InPlace[BlockAnswer] | None,
        staged: Staged[BlockAnswer],
        stage: _Stage[BlockAnswer],
        late: BlockAnswer,
    ) -> list[BlockAnswer]:
        end_s = time.monotonic() + limit_s
        answers: dict[int, BlockAnswer] = {}
        ordinal, positions = self._candidates(values) if direct is not None else (0, [])
        if direct is not None and positions:
            found = direct(positions, [_slices(values[i]) for i in positions], limit_s)
            answers = {
                i: answer
                for i, answer in zip(positions, found, strict=True)
                if answer[0] != TransportUnavailable.code
            }
            self._say(core, ordinal)
        rest = [i for i in range(len(values)) if i not in answers]
        left_s = end_s - time.monotonic() if positions else limit_s
        if rest and left_s > 0:
            answers.update(zip(rest, _staged(values, rest, left_s, staged, stage), strict=True))
        return [answers.get(i, late) for i in range(len(values))]

    def _candidates(self, values: Sequence[BlockParts]) -> tuple[int, list[int]]:
        """Values that lie on one GPU of which some memory is registered. The native core knows which."""
        parts = [parts_of(value) for value in values]
        ordinals = {part.ordinal for own in parts for part in own if isinstance(part, DeviceView)}
        (ordinal, *others) = ordinals
        if others or ordinal not in self._said:
            return ordinal, []
        return ordinal, [
            i for i, own in enumerate(parts) if all(isinstance(part, DeviceView) for part in own)
        ]

    def _say(self, core: NativeClient, ordinal: int) -> None:
        gpu = self._staging.device(ordinal)
        how = core.gpu_direct(gpu)
        with self._lock:
            if not how or how == self._said[ordinal]:
                return
            self._said[ordinal] = how
        say = _log.warning if how.startswith("staged") else _log.info
        say(Event.CLIENT_GPU_DIRECT, device=gpu.name, ordinal=ordinal, how=how)


def _staged(
    values: Sequence[BlockParts],
    rest: list[int],
    left_s: float,
    staged: Staged[BlockAnswer],
    stage: _Stage[BlockAnswer],
) -> list[BlockAnswer]:
    def call(begin: int, end: int, parts: HostParts, limit_s: float) -> Sequence[BlockAnswer]:
        return staged(rest[begin:end], parts, limit_s)

    own = [values[i] for i in rest]
    if not in_device(own):  # what is left of the batch lies on the host
        return list(call(0, len(own), cast("HostParts", own), left_s))
    return stage(own, left_s, call)


def _slices(value: BlockParts) -> list[tuple[int, int]]:
    return [(part.address, part.nbytes) for part in parts_of(value) if isinstance(part, DeviceView)]
