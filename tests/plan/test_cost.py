"""Money: what a request costs, what caches saved, how sums add up, and what a price book refuses or leaves out."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncache.accounts.core.usage import WorkClass
from mooncache.cli import app
from mooncache.cli.core import cost_text
from mooncache.errors import PlanInvalid
from mooncache.kvcache.keys import passport_to_json
from mooncache.kvcache.passport import Passport
from mooncache.plan import loading
from mooncache.prices import example
from mooncache.prices.core import cost_sums
from mooncache.prices.core.cost_sums import Played, StoredBytes
from mooncache.prices.core.hardware import CostSpec, EngineRule
from mooncache.prices.core.price_book import EngineHour, PriceBook, PricedEngine
from mooncache.prices.core.request_cost import RequestCost, price_of_request
from mooncache.prices.engines import engine_hours
from mooncache.prices.loading import read_prices
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.simulate import paper_cluster
from mooncache.simulate.description import to_toml
from mooncache.simulate.profile import LLAMA3_70B_8XA800

BOOK = example.price_book()
HOURS = {"p": EngineHour(3.6, "test"), "d": EngineHour(7.2, "test")}  # 0.001 and 0.002 a second


def span(leg: str, instance: str, part: str, from_ms: float, to_ms: float) -> dict[str, Any]:
    return {"leg": leg, "instance": instance, "part": part, "from_ms": from_ms, "to_ms": to_ms}


def leg(role: str, instance: str, **cache: Any) -> dict[str, Any]:
    return {"leg": role, "instance": instance, "sent_ms": 1.0, "ended_ms": 9.0, "code": "OK", "cache": cache}


def record(**changes: Any) -> dict[str, Any]:
    """A prompt of 1,000 tokens, 600 of them cached: 2 s at p, then 10 s of generating in a batch of 4 at d."""
    prefill = leg("prefill", "p", local_tokens=200, loaded_tokens=400, loaded_bytes=10**9)
    prefill["cache"]["loaded_from"] = [["n1", "dram", 3], ["n1", "ssd", 1]]
    return {
        "request_id": "r",
        "tenant": "t",
        "state": "finished",
        "prompt_tokens": 1000,
        "sequences": 1,
        "chosen": {"prefill": "p", "decode": "d"},
        "expected": {"without_cache_ms": 5000.0, "decode_sequences": 4.0, "prefill_ms": 2000.0},
        "observed": {"output_tokens": 50, "streamed": True, "prefill_ms": 2000.0},
        "spans": [
            span("gateway", "", "plan", 0, 100),
            span("prefill", "p", "wait", 100, 500),
            span("prefill", "p", "load", 500, 1000),
            span("prefill", "p", "compute", 1000, 3000),
            span("decode", "d", "wait", 100, 3000),
            span("decode", "d", "generate", 3000, 13_000),
        ],
        "events": [{"phase": "finished", "cached_tokens": 600, "legs": [prefill]}],
        **changes,
    }


def priced(book: PriceBook = BOOK, **changes: Any) -> RequestCost:
    return price_of_request(record(**changes), book, HOURS)


def test_a_request_pays_for_computing_its_share_of_the_batch_and_its_bytes() -> None:
    cost = priced()
    assert (cost.input_tokens, cost.cached_tokens, cost.output_tokens) == (400, 600, 50)
    assert cost.prefill == pytest.approx(2 * 0.001)
    assert cost.decode == pytest.approx(10 / 4 * 0.002)
    network_gb = BOOK.network_gb
    assert network_gb is not None
    assert cost.network == pytest.approx(network_gb)
    assert not cost.gaps
    assert not cost.estimates


def test_saved_is_the_whole_prompt_less_what_was_spent_by_where_the_tokens_lay() -> None:
    cost = priced()
    assert cost.saved_s == pytest.approx(5 - 2)
    assert cost.saved is not None
    money = 5 * 0.001 - cost.prefill - cost.network
    assert cost.saved.total == pytest.approx(money)
    assert cost.saved.engine == pytest.approx(money * 200 / 600)
    assert cost.saved.dram == pytest.approx(money * 300 / 600)
    assert cost.saved.ssd == pytest.approx(money * 100 / 600)


def test_without_a_cached_token_nothing_is_saved_whatever_the_model_said() -> None:
    cost = priced(events=[{"phase": "finished", "cached_tokens": 0, "legs": []}])
    assert cost.saved is not None
    assert cost.saved.total == 0
    assert cost.saved_s == 0


def test_a_cache_that_cost_more_than_it_gave_says_so() -> None:
    expected = {"without_cache_ms": 1000.0, "decode_sequences": 4.0}
    cost = priced(expected=expected)
    assert cost.saved is not None
    assert cost.saved.total < 0
    assert any("longer than" in text for text in cost.estimates)


def test_a_record_without_a_counterfactual_has_a_cost_and_no_saving() -> None:
    cost = priced(expected={"decode_sequences": 4.0})
    assert cost.total > 0
    assert cost.saved is None
    assert any("without a cache is not known" in text for text in cost.gaps)
    assert cost_sums.sum_of([cost]).saved_unknown == 1


def test_a_record_of_which_nothing_was_reported() -> None:
    cost = priced(expected=None, observed={}, spans=[], events=[])
    assert cost.total == 0
    assert cost.saved is None
    assert any("no leg" in text for text in cost.gaps)


def test_an_answer_in_one_piece_is_told_apart_by_the_plan() -> None:
    cost = priced(
        chosen={"prefill": "", "decode": "d"},
        observed={"streamed": False},
        spans=[span("decode", "d", "compute", 0, 12_000)],
    )
    assert (cost.prefill_s, cost.decode_s) == (pytest.approx(2), pytest.approx(10 / 4))
    assert any("not streamed" in text for text in cost.estimates)


def test_an_instance_that_is_gone_has_no_price_and_is_named() -> None:
    cost = price_of_request(record(), BOOK, {"d": HOURS["d"]})
    assert cost.prefill == 0
    assert any(text.startswith("p is no longer registered") for text in cost.gaps)
    assert cost.saved is None


@pytest.mark.parametrize("table", ["gpu_node", "dram", "ssd", "nic"])
def test_what_the_book_leaves_out_is_named_and_not_counted(table: str) -> None:
    book = BOOK.model_copy(update={table: ()})
    assert [line for line in book.holes() if f"no price for {table}:" in line]
    assert len(book.holes()) == 1
    assert BOOK.holes() == []
    if table == "nic":
        assert priced(book).network == 0
    if table in ("dram", "ssd"):
        lost = StoredBytes(1e9, 1e9).per_hour(BOOK) - StoredBytes(1e9, 1e9).per_hour(book)
        assert lost > 0


def test_engines_are_priced_by_rules_then_by_their_ranks_then_by_processors() -> None:
    rule = EngineRule(instances="big-*", machine="A800", gpus=8)
    book = BOOK.model_copy(update={"cost": CostSpec(processor_price_per_hour=0.4, engine=(rule,))})
    assert book.engine_hour(PricedEngine("big-1", "vllm", 2)).price == pytest.approx(14)
    assert book.engine_hour(PricedEngine("v", "vllm", 2)) == EngineHour(3.5, "2 of 8 GPUs of a A800")
    assert book.engine_hour(PricedEngine("v", "vllm")).assumed
    assert book.engine_hour(PricedEngine("h", "hf")) == EngineHour(0.4, "processors", assumed=True)
    assert PriceBook().engine_hour(PricedEngine("v", "vllm", 1)).price is None
    assert PriceBook().engine_hour(PricedEngine("h", "hf")).price is None


def test_an_engine_is_priced_by_its_processes_and_not_by_the_parts_of_its_blocks() -> None:
    """Blocks in eight parts, for engines of up to eight ranks; the processes are those that the worker registered."""
    passport = Passport(
        weights_digest="w",
        config_digest="c",
        tokenizer_digest="t",
        engine="e",
        kv_dtype="d",
        kv_layout="l",
        block_tokens=32,
        tp_size=8,
        pp_size=2,
    )
    parts: dict[str, Any] = {"engine": "vllm", "passport_json": passport_to_json(passport)}
    hours = engine_hours(
        [
            pb.Instance(instance_id="two", stages=1, ranks=2, replicas=1, **parts),
            pb.Instance(instance_id="copies", stages=2, ranks=1, replicas=3, **parts),
            pb.Instance(instance_id="former", **parts),
            pb.Instance(instance_id="no pool", engine="sglang", ranks=4),
            pb.Instance(instance_id="unknown", engine="sglang"),
        ],
        BOOK,
    )
    gpu = BOOK.gpu_node[0].price_per_hour / BOOK.gpu_node[0].gpus
    assert {name: round((hour.price or 0) / gpu) for name, hour in hours.items()} == {
        "two": 2,
        "copies": 6,
        "former": 16,
        "no pool": 4,
        "unknown": 1,
    }
    assert [name for name, hour in hours.items() if hour.assumed] == ["unknown"]
    assert hours["copies"].replica_price == pytest.approx(2 * gpu)


def test_a_prompt_is_computed_by_one_replica_and_the_batch_is_that_of_all() -> None:
    two = {name: hour._replace(replicas=2) for name, hour in HOURS.items()}
    alone, cost = priced(), price_of_request(record(), BOOK, two)
    assert (cost.prefill, cost.decode) == (pytest.approx(alone.prefill / 2), alone.decode)
    assert cost.saved is not None
    assert cost.saved.total == pytest.approx((5 - 2) * 0.001 / 2 - cost.network)


def test_the_printed_book_is_read_by_cost_and_by_plan(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(example.prices_toml(), encoding="utf-8")
    assert read_prices(path) == BOOK
    assert loading.read(path).spec.dram == BOOK.dram


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1", '"2"', "true", "1e300"])
@pytest.mark.parametrize("field", ["[cost]\nprocessor_price_per_hour", "[[dram]]\ngb = 500\nprice_per_hour"])
def test_a_price_that_is_none_is_refused(tmp_path: Path, field: str, value: str) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(f"{field} = {value}\n", encoding="utf-8")
    with pytest.raises(PlanInvalid, match="price_per_hour"):
        read_prices(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[cost]\ncurency = 'EUR'", "no field curency"),
        ("[prices]\ngpu = 1", "no table prices"),
        ("[[cost.engine]]\ninstances = '*'\ngpus = 1\nmachine = 'H900'", "H900"),
        ("[[cost.engine]]\ninstances = '*'\ngpus = -1", "gpus"),
        ("[cost]\nengine = 3", "cost.engine"),
    ],
)
def test_a_wrong_book_is_refused_with_its_place(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(PlanInvalid, match=says):
        read_prices(path)


seconds = st.floats(0, 1e6)
numbers = st.one_of(st.floats(), st.none(), st.integers(-10, 10**9))


@st.composite
def records(draw: st.DrawFn) -> dict[str, Any]:
    """Records as strange as reports can make them."""
    made = []
    for role, name in (("prefill", "p"), ("decode", "d"), ("decode", "gone")):
        for part in draw(
            st.lists(st.sampled_from(["wait", "load", "queue", "compute", "generate", "unknown"]))
        ):
            begin = draw(seconds)
            made.append(span(role, name, part, begin, begin + draw(seconds)))
    cache = {
        "local_tokens": draw(st.integers(0, 10**6)),
        "loaded_tokens": draw(st.integers(0, 10**6)),
        "loaded_bytes": draw(st.integers(0, 10**12)),
        "loaded_from": [
            ["n", draw(st.sampled_from(["dram", "ssd", "hbm", "tier-9"])), draw(st.integers(0, 99))]
        ],
    }
    return record(
        tenant=draw(st.sampled_from(["", "a", "b"])),
        chosen=draw(st.sampled_from([None, {"prefill": "p", "decode": "d"}, {"prefill": "", "decode": "d"}])),
        expected={
            "without_cache_ms": draw(numbers),
            "decode_sequences": draw(numbers),
            "prefill_ms": draw(numbers),
        },
        observed={"output_tokens": draw(numbers), "streamed": draw(st.booleans())},
        spans=made,
        events=[
            {
                "phase": "finished",
                "cached_tokens": draw(st.integers(0, 2000)),
                "legs": [leg("prefill", "p", **cache)],
            }
        ],
    )


@given(records())
def test_nothing_costs_less_than_nothing_and_a_loss_has_its_reason(given_record: dict[str, Any]) -> None:
    cost = price_of_request(given_record, BOOK, HOURS)
    for value in (cost.prefill, cost.decode, cost.network, cost.prefill_s, cost.decode_s):
        assert math.isfinite(value)
        assert value >= 0
    assert cost.input_tokens + cost.cached_tokens == 1000
    if cost.saved is not None:
        assert math.isfinite(cost.saved.total)
        if cost.saved.total < 0:
            assert cost.estimates


@given(st.lists(records(), max_size=4), st.floats(0, 1e12), st.floats(0, 1e12))
def test_sums_add_up(some: list[dict[str, Any]], memory: float, disk: float) -> None:
    costs = [price_of_request(each, BOOK, HOURS) for each in some]
    stored = {"a": StoredBytes(memory, disk), "nobody": StoredBytes(disk, memory)}
    tenants = cost_sums.by_tenant(costs, stored, 2.0, BOOK)
    total = cost_sums.sum_of(costs, sum(part.storage for part in tenants.values()))
    own = math.fsum(cost.total for cost in costs) + 2 * sum(size.per_hour(BOOK) for size in stored.values())
    assert total.total == pytest.approx(own)
    assert sum(part.total for part in tenants.values()) == pytest.approx(total.total)
    assert sum(part.saved for part in tenants.values()) == pytest.approx(total.saved, rel=1e-9, abs=1e-9)
    assert sum(part.requests for part in tenants.values()) == len(costs)
    assert all(part.requests or name in stored for name, part in tenants.items())
    assert ("nobody" in tenants) == bool(memory or disk)
    prices = (
        (total.per_million_input, total.input_tokens),
        (total.per_million_cached, total.cached_tokens),
        (total.per_million_output, total.output_tokens),
    )
    if all(price is not None for price, _ in prices):
        again = sum((price or 0.0) * tokens / 1e6 for price, tokens in prices)
        assert again == pytest.approx(total.total)


@given(st.lists(st.tuples(records(), st.sampled_from([True, False, None])), max_size=6), st.floats(0, 1e9))
def test_the_sums_of_both_classes_are_that_of_all(
    some: list[tuple[dict[str, Any], bool | None]], storage: float
) -> None:
    costs = []
    for given_record, is_offline in some:
        asked = {} if is_offline is None else {"offline": is_offline}  # None: a record of a former version
        costs.append(price_of_request({**given_record, **asked}, BOOK, HOURS))
    classes, total = cost_sums.by_class(costs, storage), cost_sums.sum_of(costs, storage)
    assert [each for each in WorkClass if each in classes] == list(classes)
    offline = classes.get(WorkClass.OFFLINE)
    assert (offline.requests if offline is not None else 0) == sum(
        is_offline is True for _, is_offline in some
    )
    assert sum(part.requests for part in classes.values()) == total.requests
    if classes:
        assert sum(part.total for part in classes.values()) == pytest.approx(total.total)
    kinds = [part for part in classes.values() if part.cached_tokens]
    held = [part.storage / part.cached_tokens for part in kinds]
    assert all(each == pytest.approx(held[0]) for each in held)


def test_online_and_offline_stand_side_by_side() -> None:
    spans = [span("prefill", "p", "compute", 0, 500), span("decode", "d", "generate", 500, 3000)]
    costs = [priced(), priced(offline=True, spans=spans), priced(offline=True, spans=spans)]
    classes = cost_sums.by_class(costs)
    online, offline = classes[WorkClass.ONLINE], classes[WorkClass.OFFLINE]
    assert (online.per_million_output, offline.per_million_output) == (
        pytest.approx(10 / 4 * 0.002 / 50 * 1e6),
        pytest.approx(2.5 / 4 * 0.002 / 50 * 1e6),
    )
    assert offline.per_million_tokens == pytest.approx(offline.total / (2 * 1050) * 1e6)
    rows = cost_text.class_rows(classes)
    assert [row[:2] for row in rows] == [("online", "1"), ("offline", "2")]
    assert all(len(row) == len(cost_text.CLASS_COLUMNS) for row in rows)
    assert rows[1][-1] == cost_text.money(offline.per_million_tokens)
    assert cost_text.class_rows(cost_sums.by_class(costs[:1])) == []
    assert ", offline: computing" in cost_text.request_line(costs[1], BOOK, made_up=False)
    assert "offline" not in cost_text.request_line(costs[0], BOOK, made_up=False)


def test_memory_pays_back_what_it_saves_in_a_month_like_the_window() -> None:
    total = cost_sums.sum_of([priced()] * 100)
    rows = cost_sums.paybacks(StoredBytes(500e9, 0), total, 0.5, BOOK)
    assert [row.kind for row in rows] == ["dram"]
    assert rows[0].cost_per_month == pytest.approx(500 * 0.001 * 730)
    assert rows[0].saved_per_month == pytest.approx(total.saved_dram * 2 * 730)
    assert rows[0].ratio == pytest.approx(rows[0].saved_per_month / rows[0].cost_per_month)
    assert cost_sums.paybacks(StoredBytes(1e9, 1e9), total, 0.5, PriceBook()) == []


def test_more_memory_gains_what_it_saves_less_what_it_costs() -> None:
    now = Played(1.0, 100e9, 1800.0, 0.3, 900.0)
    twice = Played(2.0, 200e9, 1800.0, 0.5, 600.0)
    found = cost_sums.what_if(now, twice, dram_gb_hour=0.001, engine_hour=10.0)
    assert found.cost_per_month == pytest.approx(100 * 0.001 * 730)
    assert found.saved_per_month == pytest.approx(300 / 3600 * 10 / 0.5 * 730)
    assert found.gain_per_month == pytest.approx(found.saved_per_month - found.cost_per_month)
    same = cost_sums.what_if(now, now, dram_gb_hour=0.001, engine_hour=10.0)
    assert (same.cost_per_month, same.saved_per_month) == (0, 0)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0000123, "0.000012"),
        (3.449, "3.4"),
        (1234.0, "1,200"),
        (0.0, "0"),
        (-0.567, "-0.57"),
        (None, "-"),
        (9.96, "10.0"),
        (1e-15, "0"),
        (math.nan, "-"),
    ],
)
def test_money_has_two_digits(value: float | None, text: str) -> None:
    assert cost_text.money(value) == text


def test_the_published_target_on_the_page() -> None:
    """Every figure of the table of steps in docs/cost.md."""
    text = (Path(__file__).parents[2] / "docs" / "cost.md").read_text(encoding="utf-8")
    part = text.partition("## Online and offline")[2].partition("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("|")][2:]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    cost, hour = LLAMA3_70B_8XA800.decode, BOOK.engine_hour(PricedEngine("v", "vllm", 8)).price
    assert hour == 14.0
    most = (0.8 * 0.1 - cost.base_s) / (cost.per_sequence_s + 5000 * cost.per_token_s)
    assert cells[2][0].startswith(f"{round(most, -1):.0f},")
    for first, step, rate, price in cells[:3]:
        sequences = int(first.partition(",")[0])
        seconds = cost.tbt_s(sequences, 5000 * sequences)
        per_million = hour / 3600 / (sequences / seconds) * 1e6
        assert (step, price) == (f"{1e3 * seconds:.0f} ms", cost_text.money(per_million))
        assert rate == cost_text.money(sequences / seconds)
    assert cells[3][2:] == [cost_text.money(hour / 3600 / 0.2 * 1e6), "0.2"]


def test_the_example_of_the_page() -> None:
    """Every figure of the table in docs/cost.md."""
    text = (Path(__file__).parents[2] / "docs" / "cost.md").read_text(encoding="utf-8")
    example_text = text.partition("## An example")[2].partition("##")[0]
    cells = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in example_text.splitlines() if "|" in line
    ]
    shown = {what: figure for what, _, figure in cells[2:]}
    hour = BOOK.engine_hour(PricedEngine("v", "vllm", 8))
    prefill = leg("prefill", "p", loaded_tokens=6000, loaded_bytes=6000 * 327_680)
    cost = price_of_request(
        record(
            prompt_tokens=8000,
            expected={"without_cache_ms": 3100.0, "decode_sequences": 10.0},
            observed={"output_tokens": 350},
            spans=[span("prefill", "p", "compute", 0, 900), span("decode", "d", "generate", 900, 12_900)],
            events=[{"phase": "finished", "cached_tokens": 6000, "legs": [prefill]}],
        ),
        BOOK,
        {"p": hour, "d": hour},
    )
    assert cost.saved is not None
    total = cost_sums.sum_of([cost])
    assert shown == {
        "computing": cost_text.money(cost.prefill),
        "generating": cost_text.money(cost.decode),
        "network": cost_text.money(cost.network),
        "sum": cost_text.money(cost.total),
        "saved": cost_text.money(cost.saved.total),
        "a million input tokens": cost_text.money(total.per_million_input),
        "a million output tokens": cost_text.money(total.per_million_output),
    }


def test_what_if_plays_a_trace_with_more_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, cluster = tmp_path / "trace.jsonl", tmp_path / "cluster.toml"
    cluster.write_text(to_toml(paper_cluster(2, 2, 200_000)), encoding="utf-8")
    assert app.run(["trace", "generate", str(trace), "--requests", "400"]) == 0
    capsys.readouterr()
    asked = ["cost", "what-if", str(trace), "--cluster", str(cluster), "--dram", "8x", "1x", "--json"]
    assert app.run(asked) == 0
    found = json.loads(capsys.readouterr().out)
    more, same = found["what_if"]
    assert more["played"]["hit_ratio"] > found["now"]["hit_ratio"]
    assert more["saved_per_month"] > 0
    assert more["cost_per_month"] > 0
    assert same["played"] == found["now"]
    assert (same["cost_per_month"], same["saved_per_month"], same["gain_per_month"]) == (0, 0, 0)
    for wrong in ("0x", "nan", "-2x", "inf", "many"):
        assert app.run([*asked[:5], "--dram", wrong]) == 2
    capsys.readouterr()
