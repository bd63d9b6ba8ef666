"""A link that loses packets at random, in both directions, as the kernel's traffic control makes it."""

from __future__ import annotations

import re
import subprocess
from typing import Final

_RANDOM: Final = 0xFFFFF038  # where a classic BPF program finds a random number: SKF_AD_OFF + SKF_AD_RANDOM
_LOSE, _PASS = 2, 0  # TC_ACT_SHOT, TC_ACT_OK


def lose_at_random(device: str, share: float) -> None:
    """From now on each packet that comes or goes is lost with this probability.

    netem would do it too, and is not in every kernel. Raises CalledProcessError where the kernel has no such filter.
    """
    below = int(share * 2**32)
    program = ((0x20, 0, 0, _RANDOM), (0x25, 1, 0, below), (0x06, 0, 0, _LOSE), (0x06, 0, 0, _PASS))
    code = f"{len(program)}," + ",".join(" ".join(map(str, step)) for step in program)
    _tc("qdisc", "add", "dev", device, "clsact")
    for way in ("ingress", "egress"):
        _tc("filter", "add", "dev", device, way, "bpf", "direct-action", "bytecode", code)


def packets_lost(device: str) -> int:
    """How many packets the filters have dropped so far."""
    found = re.findall(r"clsact .*?dropped (\d+)", _tc("-s", "qdisc", "show", "dev", device), re.DOTALL)
    return sum(map(int, found))


def _tc(*command: str) -> str:
    return subprocess.run(["tc", *command], check=True, timeout=20, capture_output=True, text=True).stdout
