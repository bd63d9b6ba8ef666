"""Capture: what a real gateway writes about requests, what it never writes, and what it does when it cannot."""

from __future__ import annotations

import asyncio
import fcntl
import functools
import json
import os
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from mooncache.cli.app import run
from mooncache.config.serving import GatewaySection
from mooncache.errors import ConfigInvalid
from mooncache.gateway import service
from mooncache.gateway.core.capture import DIGEST_BYTES, CapturedPrompt, Numbering, block_digests
from mooncache.gateway.shell import capture as shell
from mooncache.simulate import paper_cluster, simulate
from mooncache.traces import read
from tests.conditions import until, wait_until
from tests.gateway.model_folder import instance_fields
from tests.gateway.stand_in import MODEL, Bench, FakeEngine, good, running

BLOCK = 64
SECRET = "the launch code is swordfish "


def capturing(tmp_path: Path, tokenizer: Path, **more: Any) -> Any:
    """A gateway that captures into tmp_path/trace.jsonl."""
    return running(
        tmp_path,
        more.pop("engines", None) or [FakeEngine("e", count=counting(tokenizer))],
        instance=instance_fields(tokenizer),
        gateway__capture_file=tmp_path / "trace.jsonl",
        gateway__capture_block_tokens=BLOCK,
        **more,
    )


def counting(folder: Path) -> Callable[[dict[str, Any]], int]:
    """Counts as an engine with this tokenizer does: a gateway that counts otherwise stops making keys and rows."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda body: len(
        tokenizer.encode(body["prompt"]).ids if isinstance(body["prompt"], str) else body["prompt"]
    )


async def known(bench: Bench) -> None:
    """Wait until the tokenizer is loaded."""
    await until(lambda: any(entry.reader for entry in bench.gateway.state.tokenizers._entries.values()))


async def complete(
    bench: Bench, http: aiohttp.ClientSession, prompt: Any, tenant: str = "alice", **more: Any
) -> int:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 8, **more}
    async with http.post(bench.url + "/v1/completions", json=body, headers=bench.auth(tenant)) as response:
        await response.read()
        return response.status


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def files_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.jsonl*"))


async def test_a_conversation_becomes_rows_that_share_their_beginning(
    tmp_path: Path, tokenizer_folder: Path, http: aiohttp.ClientSession
) -> None:
    first = SECRET * 10
    async with capturing(tmp_path, tokenizer_folder) as bench:
        await known(bench)
        for prompt in (first, first + "and then? " * 20, "something else " * 12):
            assert await complete(bench, http, prompt) == 200
        assert await complete(bench, http, first, tenant="bob") == 200
        assert await complete(bench, http, first, stream=True) == 200
    path = tmp_path / "trace.jsonl"
    rows = rows_of(path)
    assert [row["input_length"] for row in rows] == [290, 490, 180, 290, 290]
    assert [row["output_length"] for row in rows] == [3, 3, 3, 3, 3]
    assert rows[0]["hash_ids"] == [0, 1, 2, 3, 4]
    assert rows[1]["hash_ids"] == [0, 1, 2, 3, 5, 6, 7, 8]
    assert rows[2]["hash_ids"] == [9, 10, 11]
    assert rows[3]["hash_ids"] == [12, 13, 14, 15, 16]  # another tenant shares nothing, as in the pool
    assert rows[4]["hash_ids"] == rows[0]["hash_ids"]
    assert rows[0]["timestamp"] == 0
    assert "tenant" not in rows[0]
    assert path.stat().st_mode & 0o777 == 0o600
    text = path.read_text()
    assert "swordfish" not in text and "alice" not in text and MODEL not in text
    trace = read(path, time_unit="ms")
    assert len(trace) == 5
    result = simulate(trace, replace(paper_cluster(1, 1), block_tokens=BLOCK))
    assert result.done.all()
    assert run(["trace", "check", str(path), "--time-unit", "ms"]) == 0


async def test_tenants_and_sessions_are_numbers(
    tmp_path: Path, tokenizer_folder: Path, http: aiohttp.ClientSession
) -> None:
    async with capturing(tmp_path, tokenizer_folder, gateway__capture_names=True) as bench:
        await known(bench)
        await complete(bench, http, "hello there", session_id="my-session")
        await complete(bench, http, "hello there", tenant="bob", session_id="my-session")
        await complete(bench, http, "hello there")
    rows = rows_of(tmp_path / "trace.jsonl")
    assert [row["tenant"] for row in rows] == [0, 2, 0]
    assert [row["session"] for row in rows] == [1, 3, -1]
    assert read(tmp_path / "trace.jsonl").session is not None


async def test_rows_stand_in_order_of_arrival_and_wait_for_their_end(
    tmp_path: Path, tokenizer_folder: Path, http: aiohttp.ClientSession
) -> None:
    release = asyncio.Event()

    async def slow_first(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> Any:
        if len(engine.requests) == 1:
            await release.wait()
        return await good(engine, request, body)

    async with capturing(tmp_path, tokenizer_folder, engines=[FakeEngine("e", behave=slow_first)]) as bench:
        await known(bench)
        slow = asyncio.create_task(complete(bench, http, "slow " * 10))
        await until(lambda: len(bench.engines["e"].requests) == 1)
        assert await complete(bench, http, "quick") == 200
        assert not rows_of(tmp_path / "trace.jsonl")
        release.set()
        assert await slow == 200
        await until(lambda: len(rows_of(tmp_path / "trace.jsonl")) == 2)
    rows = rows_of(tmp_path / "trace.jsonl")
    assert [row["input_length"] for row in rows] == [50, 5]
    assert rows[0]["timestamp"] <= rows[1]["timestamp"]


async def test_a_failed_request_has_a_row_without_output(
    tmp_path: Path, tokenizer_folder: Path, http: aiohttp.ClientSession
) -> None:
    async def broken(_engine: FakeEngine, _request: web.Request, _body: dict[str, Any]) -> Any:
        return web.json_response({"error": {"message": "no"}}, status=500)

    async with capturing(tmp_path, tokenizer_folder, engines=[FakeEngine("e", behave=broken)]) as bench:
        await known(bench)
        assert await complete(bench, http, "hello") >= 500
    assert [row["output_length"] for row in rows_of(tmp_path / "trace.jsonl")] == [0]


async def test_without_tokens_requests_are_served_and_counted(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with running(tmp_path, [FakeEngine("e")], gateway__capture_file=tmp_path / "trace.jsonl") as bench:
        assert await complete(bench, http, "hello") == 200
        text = bench.gateway.metrics.render().decode()
        assert 'mooncache_gateway_capture_dropped_total{reason="no_tokens"} 1.0' in text


async def test_nothing_is_written_unless_asked(
    tmp_path: Path, tokenizer_folder: Path, http: aiohttp.ClientSession
) -> None:
    async with running(tmp_path, [FakeEngine("e")], instance=instance_fields(tokenizer_folder)) as bench:
        await known(bench)
        assert bench.gateway.state.capture is None
        assert await complete(bench, http, "hello") == 200
    assert files_of(tmp_path) == []


async def test_full_files_are_renamed_and_the_oldest_go(
    tmp_path: Path, tokenizer_folder: Path, http: aiohttp.ClientSession
) -> None:
    more = {"gateway__capture_file_bytes_max": 1024, "gateway__capture_file_count": 3}
    async with capturing(tmp_path, tokenizer_folder, **more) as bench:
        await known(bench)
        for number in range(60):
            assert await complete(bench, http, f"request {number}") == 200
    files = files_of(tmp_path)
    assert files == ["trace.jsonl", "trace.jsonl.1", "trace.jsonl.2"]
    for name in files[1:]:
        rows = rows_of(tmp_path / name)
        assert rows[0]["timestamp"] == 0
        assert rows[0]["hash_ids"] == [0]  # every file counts its own ids: two files cannot be linked
        assert 1024 <= (tmp_path / name).stat().st_size < 1400
        assert len(read(tmp_path / name, block_tokens=BLOCK)) == len(rows)


async def test_a_salt_that_lasts_makes_equal_ids_and_calendar_stamps(
    tmp_path: Path, tokenizer_folder: Path, http: aiohttp.ClientSession
) -> None:
    found = []
    for _ in range(2):
        more = {"gateway__capture_salt_file": tmp_path / "salt"}
        async with capturing(tmp_path, tokenizer_folder, **more) as bench:
            await known(bench)
            await complete(bench, http, SECRET * 4)
        found += rows_of(tmp_path / "trace.jsonl")
    assert (tmp_path / "salt").stat().st_mode & 0o777 == 0o600
    assert found[0]["hash_ids"] == found[1]["hash_ids"]
    assert min(found[0]["hash_ids"]) > 1000
    assert found[0]["timestamp"] > 1_600_000_000_000
    assert len(read(tmp_path / "trace.jsonl", block_tokens=BLOCK)) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
async def test_a_folder_that_may_not_be_written_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(ConfigInvalid, match="capture_file"):
        async with running(tmp_path, [], gateway__capture_file=tmp_path / "closed" / "trace.jsonl"):
            pass


@pytest.mark.parametrize("kind", ["folder", "missing folder", "salt mode", "salt text"])
async def test_what_cannot_be_used_is_told_at_the_start(tmp_path: Path, kind: str) -> None:
    more: dict[str, Any] = {"gateway__capture_file": tmp_path / "trace.jsonl"}
    if kind == "folder":
        (tmp_path / "trace.jsonl").mkdir()
    elif kind == "missing folder":
        more["gateway__capture_file"] = tmp_path / "nowhere" / "trace.jsonl"
    else:
        more["gateway__capture_salt_file"] = salt = tmp_path / "salt"
        salt.write_text("ab" * 32 if kind == "salt mode" else "hello")
        salt.chmod(0o644 if kind == "salt mode" else 0o600)
    with pytest.raises(ConfigInvalid, match="capture_salt_file" if "salt" in kind else "capture_file"):
        async with running(tmp_path, [], **more):
            pass
    assert kind != "folder" or (tmp_path / "trace.jsonl").is_dir()


async def test_a_disk_that_fails_costs_rows_and_no_request(
    tmp_path: Path, tokenizer_folder: Path, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shell, "_BUFFER_BYTES", 1)
    monkeypatch.setattr(shell, "_RETRY_S", 0.0)
    async with capturing(tmp_path, tokenizer_folder) as bench:
        await known(bench)
        real, is_full = os.write, True

        def write(descriptor: int, data: bytes) -> int:
            if is_full and bytes(data[:2]) == b'{"':
                real(descriptor, data[:5])
                raise OSError(28, "No space left on device")
            return real(descriptor, data)

        monkeypatch.setattr(os, "write", write)
        assert await complete(bench, http, "lost") == 200
        lost = 'capture_dropped_total{reason="write_failed"} 1.0'
        await until(lambda: lost in bench.gateway.metrics.render().decode())
        is_full = False
        assert await complete(bench, http, "kept") == 200
        await until(lambda: "capture_rows_total 1.0" in bench.gateway.metrics.render().decode())
    assert len(rows_of(tmp_path / "trace.jsonl")) == 1
    assert not (tmp_path / "trace.jsonl.1").exists()  # no half line was left of the failed one


async def test_a_queue_that_is_full_drops_rows(
    tmp_path: Path, tokenizer_folder: Path, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "Capture", functools.partial(shell.Capture, queue_max=2))
    gate = asyncio.Event()

    async def held(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> Any:
        await gate.wait()
        return await good(engine, request, body)

    engines = [FakeEngine("e", behave=held)]
    async with capturing(tmp_path, tokenizer_folder, engines=engines) as bench:
        await known(bench)
        calls = [asyncio.create_task(complete(bench, http, f"number {number}")) for number in range(5)]
        await until(lambda: len(engines[0].requests) == 5)
        gate.set()
        assert await asyncio.gather(*calls) == [200] * 5
    assert len(rows_of(tmp_path / "trace.jsonl")) == 2


tokens = st.lists(st.integers(0, 3), min_size=1, max_size=20).map(lambda values: array("I", values))


@settings(max_examples=200, deadline=None)
@given(
    requests=st.lists(
        st.tuples(tokens, st.sampled_from(["a", "b"]), st.integers(0, 20)), min_size=1, max_size=12
    ),
    lasting=st.booleans(),
)
def test_ids_are_equal_exactly_for_equal_beginnings(
    requests: list[tuple[array[int], str, int]], lasting: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever is asked by whom, equal ids mean equal tokens up to there, and one id has one parent."""
    numbering = Numbering(b"s" * 32, is_lasting=lasting)
    meaning: dict[int, tuple[int, ...]] = {}
    parents: dict[int, int] = {}
    for prompt, scope, public in requests:
        ids = numbering.blocks(block_digests(CapturedPrompt(prompt, scope, public), 4, b"s" * 32))
        assert len(ids) == -(-len(prompt) // 4)
        for number, block in enumerate(ids):
            assert meaning.setdefault(block, tuple(prompt[: 4 * number + 4])) == tuple(
                prompt[: 4 * number + 4]
            )
            parent = ids[number - 1] if number else -1
            assert parents.setdefault(block, parent) == parent


def test_tenants_share_what_is_public_and_nothing_else() -> None:
    prompt, salt = array("I", range(40)), b"s" * 32

    def digests(scope: str, public: int, salt: bytes = salt) -> list[bytes]:
        data = block_digests(CapturedPrompt(prompt, scope, public), 8, salt)
        return [data[at : at + DIGEST_BYTES] for at in range(0, len(data), DIGEST_BYTES)]

    one, two = digests("a", 20), digests("b", 20)
    assert one[:2] == two[:2]
    assert not set(one[2:]) & set(two[2:])
    assert not set(digests("a", 0)) & set(digests("b", 0))
    assert not set(one) & set(digests("a", 20, b"t" * 32))
    assert digests("a", 7) == digests("a", 0)


# --- the writer alone ---------------------------------------------------------------------------------------------


class Counts(dict[str, float]):
    """Stands for the metrics."""

    def counter(self, name: str) -> Any:
        def inc(count: float = 1) -> None:
            self[name] = self.get(name, 0) + count

        return SimpleNamespace(inc=inc, labels=self.counter)


def writer(path: Path, queue_max: int = shell.QUEUE_MAX, **more: Any) -> tuple[shell.Capture, Counts]:
    counts = Counts()
    stats: Any = SimpleNamespace(capture_rows=counts.counter("rows"), capture_dropped=counts.counter(""))
    section = GatewaySection(capture_file=path, capture_block_tokens=1, **more)
    return shell.Capture(section, stats, queue_max), counts


def begin(capture: shell.Capture) -> shell.Ticket | None:
    prompt = CapturedPrompt(array("I", range(16)), "scope")
    return capture.begin([prompt], tenant="a", session="", now_s=1.0)


def test_a_request_that_runs_on_does_not_cost_the_rows_of_others(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    capture, counts = writer(path, queue_max=8)
    long = begin(capture)
    assert long is not None
    tickets = []
    for number in range(100):
        # None only as long as the thread has not yet taken the others
        ticket = wait_until(lambda: begin(capture), "a place in the queue", every_s=0.001)
        assert ticket is not None
        tickets.append(ticket)
        capture.end(ticket, number)
    capture.end(long, 1000)
    capture.close()
    assert [row["output_length"] for row in rows_of(path)] == list(range(100))
    assert counts["outlasted"] == 1 and counts["rows"] == 100


def test_two_gateways_cannot_have_one_file(tmp_path: Path) -> None:
    """The second is refused at its start, and what the first one writes stays where it is."""
    path = tmp_path / "trace.jsonl"
    first, counts = writer(path, capture_file_bytes_max=1024)
    with pytest.raises(ConfigInvalid, match="another gateway writes to it"):
        writer(path)
    for _ in range(30):  # it renames its own files all the same
        ticket = begin(first)
        assert ticket is not None
        first.end(ticket, 1)
    first.close()
    assert counts == {"rows": 30.0}
    assert len(files_of(tmp_path)) > 1
    rows = sum(len(rows_of(tmp_path / name)) for name in files_of(tmp_path))
    assert 0 < rows <= 30
    second, _ = writer(path)
    second.close()


@pytest.mark.parametrize("moment", ["it looks at the empty file", "it has taken it away"])
def test_two_gateways_that_start_at_once_cannot_have_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The other one comes between the making of the file and its lock."""
    path = tmp_path / "trace.jsonl"
    real, others = fcntl.flock, []

    def flock(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(shell.fcntl, "flock", real)
        if moment == "it has taken it away":
            others.append(writer(path)[0])
        else:
            others.append(path.open("rb"))
            real(others[0], fcntl.LOCK_EX)
        real(descriptor, operation)

    monkeypatch.setattr(shell.fcntl, "flock", flock)
    with pytest.raises(ConfigInvalid, match="another gateway writes to it"):
        writer(path)
    others[0].close()
    assert path.exists()


def test_a_file_that_could_not_be_closed_does_not_close_somebody_elses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of a closed file is given to the next one that is opened: a connection, perhaps."""
    capture, counts = writer(tmp_path / "trace.jsonl", capture_file_bytes_max=1024)
    others: list[int] = []
    real_close, real_write = os.close, os.write

    def close(descriptor: int) -> None:
        real_close(descriptor)
        others.append(os.open("/dev/null", os.O_RDONLY))

    def write(descriptor: int, data: bytes) -> int:
        if bytes(data[:2]) == b'{"':
            raise OSError(28, "No space left on device")
        return real_write(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(os, "close", close)
    for _ in range(20):
        ticket = begin(capture)
        assert ticket is not None
        capture.end(ticket, 1)
    capture.close()
    monkeypatch.undo()
    assert len(others) == 1, "it was closed once"
    os.close(others[0])
    assert counts == {"write_failed": 20.0}, "rows that waited in the buffer were lost too"


def test_prompts_that_are_hashed_take_room_until_their_row_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shell, "_WAITING_BYTES_MAX", 4096)
    capture, counts = writer(tmp_path / "trace.jsonl")
    tickets = []
    for _ in range(100):
        ticket = begin(capture)
        assert ticket is not None, "room is given back"
        tickets.append(ticket)
        wait_until(lambda ticket=ticket: ticket.digests, "the hashes", every_s=0.001)
    kept = 2048 // 256  # 16 hashes of 16 bytes each; as much again is for prompts that are not hashed yet
    for ticket in tickets:
        capture.end(ticket, 1)
    capture.close()
    assert counts == {"outlasted": 100.0 - kept, "rows": float(kept)}
    assert len(rows_of(tmp_path / "trace.jsonl")) == kept
