"""What the images, sounds and videos of a request are: the content that the model gets, whatever they are called.

Idea: vLLM names a medium by a hash, or by what its client calls it, which need not be one thing. The tensors that go to
the model say what it gets. They are hashed on a thread of their own; vLLM's scheduler is answered "not known yet"
meanwhile.

An engine keeps the results of its encoder under vLLM's name. So a name that stands for two contents within an engine
is refused: whose result was used is not known.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final

from mooncache.connectors.vllm.core.refusals import PoolRefusal, Uncached, said
from mooncache.connectors.vllm.inquiries import Inquiries
from mooncache.kvcache import identity
from mooncache.kvcache.media import Medium

NAMES_MAX: Final = 1 << 16
"""That are remembered: more than an encoder's cache has results."""


class MediaContents:
    """Contents of media. All methods but the thread's are called on the scheduler's thread."""

    def __init__(self, changed: threading.Event | None = None) -> None:
        """`changed` is set when an answer is there."""
        self._asked: Inquiries[tuple[Medium, ...] | PoolRefusal] = Inquiries(
            "mooncache-media", changed or threading.Event()
        )
        self._known: OrderedDict[str, str] = OrderedDict()  # the thread's

    def ask(self, request_id: str, features: Sequence[Any] | None) -> tuple[Medium, ...] | PoolRefusal | None:
        """The media of a request by vLLM's MultiModalFeatureSpec, or why they have no identity; None while it is not
        known yet."""
        if not features:
            return ()
        return self._asked.ask(request_id, lambda: self._identify(list(features)))

    def forget(self, request_id: str) -> None:
        """The request is over."""
        self._asked.forget(request_id)

    @property
    def pending(self) -> bool:
        """True while an answer is missing."""
        return self._asked.pending

    def close(self) -> None:
        """End the thread after the request that it is at."""
        self._asked.close()

    # --- the thread ------------------------------------------------------------------------------------------

    def _identify(self, features: list[Any]) -> tuple[Medium, ...] | PoolRefusal:
        try:
            return tuple(self._medium(feature) for feature in features)
        except Exception as error:  # noqa: BLE001  (whatever it is: this request's media have no identity)
            return PoolRefusal(Uncached.MULTIMODAL, said(error))

    def _medium(self, feature: Any) -> Medium:
        if feature.data is None:
            raise ValueError(f"the content of its {feature.modality} is not in the engine's process")
        content = {name: described(part.data) for name, part in feature.data.items()}
        digest = identity.digest_of([feature.modality, content])
        if self._known.setdefault(feature.identifier, digest) != digest:
            raise ValueError(
                f"the {feature.modality} called {feature.identifier} is another one than it was under this name"
            )
        self._known.move_to_end(feature.identifier)
        while len(self._known) > NAMES_MAX:
            self._known.popitem(last=False)
        place = feature.mm_position
        return Medium(int(place.offset), int(place.offset) + int(place.length), digest)


def described(value: Any) -> Any:
    """A part of a medium as plain data, equal exactly for equal contents. Raises ValueError for what has none."""
    import torch

    if isinstance(value, torch.Tensor):
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        digest = hashlib.sha256(
            content
        ).hexdigest()  # three times as fast as BLAKE3 where processors have it built in
        return ["tensor", str(value.dtype), list(value.shape), digest]
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(described, value)]
    if isinstance(value, bool | int | float | str):
        return [type(value).__name__, repr(value)]
    raise ValueError(f"a part of it is a {type(value).__name__}, whose content is not known")
