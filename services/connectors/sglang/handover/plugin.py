"""The entry point by which SGLang learns of the transfer backend `mooncache` (group `sglang.srt.plugins`).

SGLang loads such plugins in every process before it reads its arguments. Its list of transfer backends is an enum, and
a function that knows the enum's members. So the plugin adds a member and puts a hook around the function, by SGLang's
own registry of hooks. Under an unknown version it adds nothing: the name is then no choice, and the start ends.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, Final

from mooncache.connectors.sglang.engine_passport import check_version
from mooncache.errors import ConfigInvalid

BACKEND: Final = "mooncache"
_LOOKUP: Final = "sglang.srt.disaggregation.utils.get_kv_class"


def register() -> None:
    """Make `--disaggregation-transfer-backend mooncache` a choice; twice is harmless.

    Raises:
        ConfigInvalid: a version of SGLang whose transfer backends are not known here. SGLang logs it.
    """
    check_version()
    from sglang.srt.arg_groups.choices import (
        DISAGG_TRANSFER_BACKEND_CHOICES,
        add_disagg_transfer_backend_choices,
    )
    from sglang.srt.disaggregation import utils
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if BACKEND in DISAGG_TRANSFER_BACKEND_CHOICES:
        return
    if BACKEND not in {member.value for member in utils.TransferBackend}:
        add_member(utils.TransferBackend, BACKEND.upper(), BACKEND)
    HookRegistry.register(_LOOKUP, class_of, HookType.AROUND)
    add_disagg_transfer_backend_choices([BACKEND])


def class_of(original: Callable[..., Any], transfer_backend: Any, class_type: Any) -> Any:
    """SGLang's `get_kv_class`, with the classes of this backend."""
    from sglang.srt.disaggregation.utils import KVClassType

    if transfer_backend.value != BACKEND or class_type is KVClassType.KVARGS:
        return original(transfer_backend, class_type)
    from mooncache.connectors.sglang.handover import backend

    return {
        KVClassType.MANAGER: backend.MooncacheKVManager,
        KVClassType.SENDER: backend.MooncacheKVSender,
        KVClassType.RECEIVER: backend.MooncacheKVReceiver,
        KVClassType.BOOTSTRAP_SERVER: backend.MooncacheKVBootstrapServer,
    }[class_type]


def add_member(enum: type[Enum], name: str, value: str) -> Enum:
    """Give an enum one member more, which is found by value, by name and by iteration.

    Raises:
        ConfigInvalid: this Python keeps members in another way.
    """
    member: Enum = object.__new__(enum)
    member._name_, member._value_ = name, value
    member._sort_order_ = len(enum.__members__)  # type: ignore[attr-defined]
    try:
        enum._member_map_[name] = member
        enum._value2member_map_[value] = member
        enum._member_names_.append(name)
        type.__setattr__(enum, name, member)
    except (AttributeError, TypeError) as error:
        raise ConfigInvalid(
            f"A transfer backend cannot be added to SGLang's under this Python: {error}."
        ) from None
    if not all(found is member for found in (enum(value), getattr(enum, name))):
        raise ConfigInvalid("A transfer backend cannot be added to SGLang's under this Python.")
    return member
