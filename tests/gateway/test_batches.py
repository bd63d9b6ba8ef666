"""Files and batches by the unmodified `openai` client: the way of a batch, bad input, other tenants, a restart."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web
from openai import AsyncOpenAI

from mooncache.config import load
from mooncache.errors import ConfigInvalid
from mooncache.gateway.core.queue_place import OFFLINE_S
from mooncache.gateway.service import GatewayService
from mooncache.gateway.shell.batch_store import BatchStore
from mooncache.proto.v1 import conductor_pb2 as pb
from tests.conditions import until
from tests.gateway.stand_in import MODEL, Bench, FakeEngine, good, running

CHAT = "/v1/chat/completions"


def line(name: str, text: str = "hi", **changes: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 3}
    return {"custom_id": name, "method": "POST", "url": CHAT, "body": body, **changes}


def jsonl(*lines: dict[str, Any] | bytes) -> bytes:
    return b"\n".join(each if isinstance(each, bytes) else json.dumps(each).encode() for each in lines)


@asynccontextmanager
async def serving(
    folder: Path, engine: FakeEngine | None = None, **settings: Any
) -> AsyncIterator[tuple[Bench, AsyncOpenAI]]:
    engine = engine or FakeEngine("e", tokens=3)
    async with (
        running(folder, [engine], gateway__batch_dir=folder / "batches", **settings) as bench,
        client_of(bench) as client,
    ):
        yield bench, client


def client_of(bench: Bench, tenant: str = "alice") -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{bench.url}/v1", api_key=bench.key(tenant), max_retries=0, timeout=60)


async def submit(client: AsyncOpenAI, data: bytes, **more: Any) -> openai.types.Batch:
    file = await client.files.create(file=("my prompts.jsonl", data), purpose="batch")
    fields: dict[str, Any] = {"endpoint": CHAT, "completion_window": "24h", **more}
    return await client.batches.create(input_file_id=file.id, **fields)


async def ended(client: AsyncOpenAI, batch_id: str) -> openai.types.Batch:
    async with asyncio.timeout(120):
        while True:
            batch = await client.batches.retrieve(batch_id)
            if batch.status in ("completed", "failed", "expired", "cancelled"):
                return batch
            await asyncio.sleep(0.02)


async def lines_of(client: AsyncOpenAI, file_id: str | None) -> dict[str | None, Any]:
    assert file_id is not None
    content = (await client.files.content(file_id)).content
    rows = [json.loads(each) for each in content.splitlines()]
    return {row["custom_id"]: row for row in rows}


async def test_a_batch_from_its_file_to_its_results(tmp_path: Path) -> None:
    # One at a time: two under way together may arrive in either order.
    async with serving(tmp_path, gateway__offline_request_count_max=1) as (bench, client):
        engine = bench.engines["e"]
        texts = ["b two", "a one", "b one", "a two"]
        data = jsonl(*(line(f"r{number}", text) for number, text in enumerate(texts)))
        begun = await submit(client, data, metadata={"job": "1"})
        batch = await ended(client, begun.id)
        assert (batch.status, batch.endpoint, batch.metadata) == ("completed", CHAT, {"job": "1"})
        assert batch.request_counts is not None and batch.error_file_id is None
        assert batch.request_counts.to_dict() == {"total": 4, "completed": 4, "failed": 0}
        assert batch.usage is not None and batch.usage.input_tokens == 4 * engine.prompt_tokens
        rows = await lines_of(client, batch.output_file_id)
        assert set(rows) == {"r0", "r1", "r2", "r3"}
        answer = rows["r0"]["response"]
        assert answer["status_code"] == 200 and answer["request_id"] == f"{batch.id}-1"
        assert answer["body"]["object"] == "chat.completion"
        assert answer["body"]["choices"][0]["message"] == {"role": "assistant", "content": "t0 t1 t2 "}
        assert answer["body"]["usage"]["total_tokens"] == engine.prompt_tokens + 3
        asked = [body["messages"][0]["content"] for body in engine.requests]
        assert asked == sorted(texts), "those that begin alike are neighbours"
        assert all(each.offline for each in bench.conductor.scheduled)
        # lists, files, deletion
        later = await submit(client, jsonl(line("x")))
        await ended(client, later.id)
        assert [each.id async for each in client.batches.list(limit=1)] == [later.id, batch.id]
        first = await client.batches.list(limit=1)
        assert first.has_more and first.data[0].id == later.id
        file = await client.files.retrieve(batch.input_file_id)
        assert (file.filename, file.bytes, file.purpose) == ("my prompts.jsonl", len(data), "batch")
        assert (await client.files.content(file.id)).content == data
        kinds = [each.purpose async for each in client.files.list()]
        assert sorted(kinds) == ["batch", "batch", "batch_output", "batch_output"]
        assert (await client.files.delete(file.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(file.id)


BROKEN = [
    (b"{", "invalid_json_line"),
    (b"[1]", "invalid_request"),
    (b'"\xff"', "invalid_json_line"),
    (jsonl(line("")), "invalid_custom_id"),
    (jsonl(line("get", method="GET")), "invalid_method"),
    (jsonl(line("url", url="/v1/embeddings")), "mismatched_url"),
    (jsonl(line("stream", body={"model": MODEL, "stream": True})), "stream_not_supported"),
    (jsonl(line("model", body={})), "model_missing"),
    (jsonl(line("good")), "duplicate_custom_id"),
    (json.dumps(line("deep")).encode()[:-1] + b',"x":' + b"[" * 5000, "invalid_json_line"),
]


async def test_broken_lines_fail_and_the_rest_goes_on(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, client):
        unknown = line("unknown", body={"model": "nope", "messages": [{"role": "user", "content": "x"}]})
        data = jsonl(line("good"), b"", *(each for each, _ in BROKEN), unknown, line("last"))
        batch = await ended(client, (await submit(client, data)).id)
        assert batch.status == "completed" and batch.request_counts is not None
        assert batch.request_counts.to_dict() == {"total": 13, "completed": 2, "failed": 11}
        assert set(await lines_of(client, batch.output_file_id)) == {"good", "last"}
        assert batch.errors is not None and batch.errors.data is not None
        found = [(each.line, each.code) for each in batch.errors.data]
        assert found == [(number, code) for number, (_, code) in enumerate(BROKEN, 3)]
        assert batch.error_file_id is not None
        rows = [
            json.loads(each) for each in (await client.files.content(batch.error_file_id)).text.splitlines()
        ]
        assert [row["error"]["code"] for row in rows if row["error"]] == [code for _, code in BROKEN]
        assert all(f"Line {number}:" in row["error"]["message"] for number, row in enumerate(rows[:10], 3))
        assert rows[10]["response"]["status_code"] == 404
        empty = await ended(client, (await submit(client, jsonl(b"{"))).id)
        assert empty.status == "failed" and empty.errors is not None and empty.errors.data is not None
        assert [each.code for each in empty.errors.data] == ["empty_file", "invalid_json_line"]


async def test_what_is_too_large_or_no_file_is_refused(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    limits = {
        "gateway__batch_file_bytes_max": 2048,
        "gateway__tenant_batch_bytes_max": 4000,
        "gateway__batch_request_count_max": 2,
        "gateway__tenant_batch_file_count_max": 4,
    }
    async with serving(tmp_path, **limits) as (bench, client):
        for size, error in (
            (2049, openai.BadRequestError),
            (1_000_000, openai.APIStatusError),
            (0, openai.BadRequestError),
        ):
            with pytest.raises(error):
                await client.files.create(file=b"x" * size, purpose="batch")
        with pytest.raises(openai.BadRequestError, match="purpose"):
            await client.files.create(file=b"x", purpose="fine-tune")
        many = await ended(client, (await submit(client, jsonl(line("a"), line("b"), line("c")))).id)
        assert many.status == "failed" and many.errors is not None and many.errors.data is not None
        assert many.errors.data[0].code == "too_many_requests"
        await client.files.create(file=b"x" * 2000, purpose="batch")
        with pytest.raises(openai.BadRequestError, match="can be taken"):
            await client.files.create(file=b"x" * 2000, purpose="batch")
        await client.files.create(file=b"x", purpose="batch")
        await client.files.create(file=b"x", purpose="batch")
        with pytest.raises(openai.BadRequestError, match="4 files"):
            await client.files.create(file=b"x", purpose="batch")
        assert not list((tmp_path / "batches" / "files").glob("*.partial"))
        forms = [
            ("text/plain", b"x"),
            ("multipart/form-data", b"x"),
            ("multipart/form-data; boundary=b", b"nonsense"),
            (
                "multipart/form-data; boundary=b",
                b'--b\r\ncontent-disposition: form-data; name="file"\r\n\r\nx',
            ),
            (
                "multipart/form-data; boundary=b",
                b'--b\r\ncontent-disposition: form-data; name="x"\r\n\r\ny\r\n--b--\r\n',
            ),
        ]
        for kind, body in forms:
            headers = {**bench.auth("bob"), "content-type": kind}
            async with http.post(f"{bench.url}/v1/files", data=body, headers=headers) as response:
                assert response.status == 400, (kind, body, await response.text())


async def test_tricks_with_paths_and_the_files_of_others(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with serving(tmp_path) as (bench, client):
        (tmp_path / "batches" / "files" / "evil.json").write_text("{}")
        file = await client.files.create(file=("../../../etc/passwd", jsonl(line("a"))), purpose="batch")
        assert file.filename == "passwd"
        assert {each.name for each in (tmp_path / "batches" / "files").iterdir()} == {
            "evil.json",
            f"{file.id}.json",
            f"{file.id}.data",
        }
        ids = ["..", "..%2f..%2flock", "%2e%2e%2flock", "evil", "file-%00", "x" * 5000, "*"]
        for each in ids:
            for path in (f"files/{each}", f"files/{each}/content", f"batches/{each}"):
                async with http.get(f"{bench.url}/v1/{path}", headers=bench.auth()) as response:
                    assert response.status == 404, path
        batch = await ended(client, (await submit(client, jsonl(line("a")))).id)
        async with client_of(bench, "mallory") as other:
            for call in (
                other.files.retrieve(file.id),
                other.files.content(file.id),
                other.files.delete(file.id),
                other.files.content(batch.output_file_id or ""),
                other.batches.retrieve(batch.id),
                other.batches.cancel(batch.id),
                other.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h"),
            ):
                with pytest.raises(openai.NotFoundError):
                    await call
            assert [each async for each in other.files.list()] == []
            assert [each async for each in other.batches.list()] == []
        for changes in ({"endpoint": "/v1/embeddings"}, {"completion_window": "1h"}):
            with pytest.raises(openai.BadRequestError):
                await submit(client, jsonl(line("a")), **changes)
        with pytest.raises(openai.BadRequestError, match="purpose"):
            await client.batches.create(
                input_file_id=batch.output_file_id or "", endpoint=CHAT, completion_window="24h"
            )


async def test_requests_of_a_batch_stand_behind_online_ones_in_the_engines_queue(tmp_path: Path) -> None:
    async with serving(tmp_path) as (bench, client):
        plan = bench.plan("e")
        plan.decode.orders_by_priority = True
        bench.conductor.plans = [plan]
        await ended(client, (await submit(client, jsonl(line("a")))).id)
        online = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}]
        )
        assert online.choices
        offline_place, online_place = (body["priority"] for body in bench.engines["e"].requests)
        assert offline_place > online_place, "though it came first"


async def test_what_a_batch_waited_for_admission_is_no_part_of_its_place(tmp_path: Path) -> None:
    async with serving(tmp_path) as (bench, client):
        admitted = bench.plan("e")
        admitted.decode.orders_by_priority = True
        busy = pb.ScheduleResponse(admitted=False, retry_after_ms=5, reason=pb.ADMISSION_REASON_OFFLINE)
        bench.conductor.plans = [busy]
        begun = await submit(client, jsonl(line("a")))
        await until(lambda: len(bench.conductor.scheduled) > 1)
        clock = bench.gateway.state.clock
        online_ms = clock.wall_s() * 1e3
        await until(lambda: clock.wall_s() * 1e3 > online_ms + 50)
        bench.conductor.plans = [admitted]
        await ended(client, begun.id)
        assert bench.engines["e"].requests[0]["priority"] > online_ms + OFFLINE_S * 1e3


async def test_nothing_is_sent_while_nothing_is_idle_and_a_batch_can_be_cancelled(tmp_path: Path) -> None:
    async with serving(tmp_path) as (bench, client):
        admitted = bench.conductor.plans[0]
        refused = pb.ScheduleResponse(
            decision_id="",
            admitted=False,
            retry_after_ms=5,
            reason=pb.ADMISSION_REASON_OFFLINE,
            message="busy",
        )
        bench.conductor.plans = [refused]
        begun = await submit(client, jsonl(*(line(f"r{number}", f"{number}") for number in range(5))))
        await until(lambda: len(bench.conductor.scheduled) > 5)
        assert not bench.engines["e"].requests
        assert len({each.request_id for each in bench.conductor.scheduled}) <= 2, "few are offered at a time"
        bench.conductor.plans = [admitted, admitted, refused]
        await until(lambda: len(bench.engines["e"].requests) == 2)
        assert (await client.batches.retrieve(begun.id)).status == "in_progress"
        with pytest.raises(openai.APIStatusError, match="under way"):
            await client.files.delete(begun.input_file_id)
        assert (await client.batches.cancel(begun.id)).status == "cancelling"
        batch = await ended(client, begun.id)
        assert batch.status == "cancelled" and batch.request_counts is not None
        assert batch.request_counts.completed == 2
        assert len(await lines_of(client, batch.output_file_id)) == 2
        rest = await lines_of(client, batch.error_file_id)
        assert {row["error"]["code"] for row in rest.values()} == {"batch_cancelled"}
        with pytest.raises(openai.NotFoundError):
            await client.batches.cancel("batch_none")


async def test_without_a_conductor_nothing_offline_is_sent(tmp_path: Path) -> None:
    async with serving(tmp_path) as (bench, client):
        await bench.conductor.stop()
        begun = await submit(client, jsonl(line("a")))
        await until(lambda: bool(bench.gateway.state.stats.offline_open._value.get()))
        await asyncio.sleep(0.3)
        assert not bench.engines["e"].requests
        assert (await client.batches.retrieve(begun.id)).status == "in_progress"


async def test_a_gateway_that_starts_again_goes_on_where_it_was(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def slow(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if body["messages"][0]["content"] in ("2", "3"):
            await gate.wait()
        return await good(engine, request, body)

    engine = FakeEngine("e", behave=slow)
    data = jsonl(*(line(f"r{number}", f"{number}") for number in range(4)))
    async with serving(tmp_path, engine) as (bench, client):
        begun = await submit(client, data)
        await until(lambda: len(engine.requests) == 4)
        store = bench.gateway.state.batches
        assert store is not None
        await until(lambda: store.batches[begun.id].completed == 2)
    with (tmp_path / "batches" / "batches" / f"{begun.id}.done").open("ab") as torn:
        torn.write(b'{"number":3,"answered":tr')
    gate.set()
    engine.requests.clear()
    async with serving(tmp_path, engine) as (_, client):
        batch = await ended(client, begun.id)
        assert batch.status == "completed" and batch.request_counts is not None
        assert batch.request_counts.to_dict() == {"total": 4, "completed": 4, "failed": 0}
        assert sorted(body["messages"][0]["content"] for body in engine.requests) == ["2", "3"]
        assert len(await lines_of(client, batch.output_file_id)) == 4


async def test_an_engine_that_fails_is_tried_again_and_then_the_line_fails(tmp_path: Path) -> None:
    async def broken(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if body["messages"][0]["content"] == "never" or len(engine.requests) < 2:
            return web.json_response({"error": {"message": "boom"}}, status=500)
        return await good(engine, request, body)

    async with serving(tmp_path, FakeEngine("e", behave=broken)) as (_, client):
        batch = await ended(client, (await submit(client, jsonl(line("a"), line("b", "never")))).id)
        assert set(await lines_of(client, batch.output_file_id)) == {"a"}
        failed = (await lines_of(client, batch.error_file_id))["b"]
        assert failed["response"]["status_code"] == 502
        assert "error" in failed["response"]["body"]


async def test_a_folder_is_for_one_gateway_and_without_one_there_are_no_batches(tmp_path: Path) -> None:
    store = await asyncio.to_thread(BatchStore, tmp_path / "b")
    config = load(env={}, overrides={"cluster.state_dir": tmp_path, "gateway.batch_dir": tmp_path / "b"})
    with pytest.raises(ConfigInvalid, match="another gateway"):
        await GatewayService(config).build()
    store.close()
    async with running(tmp_path, [FakeEngine("e")]) as bench, client_of(bench) as client:
        with pytest.raises(openai.APIStatusError, match=r"gateway\.batch_dir"):
            await client.files.create(file=b"x", purpose="batch")
