"""Fixtures for tests on real verbs: they skip, with the reason, where the machine cannot be made.

With MOONCACHE_TEST_RDMA_MACHINE=required (.ci/run says so where qemu is installed) that reason is a failure.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from typing import NoReturn

import pytest

from tests.rdma.vm import image
from tests.rdma.vm.machine import Machine


def cannot_run(reason: str) -> NoReturn:
    """Skips the test, or fails it where tests on real verbs are required."""
    if os.environ.get("MOONCACHE_TEST_RDMA_MACHINE") == "required":
        pytest.fail(f"tests on real RDMA verbs are required here, but: {reason}", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def vm() -> Callable[..., Machine]:
    """Makes machines: `vm(net="wire", rails=2)`."""
    if platform.machine() != "x86_64":
        cannot_run(f"the RDMA test machine is x86-64, this is {platform.machine()}")
    try:
        image.require_qemu()
        image.make()
    except image.UnavailableError as why:
        cannot_run(f"no RDMA test machine here: {why}")
    return Machine
