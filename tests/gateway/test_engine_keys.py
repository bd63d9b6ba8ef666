"""An engine takes the key that it was started with; while the token is being replaced a gateway has two."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from mooncache.errors import EngineFailed
from mooncache.gateway.shell.engines import Engines


class Engine:
    """Answers those who show its key."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.shown: list[str] = []
        app = web.Application()
        app.router.add_post("/v1/completions", self._answer)
        self.server = TestServer(app)

    async def _answer(self, request: web.Request) -> web.Response:
        self.shown.append(request.headers["authorization"])
        fits = self.shown[-1] == f"Bearer {self.key}"
        return web.Response(status=200 if fits else 401, body=await request.read())

    @property
    def url(self) -> str:
        return str(self.server.make_url("")).rstrip("/")


async def test_the_key_of_the_other_token_is_shown_and_remembered() -> None:
    keys = ["old"]
    engines = Engines(lambda: keys, 5.0)
    engines.open()
    old, new = Engine("old"), Engine("new")
    try:
        await asyncio.gather(old.server.start_server(), new.server.start_server())

        async def post(engine: Engine) -> bytes:
            async with await engines.post(engine.url, "/v1/completions", b"{}", "r") as answer:
                return await answer.read_all()

        assert await post(old) == b"{}"
        keys[:] = ["new", "old"]
        for _ in range(3):
            assert await post(old) == b"{}"
            assert await post(new) == b"{}"
        assert old.shown == ["Bearer old", "Bearer new", "Bearer old", "Bearer old", "Bearer old"]
        assert set(new.shown) == {"Bearer new"}
        old.key = "new"  # it was started again
        assert await post(old) == b"{}"
        assert await post(old) == b"{}"
        assert old.shown[-3:] == ["Bearer old", "Bearer new", "Bearer new"]
        keys[:] = ["new"]
        assert await post(old) == b"{}"
        old.key = "withdrawn"
        with pytest.raises(EngineFailed, match="401"):
            await post(old)
    finally:
        await engines.close()
        await asyncio.gather(old.server.close(), new.server.close())
