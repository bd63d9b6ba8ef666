"""Which gateways there are: those that asked for the list of instances lately. For operators, and for their number."""

from __future__ import annotations

from dataclasses import dataclass

COUNT_MAX = 1024
LEASE_S = 30.0  # a gateway asks again every ten seconds


@dataclass(frozen=True, slots=True)
class GatewayInfo:
    """What a gateway says of itself."""

    gateway_id: str
    url: str  # base URL by which clients reach it
    software_version: str = ""
    draining: bool = False


class Gateways:
    """Gateways that recently asked for the instances, by name and URL. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], tuple[GatewayInfo, float]] = {}

    def heard(self, info: GatewayInfo, now_s: float) -> None:
        """It has asked. When there are too many, the one that was silent longest is forgotten."""
        key = info.gateway_id, info.url
        self._known.pop(key, None)
        self._known[key] = info, now_s  # the order is that of the last word
        while len(self._known) > COUNT_MAX:
            del self._known[next(iter(self._known))]

    def count(self, now_s: float) -> int:
        """How many are present."""
        return sum(now_s - heard_s <= LEASE_S for _, heard_s in self._known.values())

    def names(self, now_s: float) -> set[str]:
        """Their ids."""
        return {info.gateway_id for info, heard_s in self._known.values() if now_s - heard_s <= LEASE_S}

    def listed(self, now_s: float) -> list[tuple[GatewayInfo, float]]:
        """The present gateways by URL, with the seconds since their last call; the others are forgotten."""
        self._known = {
            key: (info, heard_s) for key, (info, heard_s) in self._known.items() if now_s - heard_s <= LEASE_S
        }
        found = sorted(self._known.values(), key=lambda entry: (entry[0].url, entry[0].gateway_id))
        return [(info, now_s - heard_s) for info, heard_s in found]
