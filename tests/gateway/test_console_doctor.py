"""The doctor on the console: what of a run is kept, who may begin one, and a run against a real pool in a browser."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncache.auth import tenant_token
from mooncache.bench.operate.browser import BrowserPage
from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.config import Config
from mooncache.gateway.console.doctor import DoctorRuns
from mooncache.gateway.core.doctor_report import CHECKS_MAX, PARTS_MAX, DoctorSteps, read_report
from mooncache.runtime.clock import SystemClock
from mooncache.runtime.service import loop_factory
from tests.conditions import until
from tests.gateway.test_console import served
from tests.gateway.test_console_acts import scene
from tests.gateway.test_console_browser import enter, page

__all__ = ["page"]

ROW = {"group": "pool", "check": "clock", "subject": "node-1", "why": "it is late", "fix": "`chronyc`"}
REPORT = json.dumps({"checks": [{**ROW, "status": "pass"}, {**ROW, "status": "fail"}], "elapsed_s": 1.5})
STEP = json.dumps({"part": "engines", "is_over": False})


def runs(script: str) -> DoctorRuns:
    return DoctorRuns(SystemClock(), (sys.executable, "-c", script))


async def ended(doctor: DoctorRuns) -> dict[str, Any]:
    await until(lambda: not doctor.running, "the run has ended")
    return doctor.document()


def test_a_report_is_sorted_and_cut() -> None:
    rows = [
        {**ROW, "why": "x" * 9999, "status": status}
        for status in ("skipped", "pass", "fail")
        for _ in range(1000)
    ]
    report = read_report(json.dumps({"checks": rows, "elapsed_s": 2, "hosts": {}}).encode())
    assert report.counts == {"fail": 1000, "warn": 0, "pass": 1000, "skipped": 1000}
    assert (len(report.rows), report.left_out) == (CHECKS_MAX, 1000)
    assert [row.status for row in report.rows[::1000]] == ["fail", "pass"]
    assert all(len(row.why) == 2000 for row in report.rows)


@given(
    st.one_of(
        st.binary(), st.recursive(st.none() | st.text(), st.lists).map(lambda v: json.dumps(v).encode())
    )
)
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="no report"):
        read_report(data)
    assert not DoctorSteps().take(data)


def test_steps_are_bounded() -> None:
    steps = DoctorSteps()
    for number in range(2 * PARTS_MAX):
        assert steps.take(json.dumps({"part": f"p-{number}", "is_over": False}).encode())
    assert steps.take(b'{"part": "p-0", "is_over": true}')
    assert len(steps.rows()) == PARTS_MAX
    assert steps.rows()[0] == {"part": "p-0", "is_over": True}


async def test_a_run_its_steps_and_its_results() -> None:
    script = f"import sys; sys.stderr.write({STEP!r} + chr(10)); print({REPORT!r})"
    doctor = runs(script)
    assert doctor.document()["counts"] is None
    assert doctor.start(Config())
    assert not doctor.start(Config()), "one at a time"
    found = await ended(doctor)
    assert found["steps"] == [{"part": "engines", "is_over": False}]
    assert [row["status"] for row in found["checks"]] == ["fail", "pass"]
    assert (found["error"], found["elapsed_s"]) == ("", 1.5)
    await doctor.close()


def test_it_runs_on_the_event_loop_of_a_service() -> None:
    async def run() -> dict[str, Any]:
        doctor = runs(f"print({REPORT!r})")
        assert doctor.start(Config())
        return await ended(doctor)

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        found = runner.run(run())
    assert (found["error"], found["elapsed_s"]) == ("", 1.5)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("import sys; sys.exit('There is no token.')", "There is no token."),
        ("print('{}')", "no report"),
        ("import sys; sys.exit(7)", "ended with 7"),
    ],
)
async def test_a_run_that_fails_is_a_sentence(script: str, said: str) -> None:
    doctor = runs(script)
    assert doctor.start(Config())
    found = await ended(doctor)
    assert said in found["error"]
    assert found["counts"] is None


async def test_the_end_of_the_gateway_ends_the_run(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    doctor = runs(
        f"import os, pathlib, time; pathlib.Path({str(note)!r}).write_text(str(os.getpid())); time.sleep(600)"
    )
    assert doctor.start(Config())
    await until(lambda: note.exists() and note.read_text(), "it runs")
    await doctor.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text()), 0)


async def test_operators_look_and_the_cluster_token_begins(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with served(tmp_path / "state") as (bench, _):
        console = bench.gateway.state.require_console()
        console.doctor = runs(f"print({REPORT!r})")
        url, json_type = bench.url + "/console/doctor", {"content-type": "application/json"}
        operator = {"authorization": f"Bearer {bench.gateway.token.text}"}
        tenant = {"authorization": f"Bearer {tenant_token(bench.gateway.token, 'alice').text}"}

        async def status(method: str, headers: dict[str, str]) -> int:
            async with http.request(
                method, url, headers=headers, data=b"{}" if method == "POST" else None
            ) as said:
                return said.status

        assert [await status("GET", each) for each in ({}, tenant, operator)] == [401, 403, 200]
        for refused in ({}, tenant):
            assert await status("POST", {**refused, **json_type}) in (401, 403)
        assert await status("POST", {**operator, **json_type, "sec-fetch-site": "cross-site"}) == 403
        assert await status("POST", {**operator, "content-type": "text/plain"}) == 415
        assert not console.doctor.running
        assert console.doctor.document()["began_s"] is None
        assert await status("POST", {**operator, **json_type}) == 200
        found = await ended(console.doctor)
        assert found["counts"]["fail"] == 1


async def test_the_page_runs_it_against_a_real_pool(
    page: BrowserPage, pool: EmbeddedCluster, tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with scene(pool, tmp_path / "state", http) as it:
        await enter(page, it.gateway.url, it.gateway.token.text)
        await page.until("!document.querySelector('#nav').hidden")
        await page.press("8")
        await page.until("document.querySelector('main').textContent.includes('It has not run here yet')")
        await page.value("document.querySelector('button.main').focus()")
        await page.press("Enter")
        await page.until("document.querySelector('main').textContent.includes('Looking')")
        await page.until("document.querySelectorAll('.tile').length === 4")
        await page.until("!document.querySelector('button.main').disabled")
        found = it.gateway.state.require_console().doctor.document()
        passed = {(row["check"], row["subject"]) for row in found["checks"] if row["status"] == "pass"}
        assert ("probe block", "node-1") in passed, found
        assert ("here to node", "node-1") in passed, "it asked with this gateway's settings and token"
        said = await page.value("document.querySelector('main').textContent")
        assert "What to look at" in said, "the pool is served beyond loopback or engines are missing"
        assert await page.value("document.querySelectorAll('tbody tr:not(.gap)').length") > 5
        for theme in ("light", "dark"):
            await page.press("t")
            assert await page.value("document.documentElement.dataset.theme") == theme
            await page.picture(tmp_path / f"console-doctor-{theme}.png")
        assert not page.complaints
