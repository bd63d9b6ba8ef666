"""The command `mooncache why`: why a request went where it went, and what came of it."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from mooncache.cli.common import HERE, AsJson, Where
from mooncache.cli.core.time_bars import bars
from mooncache.conductor.core.progress import Phase
from mooncache.errors import InvalidArgument
from mooncache.reporting.output import EXIT_OK, console, print_json, print_table

if TYPE_CHECKING:
    from mooncache.prices.core.price_book import PriceBook

_REASONS = {
    "never_seen": "never seen: these tokens were not computed before, as far as the conductor remembers",
    "evicted": "evicted: computed before, no longer in the pool",
    "other_passport": "other passport: computed before by an engine with incompatible blocks",
    "other_tenant": "other tenant: computed before under another tenant or cache_salt",
    "load_failed": "load failed: in the pool, but the engine could not load it",
    "timed_out": "timed out: expected in the pool, but not there in time",
    "computed_faster": "computed faster: in the pool, but the engine measured that computing is faster than loading",
    "load_cut": "load cut: loading turned out slower than computing; what had come was used, the rest was computed",
    "not_worth_fetching": "not worth fetching: in the pool, but computing was expected to be faster",
    "pool_unreachable": "pool unreachable: computed before, but the pool did not answer",
    "no_complete_block": "no complete block: the end of a prompt is always computed",
    "cache_off": "not used: the engine must not or cannot use the pool for this request",
}
_DIFFERENCES = {
    "computed": "less came from caches",
    "loaded": "more was loaded",
    "waited": "waited longer",
}
_WHY_DIFFERENT = {
    **{reason: text.split(":")[0] for reason, text in _REASONS.items()},
    "in_pool": "computing was priced lower, but engines load what the pool has",
    "came_later": "the pool got the blocks after the plan was made",
    "late": "the pool answered late",
}
_GIVEN_UP = {
    "failed": "the prefill leg failed",
    "not_stored": "the pool did not get them",
    "ended": "the request or its engine was gone",
}
_INLINING = {
    "cheaper": "computed where it is decoded: that costs less than a hand-over",
    "dearer": "computed apart and handed over: to compute it where it is decoded costs more",
    "too_long": "computed apart: it is more than a decode instance may compute (conductor.inline_tokens_max)",
    "steps": "computed apart: those that are decoded there would wait longer for a token than promised",
}
_OUTCOMES = {
    "computed_faster": "computing was faster than loading",
    "load_cut": "the load was slow and was cut",
}
_PHASES = {
    Phase.PREFILLED: "prompt computed",
    Phase.PREFILL_FAILED: "prefill failed",
    Phase.FIRST_TOKEN: "first token",
    Phase.FINISHED: "finished",
    Phase.FAILED: "failed",
    Phase.ABORTED: "client disconnected",
}


def why(
    name: Annotated[
        str, Parameter(help="Request id (header X-Request-Id) or decision id; default: the last request.")
    ] = "",
    /,
    *,
    policy: Annotated[
        str, Parameter(help="Also show what this policy would have decided: algorithm1, least_load, ...")
    ] = "",
    svg: Annotated[
        Path | None, Parameter(help="Also write the line of time as a picture to this file.")
    ] = None,
    prices: Annotated[
        Path | None,
        Parameter(help="Price book of the line about money; `mooncache cost prices` prints one."),
    ] = None,
    where: Where = HERE,
    json: AsJson = False,
) -> int:
    """Show why a request was sent where it was: candidates, prices, hits, misses with reasons, times of its legs.

    This needs the cluster token, because a decision shows instances and what other tenants have cached.

    For example:

        mooncache why

        mooncache why 4f1c2a9be0a14a63

        mooncache why d-09af33c2d4e51b77 --json | jq .misses

        mooncache why 4f1c2a9be0a14a63 --policy algorithm1

        mooncache why 4f1c2a9be0a14a63 --svg time.svg
    """
    from mooncache.prices.loading import read_prices
    from mooncache.proto.v1 import conductor_pb2

    response = where.ask_conductor(
        "GetDecision",
        conductor_pb2.GetDecisionRequest(id=name, policy=policy),
        conductor_pb2.GetDecisionResponse,
    )
    record = json_module.loads(response.record_json)
    if svg is not None:
        _save_picture(record, svg)
    if json:
        print_json(record)
        return EXIT_OK
    book = read_prices(prices)
    show(record)
    _cost(record, book, where, made_up=prices is None)
    return EXIT_OK


def _cost(record: dict[str, Any], book: PriceBook, where: Where, *, made_up: bool) -> None:
    """What the request cost, when it has ended."""
    from mooncache.cli.core.cost_text import request_line
    from mooncache.prices.core.request_cost import ENDED, price_of_request
    from mooncache.prices.engines import engine_hours
    from mooncache.proto.v1 import conductor_pb2

    if record["state"] not in ENDED:
        return
    listed = where.ask_conductor(
        "ListInstances", conductor_pb2.ListInstancesRequest(), conductor_pb2.ListInstancesResponse
    )
    engines = engine_hours((view.instance for view in listed.instances), book)
    cost = price_of_request(record, book, engines)
    line = request_line(cost, book, made_up=made_up)
    console.print("\n" + line, markup=False, highlight=False, soft_wrap=True)


def _save_picture(record: dict[str, Any], path: Path) -> None:
    from mooncache.cli.time_picture import save_time_picture

    if not record.get("spans"):
        raise InvalidArgument("No leg of this request was reported yet, so there is no picture to write.")
    save_time_picture(record["spans"], f"Request {record['request_id']}", path)


def show(record: dict[str, Any]) -> None:
    """Print a record for people."""
    attempt = f", attempt {record['attempt']}" if record["attempt"] > 1 else ""
    console.print(
        f"request [bold]{record['request_id']}[/], decision {record['decision_id']}{attempt}: "
        f"[bold]{record['state']}[/]"
    )
    console.print(record["message"], markup=False)
    expected, observed = record["expected"], record["observed"]
    console.print(
        f"model {record['model']}, {record['prompt_tokens']} prompt tokens "
        f"({record['cacheable_tokens']} in complete blocks of {record['block_tokens']}), "
        f"pool: {record['pool']['state']}, {record['pool']['tokens']} tokens found "
        f"in {record['pool']['lookup_ms']:.1f} ms",
        markup=False,
    )
    if record["earlier"]:
        console.print(f"earlier decisions of this request: {', '.join(record['earlier'])}", markup=False)
    _inlining(record)
    _handover(record)
    if expected is not None:
        _times(record)
        if observed.get("streamed") is False:
            console.print("The answer was not streamed, so its first token arrived with the last one.")
    _candidates(record)
    _what_if(record)
    _misses(record)
    _differences(record)
    _bars(record)
    _timeline(record)


def _inlining(record: dict[str, Any]) -> None:
    """Why the prompt has a prefill leg, or none."""
    found = (record["chosen"] or {}).get("inlining")
    if not found or found["verdict"] not in _INLINING:
        return
    scores = f"{_ms(found['here_ms'])} ms here, {_ms(found['apart_ms'])} ms with a hand-over"
    priced = f" (until the end of the answer, with what others lose: {scores})" if found["here_ms"] else ""
    console.print(_INLINING[found["verdict"]] + priced, markup=False)


def _handover(record: dict[str, Any]) -> None:
    """Where blocks were handed over, and those that were given up."""
    chosen = record["chosen"] or {}
    if chosen.get("store_node"):
        console.print(f"blocks are handed over through {chosen['store_node']}", markup=False)
    for each in record["observed"].get("given_up", ()):
        blocks = each["to_block"] - each["from_block"]
        why = _GIVEN_UP.get(each["reason"], each["reason"])
        console.print(f"{blocks} blocks were given up, and the waits for them ended: {why}", markup=False)


def _what_if(record: dict[str, Any]) -> None:
    other = record.get("what_if")
    if other is None:
        return
    console.print(f"\npolicy {other['policy']}", style="bold", markup=False)
    if not other["known"]:
        console.print(other["message"], markup=False)
        return
    console.print(
        ("The same decision: " if other["same"] else "Another decision: ") + other["message"], markup=False
    )
    expected, ours = other["expected"], record["expected"]
    if expected is not None and ours is not None:
        console.print(
            f"first token expected after {_ms(expected['ttft_ms'])} ms instead of {_ms(ours['ttft_ms'])} ms, "
            f"between tokens {_ms(expected['tbt_ms'])} ms instead of {_ms(ours['tbt_ms'])} ms",
            markup=False,
        )


def _generating_ms(record: dict[str, Any]) -> float:
    """Expected time of the answer after its first token."""
    return float(record["expected"]["tbt_ms"] * max(0.0, record["expected_output_tokens"] - 1))


def _times(record: dict[str, Any]) -> None:
    promised, expected, observed = record["promised"], record["expected"], record["observed"]
    rows = [
        ("first token", promised["ttft_ms"], expected["ttft_ms"], observed.get("ttft_ms")),
        ("between tokens", promised["tbt_ms"], expected["tbt_ms"], observed.get("tbt_ms")),
        ("waiting before the prefill", None, expected["queue_ms"], observed.get("queue_ms")),
        ("waiting and loading", None, expected["ready_ms"], observed.get("ready_ms")),
        ("prefill", None, expected["prefill_ms"], observed.get("prefill_ms")),
        ("hand-over to decode", None, expected["handover_ms"], observed.get("handover_ms")),
        ("generating", None, _generating_ms(record), observed.get("decode_ms")),
        ("whole request", None, None, observed.get("total_ms")),
    ]
    print_table(
        "\ntimes",
        ("", "promised ms*", "expected ms*", "observed ms*"),
        [(what, *(_ms(value) for value in values)) for what, *values in rows],
    )


def _candidates(record: dict[str, Any]) -> None:
    chosen = record["chosen"] or {"prefill": "", "decode": ""}
    prefiller = chosen["prefill"] or chosen["decode"]
    rows: list[tuple[Any, ...]] = []
    for item in record["prefill_candidates"] + record["inline_candidates"]:
        prices = {branch["kind"]: branch["total_ms"] for branch in reversed(item["branches"])}
        pool = max((b["fetch_tokens"] for b in item["branches"] if b["kind"] == "fetch"), default=0)
        awaited = max((b["prefix_tokens"] for b in item["branches"] if b["kind"] == "wait"), default=0)
        rows.append(
            (
                ("-> " if item["instance_id"] == prefiller else "   ") + item["instance_id"],
                item["role"],
                item["local_tokens"],
                pool,
                awaited,
                _ms(item["queue_ms"]),
                *(_ms(prices.get(kind)) for kind in ("local", "fetch", "wait")),
                item["best"],
            )
        )
    if rows:
        more = record["candidate_count"] - len(rows)
        title = "\nprefill candidates" + (
            f" ({more} more expensive ones were not recorded)" if more > 0 else ""
        )
        columns = (
            "instance",
            "role",
            "own hits",
            "pool hits",
            "awaited hits",
            "queue ms*",
            "local ms*",
            "fetch ms*",
            "wait ms*",
            "best",
        )
        print_table(title, columns, rows)
    generators = [
        (
            ("-> " if item["instance_id"] == chosen["decode"] else "   ") + item["instance_id"],
            item["role"],
            item["local_tokens"],
            f"{item['sequences']:g}",
            _ms(item["tbt_ms"]),
            _ms(item["wait_ms"]),
            _ms(item["handover_ms"]),
            _ms(item["score_ms"]),
        )
        for item in record["decode_candidates"]
    ]
    if generators:
        headings = (
            "instance",
            "role",
            "own hits",
            "sequences*",
            "token ms*",
            "wait ms*",
            "hand-over ms*",
            "to the end ms*",
        )
        print_table("\ndecode candidates", headings, generators)


def _misses(record: dict[str, Any]) -> None:
    if record["misses"]:
        rows = [
            (f"{miss['from_token']}..{miss['to_token']}", _REASONS.get(miss["reason"], miss["reason"]))
            for miss in record["misses"]
        ]
        print_table("\nprompt tokens that had to be computed", ("tokens", "why"), rows)
    elif record["chosen"]:
        console.print("\nno prompt token was computed because its blocks were missing")


def _differences(record: dict[str, Any]) -> None:
    rows = []
    for each in record["observed"].get("differences", ()):
        unit = "ms" if "planned_ms" in each else "tokens"
        numbers = (f"{each[f'{which}_{unit}']:,.0f} {unit}" for which in ("planned", "actual"))
        what, why = _DIFFERENCES.get(each["kind"], each["kind"]), each["reason"]
        rows.append((what, each["leg"], *numbers, _WHY_DIFFERENT.get(why, why)))
    if rows:
        print_table("\ndifferent from the plan", ("what", "leg", "planned*", "observed*", "why"), rows)


def _bars(record: dict[str, Any]) -> None:
    plain = not (console.encoding or "").lower().startswith("utf")
    rows = bars(record.get("spans", ()), console.width, plain=plain)
    if rows:
        console.print("\none line of time", style="bold")
        for row in rows:
            console.print(row, markup=False, soft_wrap=True)


def timeline(record: dict[str, Any]) -> list[tuple[float, str]]:
    """Moments of the request in milliseconds since the gateway took it, in order."""
    moments: dict[tuple[float, str], None] = {}
    for event in record["events"]:
        at_ms = float(event["elapsed_ms"])
        moments[at_ms, _PHASES.get(event["phase"], event["phase"])] = None
        for leg in event["legs"]:
            label = f"{leg['leg']} leg to {leg['instance']}"
            for field, what in (("sent_ms", f"{label} sent"), ("ended_ms", f"{label} ended {leg['code']}")):
                if leg[field] > 0:
                    moments[leg[field], what.strip() + _cache(leg, field)] = None
    if record["events"]:
        first = record["events"][0]
        moments[max(0.0, float(first["elapsed_ms"]) - float(first["since_decision_ms"])), "scheduled"] = None
        moments[0.0, "gateway received the request"] = None
    return sorted(moments)


def _cache(leg: dict[str, Any], field: str) -> str:
    cache = leg.get("cache")
    if field != "ended_ms" or cache is None:
        return ""
    outcome = _OUTCOMES.get(cache["outcome"], cache["outcome"])
    reason = f"; {cache['reason']}" if cache.get("reason") else ""
    return (
        f" ({outcome}: {cache['local_tokens']} own, {cache['loaded_tokens']} loaded "
        f"{_places(cache)}in {cache['load_ms']:.1f} ms{_path(cache)}, waited {cache['waited_ms']:.1f} ms{reason})"
    )


def _places(cache: dict[str, Any]) -> str:
    """Where what was loaded lay in the pool."""
    places = [f"{blocks} blocks of {node} ({tier})" for node, tier, blocks in cache.get("loaded_from") or ()]
    return f"from {', '.join(places)} " if places else ""


def _path(cache: dict[str, Any]) -> str:
    """How the bytes came into the engine's memory."""
    loaded, staged = cache.get("loaded_bytes", 0), cache.get("staged_bytes", 0)
    if not loaded:
        return ""
    if not staged:
        return " in place"
    return " staged" if staged >= loaded else f" ({staged / loaded:.0%} staged, the rest in place)"


def _timeline(record: dict[str, object]) -> None:
    rows = [(_ms(at_ms), what) for at_ms, what in timeline(record)]
    if rows:
        print_table("\ntime line", ("ms*", "what"), rows)


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}"
