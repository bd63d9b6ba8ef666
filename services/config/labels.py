"""Labels of a store node: where it is, as "name=value". Placement knows zone and rack; other names are for people."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Final

from pydantic import AfterValidator

from mooncache.config.base import Words

LABELS_MAX: Final = 16
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_.-]{0,62}")
_VALUE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/-]{0,62}")


def checked_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """The labels, sorted by name. Raises ValueError when there are too many, or one is none."""
    if len(labels) > LABELS_MAX:
        raise ValueError(f"a node has at most {LABELS_MAX} labels")
    for name, value in labels.items():
        if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
            raise ValueError(
                f"{name[:64]!r}={value[:64]!r} is no label; write for example zone=a or rack=r-12, "
                "up to 63 characters each"
            )
    return dict(sorted(labels.items()))


def labels_of(words: Iterable[str]) -> dict[str, str]:
    """The labels of words like "zone=a". Raises ValueError; of two with the same name the last one counts."""
    labels: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"{word[:64]!r} is no label; write name=value")
        labels[name] = value
    return checked_labels(labels)


def _checked_words(words: tuple[str, ...]) -> tuple[str, ...]:
    labels_of(words)
    return words


Labels = Annotated[Words, AfterValidator(_checked_words)]
