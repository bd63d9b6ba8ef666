"""Which versions of an engine a connector works with."""

from __future__ import annotations

import re

from mooncache.errors import ConfigInvalid

Version = tuple[int, int, int]


def supported_minor(engine: str, text: str, *, oldest: Version, newer_than_all: Version) -> str:
    """The minor version of `text`, for example 0.5.

    Raises:
        ConfigInvalid: a version whose interfaces are not those that the connector has.
    """
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    found = tuple(map(int, numbers.groups())) if numbers else ()
    if not oldest <= found < newer_than_all:
        first, last = (".".join(map(str, each)) for each in (oldest, newer_than_all))
        raise ConfigInvalid(
            f"{engine} {text} is not supported by this version of mooncache. Install one from {first} on and before "
            f"{last}."
        )
    return ".".join(text.split(".")[:2])
