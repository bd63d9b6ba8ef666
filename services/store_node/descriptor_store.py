"""systemd's file descriptor store in place of a holder: it keeps the node's memory files over a restart of the unit.

Each file is stored under a name that says to which set it belongs, its place in the set, and how many there are:
`mooncache-5e1f09c2-0-3`. Files of different sets, or of a set with gaps, are never adopted together. systemd passes
copies of all stored descriptors at each start and keeps its own, so a node that has adopted them has nothing to store.

systemd starts the next process when it has waited for the former one to end: by then the kernel has taken down
its threads, its mappings and the registrations of devices.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Sequence
from typing import Final

from mooncache.errors import ConfigInvalid
from mooncache.runtime import service_manager
from mooncache.store_node.holder import FILES_MAX, HolderError

_NAME: Final = re.compile(r"mooncache-([0-9a-f]{8})-([0-9]{1,3})-([0-9]{1,3})", re.ASCII)
_TAKEN_S: Final = 5.0
Passed = Sequence[tuple[str, int]]


class DescriptorStore:
    """The memory files of this unit in systemd's store. Make it once, at the start: it owns what was passed."""

    place: Final = "systemd"

    def __init__(self) -> None:
        mine = [(name, file) for name, file in service_manager.passed_files() if _NAME.fullmatch(name)]
        self._stored = {name for name, _ in mine}
        self._files, unused = chosen_set(mine)
        for file in unused:
            os.close(file)
        self._identity = [_identity(file) for file in self._files]
        self._kept = False

    def take(self) -> list[int]:
        """Descriptors of what a former process left, which are the caller's now; none when there is nothing.

        Raises:
            ConfigInvalid: no service manager started this process.
        """
        if not service_manager.has_service_manager():
            raise ConfigInvalid(
                "store_node.descriptor_store needs systemd: start the node by a unit with Type=notify and "
                "FileDescriptorStoreMax= (deploy/systemd), or set it to false: then a holder keeps the memory."
            )
        taken, self._files = self._files, []
        return taken

    def keep(self, files: Sequence[int]) -> None:
        """Store these descriptors in place of those that are there.

        Raises:
            HolderError: they are not stored.
        """
        self._kept = False
        if len(files) > FILES_MAX:
            raise HolderError(f"more than {FILES_MAX} files; choose larger arenas")
        identity = [_identity(file) for file in files]
        try:
            if identity != self._identity:
                self.drop()
                _check_room(len(files))
                number = secrets.token_hex(4)
                for place, file in enumerate(files):
                    name = f"mooncache-{number}-{place}-{len(files)}"
                    self._stored.add(name)
                    service_manager.tell("FDSTORE=1", f"FDNAME={name}", files=[file])
            if not service_manager.wait_until_taken(_TAKEN_S):
                raise HolderError("systemd does not answer")
        except OSError as error:
            raise HolderError(f"systemd does not take them: {error.strerror or error}") from None
        self._identity, self._kept = identity, True

    def has(self, count: int) -> bool:
        """Whether so many files of this process are stored. systemd cannot be asked; it keeps what it has taken."""
        return self._kept and len(self._identity) == count

    def drop(self) -> None:
        """Let go of everything that a node of this unit has stored. Raises OSError."""
        for file in self._files:
            os.close(file)
        self._files, self._identity = [], []
        for name in sorted(self._stored):
            service_manager.tell("FDSTOREREMOVE=1", f"FDNAME={name}")
            self._stored.discard(name)


def chosen_set(passed: Passed) -> tuple[list[int], list[int]]:
    """The files of the one set that is whole, in order, and all other files. Two such sets: none is chosen."""
    sets: dict[tuple[str, int], dict[int, int]] = {}
    for name, file in passed:
        found = _NAME.fullmatch(name)
        if found is not None:
            sets.setdefault((found[1], int(found[3])), {}).setdefault(int(found[2]), file)
    whole = [
        [by_place[place] for place in range(count)]
        for (_, count), by_place in sets.items()
        if count and by_place.keys() == set(range(count))
    ]
    chosen = whole[0] if len(whole) == 1 else []
    return chosen, [file for _, file in passed if file not in chosen]


def _check_room(count: int) -> None:
    """Raises HolderError when systemd has said (since 254) that it does not store so many."""
    room = os.environ.get("FDSTORE", "")
    if room.isascii() and room.isdigit() and int(room) < count:
        raise HolderError(
            f"the unit stores {room} descriptors, and the node has {count}: set FileDescriptorStoreMax={count} or more"
        )


def _identity(file: int) -> tuple[int, int]:
    facts = os.fstat(file)
    return facts.st_dev, facts.st_ino
