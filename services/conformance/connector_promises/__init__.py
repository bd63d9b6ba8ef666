"""Promises of connectors: those of engines that a connector can break, and its own, one family a file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from mooncache.conformance.connector_bench import ConnectorBench
from mooncache.conformance.connector_promises import damage, identity, lifetimes
from mooncache.conformance.core.verdicts import PromiseText
from mooncache.conformance.engine_promises import ENGINE_PROMISES

ConnectorTry = Callable[[ConnectorBench], str]

_NOT_ITS: Final = ("tenants", "bad-requests")
"""Tenants' keys and questions that are none end before a connector."""
_BREAKS: Final = "broken-cache"

_OF_ENGINES: Final = {text: tries for text, tries in ENGINE_PROMISES.items() if text.name not in _NOT_ITS}

CONNECTOR_PROMISES: Final[dict[PromiseText, ConnectorTry]] = {
    **{text: tries for text, tries in _OF_ENGINES.items() if text.name != _BREAKS},
    **identity.PROMISES,
    **lifetimes.PROMISES,
    **damage.PROMISES,
    **{text: tries for text, tries in _OF_ENGINES.items() if text.name == _BREAKS},
}
