"""Reads price books from TOML; whatever is wrong is named with its place and its unit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError

from mooncache.config.small_files import nearest, read_toml
from mooncache.errors import PlanInvalid
from mooncache.prices import example
from mooncache.prices.core.hardware import (
    HARDWARE_PLAUSIBLE,
    CostSpec,
    Dram,
    GpuNode,
    Nic,
    Plausible,
    Ssd,
    implausible,
)
from mooncache.prices.core.price_book import PriceBook

TABLES: Final[dict[str, type[BaseModel]]] = {
    "gpu_node": GpuNode, "dram": Dram, "ssd": Ssd, "nic": Nic, "cost": CostSpec,
}  # fmt: skip
LISTS: Final = ("gpu_node", "dram", "ssd", "nic")
PLAN_NAMES: Final = ("slo", "model", "search", "workload", "speed")
"""What only a plan reads."""
TableOf = TypeVar("TableOf", bound=BaseModel)
_ENUM_MEMBER: Final = re.compile(r"<\w+\.\w+: ('[^']*')>")  # as pydantic writes what it wants


def read_prices(path: Path | str | None) -> PriceBook:
    """The price book of a file (None: the example): hardware tables and `cost`. A plan's file will do, too.

    Nothing is filled in: what a file leaves out has no price. Raises PlanInvalid: every wrong value with its place.
    """
    if path is None:
        return example.price_book()
    tables = read_toml(Path(path).expanduser(), "price book", PlanInvalid)
    own = {name: table for name, table in tables.items() if name not in PLAN_NAMES}
    check_names(own, str(path), TABLES, PLAN_NAMES)
    return checked_tables(PriceBook, own, str(path), HARDWARE_PLAUSIBLE)


def checked_tables(
    model: type[TableOf], tables: dict[str, Any], where: str, ranges: Mapping[str, Plausible]
) -> TableOf:
    """The tables as a model. Raises PlanInvalid: every wrong value with its place."""
    problems = [f"{place}: {text}." for place, text in _implausible(tables, ranges)]
    if problems:
        raise PlanInvalid(f"{where}: " + " ".join(problems))
    try:
        return model.model_validate(tables)
    except ValidationError as error:
        raise PlanInvalid(f"{where}: " + " ".join(_sentences(error))) from None


def check_names(
    tables: Mapping[str, object], where: str, known: Mapping[str, type[BaseModel]], others: Sequence[str] = ()
) -> None:
    """Raises PlanInvalid for a table or a field that does not exist. others: names that are no tables."""
    for name, table in tables.items():
        if name in others:
            continue
        if name not in known:
            raise PlanInvalid(f"{where}: there is no table {name}; {nearest(name, [*known, *others])}")
        if name in LISTS and not isinstance(table, list):
            raise PlanInvalid(f"{where}: {name} is a list of options: write [[{name}]].")
        if name not in LISTS and not isinstance(table, dict):
            raise PlanInvalid(f"{where}: {name} is one table: write [{name}].")
        fields = list(known[name].model_fields)
        for number, row in enumerate(table if isinstance(table, list) else [table], start=1):
            if not isinstance(row, dict):
                raise PlanInvalid(f"{where}: {name} number {number} is not a table: write [[{name}]].")
            for field in row:
                if field not in fields:
                    raise PlanInvalid(f"{where}: {name} has no field {field}; {nearest(field, fields)}")


def _implausible(tables: Mapping[str, object], ranges: Mapping[str, Plausible]) -> Iterator[tuple[str, str]]:
    for name, table in tables.items():
        rows = table if isinstance(table, list) else [table] if isinstance(table, dict) else []
        for number, row in enumerate(rows, start=1):
            for field, value in row.items():
                if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                    continue  # no number at all, NaN or negative: the schema has the better words
                text = implausible(ranges, f"{name}.{field}", float(value))
                if text:
                    yield (
                        (f"{name}[{number}].{field}" if isinstance(table, list) else f"{name}.{field}"),
                        text,
                    )


def _sentences(error: ValidationError) -> Iterator[str]:
    for problem in error.errors(include_url=False, include_context=False):
        place = ""
        for part in problem["loc"]:
            place += f"[{part + 1}]" if isinstance(part, int) else f"{'.' if place else ''}{part}"
        reason = _ENUM_MEMBER.sub(r"\1", problem["msg"].removeprefix("Value error, "))
        given = "" if problem["type"] in {"value_error", "missing"} else f" (given: {problem['input']!r:.80})"
        yield f"{place}: {reason}{given}." if place else f"{reason}."
