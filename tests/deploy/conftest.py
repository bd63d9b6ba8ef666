"""What the tests of containers share: images, built once for all of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.deploy.running import Built, project_of
from tests.deploy.support import (
    DockerMissingError,
    base_image,
    compose_words,
    context,
    need_packages,
    wheelhouse,
)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A copy of the working tree with its images. Skips where no Docker engine runs containers."""
    try:
        compose_words()
        base = base_image()
        need_packages(base)
    except DockerMissingError as error:
        pytest.skip(f"no Docker engine to run containers with: {error}")
    ready = bool(
        os.environ.get("MOONCACHE_TEST_IMAGE_READY")
    )  # set: images of an earlier run are good enough
    with_wheels = not ready and wheelhouse()
    folder: Path = context(tmp_path_factory.mktemp("context"), with_wheels=with_wheels)
    made = Built(folder, {"BASE_IMAGE": base, "PIP_NO_INDEX": "1" if with_wheels else "0"})
    if not ready:  # one service builds the image for all
        project_of(made, "build").compose("build", "token", "etcd", timeout_s=1800)
    return made
