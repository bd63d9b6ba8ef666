"""A real browser for benchmarks and tests of the console: Chromium without a window, over its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import aiohttp

from mooncache.bench.worker import WorkerError

_NAMES: Final = ("chromium", "chromium-browser", "google-chrome")
_PATIENCE_S: Final = 90.0
_LOOK_S: Final = 0.05
_END_S: Final = 10.0


def find_browser() -> str | None:
    """The program; None where there is none."""
    return next((found for name in _NAMES if (found := shutil.which(name))), None)


class BrowserPage:
    """One page. `complaints`: what the browser refused or reported, and errors of scripts."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._number = socket, 0
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.complaints: list[str] = []
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            said = json.loads(message.data)
            waiting = self._answers.pop(said.get("id", 0), None)
            if waiting is not None and not waiting.done():
                waiting.set_result(said)
            elif said.get("method") == "Log.entryAdded" and said["params"]["entry"]["level"] == "error":
                self.complaints.append(said["params"]["entry"]["text"])
            elif said.get("method") in ("Runtime.exceptionThrown", "Page.javascriptDialogOpening"):
                self.complaints.append(json.dumps(said["params"])[:500])

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One call of the protocol. Raises WorkerError, when it is refused."""
        self._number += 1
        waiting: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[self._number] = waiting
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        async with asyncio.timeout(_PATIENCE_S):
            said = await waiting
        if "error" in said:
            raise WorkerError(f"the browser refused {method}: {said['error']}")
        found: dict[str, Any] = said["result"]
        return found

    async def value(self, script: str) -> Any:
        """What an expression gives, as plain data. Raises WorkerError, when it fails."""
        said = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in said:
            raise WorkerError(f"a script failed in the browser: {said['exceptionDetails']}")
        return said["result"].get("value")

    async def until(self, script: str) -> Any:
        """Wait until an expression is true; its value. Raises WorkerError, when that does not come."""
        value: Any = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                while not (value := await self.value(script)):  # noqa: ASYNC110  (a browser's page sets no event)
                    await asyncio.sleep(_LOOK_S)
                return value
        raise WorkerError(f"not within {_PATIENCE_S:g} s in the browser: {script} (last: {value!r})")

    async def press(self, key: str) -> None:
        """Press a key, as a person does."""
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        more = {"text": text} if text else {}
        codes = {"Enter": 13, "ArrowDown": 40, "Escape": 27, "Tab": 9}
        await self.call(
            "Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=codes.get(key, 0), **more
        )
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    async def type(self, text: str) -> None:
        """Type into what has the focus."""
        await self.call("Input.insertText", text=text)

    async def picture(self, path: Path) -> None:
        """Write what is seen as PNG, for people to look at."""
        shot = await self.call("Page.captureScreenshot", format="png")
        await asyncio.to_thread(path.write_bytes, base64.b64decode(shot["data"]))

    async def close(self) -> None:
        """End the reader."""
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader


@contextlib.asynccontextmanager
async def browsing(program: str, folder: Path, http: aiohttp.ClientSession) -> AsyncIterator[BrowserPage]:
    """An empty page in a browser of its own, which keeps nothing. Raises WorkerError, when it does not start."""
    process = await asyncio.create_subprocess_exec(
        program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--disable-background-networking", "--disable-extensions", "--window-size=1280,900",
        "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "HOME": str(folder)}, start_new_session=True,
    )  # fmt: skip
    try:
        file = folder / "DevToolsActivePort"
        async with asyncio.timeout(_PATIENCE_S):
            while process.returncode is None and not (file.exists() and "\n" in file.read_text()):  # noqa: ASYNC110
                await asyncio.sleep(_LOOK_S)
        if process.returncode is not None:
            raise WorkerError(f"the browser ended with {process.returncode}")
        port = int(file.read_text().split()[0])
        async with http.get(f"http://127.0.0.1:{port}/json/list") as response:
            targets = await response.json(content_type=None)
        address = next(each["webSocketDebuggerUrl"] for each in targets if each["type"] == "page")
        async with http.ws_connect(address, max_msg_size=1 << 26) as socket:
            page = BrowserPage(socket)
            try:
                for domain in ("Page", "Runtime", "Log"):
                    await page.call(f"{domain}.enable")
                yield page
            finally:
                await page.close()
    finally:
        await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill a browser and its helpers, which would go on writing into its folder, and wait until they are gone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
    with contextlib.suppress(ProcessLookupError, TimeoutError):
        async with asyncio.timeout(_END_S):
            while True:  # helpers belong to init now, and only init can wait for them
                os.killpg(process.pid, 0)
                await asyncio.sleep(_LOOK_S)
