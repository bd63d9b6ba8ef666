"""axe, the field's checker of accessibility, in the console's page.

The page's policy forbids every script that is not its own. So axe runs in a world of its own, which sees the same
document and to which that policy does not apply.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from mooncache.bench.operate.browser import BrowserPage
from mooncache.bench.worker import WorkerError

PACKAGE = "axe_core_python"
GRAVE = ("serious", "critical")
_RUN = "axe.run(document, {resultTypes: ['violations']}).then((found) => JSON.stringify(found.violations))"


class Axe:
    """For one document; another one needs another."""

    def __init__(self, page: BrowserPage, world: int) -> None:
        self._page, self._world = page, world

    @classmethod
    async def loaded(cls, page: BrowserPage) -> Axe:
        """Put axe beside the page that is open."""
        tree = await page.call("Page.getFrameTree")
        made = await page.call(
            "Page.createIsolatedWorld", frameId=tree["frameTree"]["frame"]["id"], worldName="axe"
        )
        axe = cls(page, made["executionContextId"])
        source = resources.files(PACKAGE).joinpath("axe.min.js").read_text()
        await axe._value(source + "; typeof axe")
        return axe

    async def violations(self) -> list[str]:
        """What is seriously or critically wrong: rule, element, and why."""
        found = json.loads(await self._value(_RUN))
        return [
            f"{each['id']} ({each['impact']}): {node['html'][:160]}: {node['failureSummary']}"
            for each in found
            if each["impact"] in GRAVE
            for node in each["nodes"][:3]
        ]

    async def _value(self, script: str) -> Any:
        said = await self._page.call(
            "Runtime.evaluate",
            expression=script,
            contextId=self._world,
            returnByValue=True,
            awaitPromise=True,
        )
        if "exceptionDetails" in said:
            raise WorkerError(f"axe failed in the browser: {said['exceptionDetails']}")
        return said["result"].get("value")
