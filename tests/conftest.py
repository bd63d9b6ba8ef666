"""What every test may use."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import settings

from tests.groups import GROUPS, end, group_of

# No test judges time: an example that is slow on a busy machine is no failure.
settings.register_profile("mooncache", deadline=None)
settings.load_profile("mooncache")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite", action="store_true", help="write the present answers into stories (tests/stories.py)"
    )


@pytest.fixture
def rewrite(request: pytest.FixtureRequest) -> bool:
    """Whether stories take over the present answers."""
    return bool(request.config.getoption("--rewrite"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {name: place for place, name in enumerate(GROUPS)}
    items.sort(key=lambda item: rank.get(group_of(item.nodeid), len(rank)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class GroupScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return GroupScheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    try:
        yield
    finally:
        if nextitem is None or group_of(nextitem.nodeid) != group_of(item.nodeid):
            end(group_of(item.nodeid))


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's MOONCACHE_* variables must not decide whether tests pass."""
    for name in list(os.environ):
        if name.startswith("MOONCACHE_") and not name.startswith(("MOONCACHE_TEST_", "MOONCACHE_BUILD_")):
            monkeypatch.delenv(name)
