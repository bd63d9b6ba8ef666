"""Fixtures for tests on real verbs: they skip, with the reason, where the machine cannot be made."""

from __future__ import annotations

import platform
from collections.abc import Callable

import pytest

from tests.rdma.vm import image
from tests.rdma.vm.machine import Machine


@pytest.fixture(scope="session")
def vm() -> Callable[..., Machine]:
    """Makes machines: `vm(net="wire", rails=2)`."""
    if platform.machine() != "x86_64":
        pytest.skip(f"the RDMA test machine is x86-64, this is {platform.machine()}")
    try:
        image.require_qemu()
        image.make()
    except image.UnavailableError as why:
        pytest.skip(f"no RDMA test machine here: {why}")
    return Machine
