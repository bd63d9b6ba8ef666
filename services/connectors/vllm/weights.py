"""What the weights in an engine's memory are: a fingerprint of samples, and a look that tells when they change.

Idea: files say what was loaded, not what lies in memory once a trainer has sent new weights. So a few windows of bytes
of every parameter, at places that follow from its name, make a fingerprint that enters every key. All windows are
read when it is made. A look between steps costs a fraction of a millisecond: it compares addresses, and one window of
each parameter, another one each time. No update of a model leaves all of these as they were.

A CPU keeps the weights of linear layers in packed form, out of reach, and the parameter is empty. They are read by
what they compute: a vector with a single 1 gives one column of the weights, exactly. They are packed anew for every
change, so a look only asks whether the packed form is still the same object.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

import torch

from mooncache import _native
from mooncache.errors import ConfigInvalid

WINDOWS: Final = 8
WINDOW_BYTES: Final = 64
_COLUMNS: Final = 4
_FRAMES_MAX: Final = 16


def models_in_memory() -> list[torch.nn.Module]:
    """The model, and the draft model where there is one, of the runner that calls the connector.

    vLLM hands a connector KV tensors and no model; the object that registers them has it.

    Raises:
        ConfigInvalid: no object on the way here has a model.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES_MAX):
        if frame is None:
            break
        caller: Any = frame.f_locals.get("self")
        if callable(getattr(caller, "get_model", None)) and hasattr(caller, "vllm_config"):
            draft = getattr(caller, "get_draft_model", lambda: None)()
            found = [caller.get_model(), draft]
            return [model for model in found if isinstance(model, torch.nn.Module)]
        frame = frame.f_back
    raise ConfigInvalid(
        "The weights in memory cannot be read: this vLLM registers KV tensors in an unknown way."
    )


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A parameter (or scale), where its module keeps it, and the address of its bytes."""

    name: str
    home: dict[str, object]
    key: str
    value: torch.Tensor
    address: int


@dataclass(frozen=True, slots=True)
class _Packed:
    """A linear layer whose weights were packed. The reference is weak, so that no look keeps old weights alive."""

    name: str
    module: torch.nn.Module
    form: weakref.ref[Any]


class WeightWatch:
    """Detects changes of the weights in memory. All methods run on the worker's main thread, between steps.

    Raises:
        ConfigInvalid: a parameter has no bytes that can be read (an update that failed leaves such).
    """

    def __init__(self, models: list[torch.nn.Module], *, experts_move: bool = False) -> None:
        """`experts_move`: experts change places while the engine runs (expert load balancing) and are left out."""
        if not models:
            raise ConfigInvalid("There is no model in memory.")
        self._models = models
        self._experts_move = experts_move
        self._turn = 0
        self._streams: dict[torch.device, object] = {}
        self.fingerprint = ""
        self.renew()

    def renew(self) -> str:
        """Read all samples; returns the fingerprint, 64 hexadecimal digits."""
        self._tensors = list(self._find_tensors())
        self._packed = list(self._find_packed())
        # One list of windows for each turn and device: a look gathers one of them by a single call.
        self._windows: list[dict[torch.device, list[torch.Tensor]]] = [{} for _ in range(WINDOWS)]
        parts: list[bytes] = []
        for tensor in self._tensors:
            value = tensor.value
            parts.append(f"{tensor.name}\0{value.dtype}\0{tuple(value.shape)}\0{value.stride()}\n".encode())
            for turn, window in enumerate(_windows_of(tensor.name, value)):
                self._windows[turn].setdefault(value.device, []).append(window)
        self._seen = [
            {device: self._gather(device, windows) for device, windows in turn.items()}
            for turn in self._windows
        ]
        for samples in self._seen:
            for sample in samples.values():
                parts.append(bytes(sample.cpu().numpy()))
        for layer in self._packed:
            parts.append(layer.name.encode() + _columns_of(layer.name, layer.module))
        self.fingerprint = _native.blake3(b"".join(parts)).hex()
        return self.fingerprint

    def changed(self) -> bool:
        """Whether the weights may be others than those of the fingerprint."""
        for tensor in self._tensors:
            now = tensor.home.get(tensor.key)
            if now is not tensor.value or now.data_ptr() != tensor.address:
                return True
        for layer in self._packed:
            if layer.form() is not layer.module.cpu_linear:
                return True
        self._turn = (self._turn + 1) % WINDOWS
        return any(
            not self._equal(device, windows, self._seen[self._turn][device])
            for device, windows in self._windows[self._turn].items()
        )

    def _find_tensors(self) -> Iterator[_Tensor]:
        seen: set[int] = set()
        for number, model in enumerate(self._models):
            for prefix, module in model.named_modules():
                if self._experts_move and "experts" in prefix.split("."):
                    continue
                scales = {key: value for key, value in module._buffers.items() if "scale" in key}
                for home, names in ((module._parameters, module._parameters), (module._buffers, scales)):
                    for key in names:
                        value = home[key]
                        if value is None or not value.numel() or id(value) in seen:
                            continue
                        name = f"{number}.{_plain(prefix)}.{key}"
                        if value.is_meta:
                            raise ConfigInvalid(
                                f"The parameter {name} has no values: an update did not complete."
                            )
                        seen.add(id(value))
                        yield _Tensor(name, home, key, value, value.data_ptr())

    def _find_packed(self) -> Iterator[_Packed]:
        for number, model in enumerate(self._models):
            for prefix, module in model.named_modules():
                weight = module._parameters.get("weight")
                form = getattr(module, "cpu_linear", None)
                if form is not None and weight is not None and not weight.numel():
                    yield _Packed(f"{number}.{_plain(prefix)}", module, weakref.ref(form))

    def _gather(self, device: torch.device, windows: list[torch.Tensor]) -> torch.Tensor:
        with self._beside(device):
            return torch.cat(windows)

    def _equal(self, device: torch.device, windows: list[torch.Tensor], seen: torch.Tensor) -> bool:
        with self._beside(device):
            return bool(torch.equal(torch.cat(windows), seen))

    def _beside(self, device: torch.device) -> Any:
        """On a GPU a stream of its own: a look does not wait for the step that runs. Updates end synchronised."""
        if device.type != "cuda":
            return torch.no_grad()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return torch.cuda.stream(self._streams[device])


def _plain(prefix: str) -> str:
    """The name of a module as in an engine that takes no adapters: vLLM wraps layers that an adapter may change."""
    return prefix.removesuffix(".base_layer").replace(".base_layer.", ".")


def _seed(name: str, number: int) -> int:
    return int.from_bytes(_native.blake3(f"{name}\0{number}".encode())[:8], "little")


def _windows_of(name: str, value: torch.Tensor) -> list[torch.Tensor]:
    """Views of a tensor's bytes, whatever its type; of a small one overlapping."""
    item = value.element_size()
    span = item * (
        1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    )
    length = min(WINDOW_BYTES, span)
    flat = torch.empty(0, dtype=torch.uint8, device=value.device)
    flat.set_(value.untyped_storage(), value.storage_offset() * item, (span,), (1,))
    starts = (_seed(name, number) % (span - length + 1) for number in range(WINDOWS))
    return [flat[start : start + length] for start in starts]


def _columns_of(name: str, module: torch.nn.Module) -> bytes:
    """Some columns of a packed layer's weights."""
    # A layer that every rank has whole, as the router of experts, has no partition.
    sizes = (getattr(module, size, 0) for size in ("input_size_per_partition", "input_size", "embedding_dim"))
    inputs = int(next(filter(None, sizes), 0))
    if not inputs:
        raise ConfigInvalid(f"The packed weights of {name} cannot be read.")
    weight: Any = module.weight
    probe = torch.zeros(_COLUMNS, inputs, dtype=weight.dtype, device=weight.device)
    for row in range(_COLUMNS):
        probe[row, _seed(name, row) % inputs] = 1
    with torch.inference_mode():
        found = module.cpu_linear(probe, weight, None)
    return bytes(found.contiguous().view(torch.uint8).numpy())
