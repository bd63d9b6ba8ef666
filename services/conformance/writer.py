"""A writer in a process of its own, which the kit kills: `python -m mooncache.conformance.writer`.

One line of JSON on stdin says which store, which keys, how many bytes. It says on stdout what it begins and what is
done: where the store has the hook, first one value of which only a half is written; then value after value.
"""

from __future__ import annotations

import json
import sys
from typing import Final

from mooncache.conformance.core.content import content_of
from mooncache.conformance.core.verdicts import NotOfferedError
from mooncache.conformance.store_contract import class_named, hook

_ORDER_BYTES_MAX: Final = 1 << 20
_VALUES_MAX: Final = 10_000
_STAY: Final = 2
_CHANGE: Final = 4


def main() -> None:
    order = json.loads(sys.stdin.readline(_ORDER_BYTES_MAX))
    store = class_named(order["store"])(order["config"])
    head, size_bytes = str(order["head"]), int(order["size_bytes"])
    try:
        partial = f"{head}/half".encode()
        part = hook(store, "begin")(partial, size_bytes)
        part.write(0, content_of(partial, size_bytes)[: size_bytes // 2])
        _say(f"half {partial.decode()}")
    except NotOfferedError:
        part = None  # then it only puts
    for number in range(_VALUES_MAX):
        stays = number < _STAY
        place = number if stays else _STAY + number % _CHANGE  # few keys: a small store must not be full
        key = f"{head}/{place}".encode()
        if not stays:
            store.remove(key)
        value = content_of(key, size_bytes)
        _say(f"begin {place}")
        store.put(key, value)
        if stays:
            _say(f"done {place}")
    del part


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
