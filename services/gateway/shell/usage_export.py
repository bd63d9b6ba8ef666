"""Sends sums of usage to an OpenTelemetry collector: counters by tenant and model, over OTLP.

The SDK collects and sends in a thread of its own, every minute or as OTEL_METRIC_EXPORT_INTERVAL says. A collector that
is slow or gone costs the gateway nothing: sums only grow, so the next message has what a lost one had.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, Final

from mooncache.accounts.core.usage import UsageCounts, WorkClass
from mooncache.gateway.core.usage_series import UsageSeries, UsageTotal
from mooncache.prices.core.price_book import PriceBook
from mooncache.prices.core.usage_bill import money_of
from mooncache.runtime import otlp
from mooncache.runtime.logs import Event, get_logger

EXPORT_TIMEOUT_S: Final = 5.0
PREFIX: Final = "mooncache.usage."
_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_OUTCOMES: Final = ("answered", "failed", "cancelled")
_TOKENS: Final = {
    "input_tokens": ("input", "Prompt tokens, with those that came from a cache."),
    "cached_tokens": ("cached", "Prompt tokens that came from a cache; they are among the input tokens."),
    "output_tokens": ("output", "Tokens that were generated."),
    "estimated_tokens": ("estimated", "Tokens among these that no engine counted."),
}
"""Name of a counter -> field of a total, and what it is."""

log = get_logger(__name__)


def endpoint_of(setting: str, env: Mapping[str, str]) -> str:
    """Where sums are to be sent; "": nowhere. The setting is first, then the variables that OpenTelemetry defines."""
    if setting:
        return setting
    off = env.get("OTEL_SDK_DISABLED", "").lower() == "true" or env.get("OTEL_METRICS_EXPORTER") == "none"
    return "" if off else next((env[name] for name in _ENDPOINTS if env.get(name)), "")


class UsageExport:
    """What is sent of one gateway. `close` sends the last sums."""

    def __init__(self, book: PriceBook | None, provider: Any) -> None:
        """book: prices of tokens; None: no money is counted. provider: OpenTelemetry's, which has no counters yet."""
        from opentelemetry.metrics import Observation

        self._book, self._provider, self._observation = book, provider, Observation
        self._series = UsageSeries()
        meter = provider.get_meter("mooncache")
        meter.create_observable_counter(
            PREFIX + "requests", [self._requests], "{request}", "Metered requests by outcome."
        )
        for name, (field, text) in _TOKENS.items():
            meter.create_observable_counter(PREFIX + name, [self._field(field)], "{token}", text)
        if book is not None:
            text = "What tenants pay by the prices of tokens in the price book."
            unit = f"{{{book.cost.currency}}}"
            meter.create_observable_counter(PREFIX + "cost", [self._field("money")], unit, text)

    def count(self, tenant: str, model: str, work_class: WorkClass, counts: UsageCounts) -> None:
        """One request has ended."""
        money = money_of(self._book, model, work_class, counts).total if self._book is not None else 0.0
        self._series.add(tenant, model, counts, money)

    def close(self) -> None:
        """Send the last sums and end. Blocks for a few seconds at most."""
        self._provider.shutdown(timeout_millis=EXPORT_TIMEOUT_S * 1e3)

    def _requests(self, _options: object) -> Iterable[Any]:
        return [
            self._observation(getattr(total, outcome), {**_attributes(key), "outcome": outcome})
            for key, total in self._series.rows().items()
            for outcome in _OUTCOMES
        ]

    def _field(self, name: str) -> Any:
        assert name in UsageTotal._fields

        def observe(_options: object) -> Iterable[Any]:
            rows = self._series.rows().items()
            return [self._observation(getattr(total, name), _attributes(key)) for key, total in rows]

        return observe


def _attributes(key: tuple[str, str]) -> dict[str, str]:
    tenant, model = key
    return {"tenant": tenant, "model": model}


def open_usage_export(setting: str, instance: str, book: PriceBook | None) -> UsageExport | None:
    """The export that setting and environment ask for; None when none does, or when it is not possible here.

    setting: `gateway.usage_otlp_endpoint`. instance: names this process apart from all others.
    """
    endpoint = endpoint_of(setting, os.environ)
    if not endpoint:
        return None
    try:
        protocol = (
            otlp.protocol_of(setting) if setting else otlp.variables_protocol("metrics", endpoint, os.environ)
        )
        exporter = otlp.exporter("metrics", protocol, setting, EXPORT_TIMEOUT_S)
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource
    except (ImportError, otlp.UnspokenProtocolError) as error:
        log.warning(Event.USAGE_EXPORT_UNAVAILABLE, endpoint=endpoint, reason=str(error))
        return None
    reader = PeriodicExportingMetricReader(exporter, export_timeout_millis=EXPORT_TIMEOUT_S * 1e3)
    named = {
        "service.name": "mooncache-gateway",
        "service.namespace": "mooncache",
        "service.instance.id": instance,
    }
    export = UsageExport(book, MeterProvider([reader], Resource.create(named), shutdown_on_exit=False))
    log.info(Event.USAGE_EXPORT_ENABLED, endpoint=endpoint)
    return export
