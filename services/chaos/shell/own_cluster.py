"""A cluster of the run's own in a temporary folder, supervised as `mooncache up` does it, and gone afterwards."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
from mooncache.cluster.settings import choose_engine
from mooncache.cluster.supervisor import PartNews

_CAPACITY_BYTES: Final = 64 << 20
_STOP_S: Final = 30.0


@contextmanager
def own_cluster(
    progress: Callable[[str], None], extra_env: Mapping[str, str] | None = None
) -> Iterator[Path]:
    """Its state folder: two prefill engines would share two processors with everything else, so there is one of them,
    and two decode engines, of which one may go.

    Args:
        progress: hears what is being started.
        extra_env: further settings of all its processes.

    Raises:
        ConfigInvalid, EngineUnavailable, Internal: it did not start.
    """
    engine, _ = choose_engine("hf")
    with tempfile.TemporaryDirectory(prefix="mooncache-chaos-") as folder:
        settings = ClusterSettings(
            state_dir=Path(folder),
            engine=engine,
            nodes=2,
            capacity_bytes=_CAPACITY_BYTES,
            prefill=1,
            decode=2,
            port=0,
            conductor_port=0,
            gateway_port=0,
            extra_env=(
                ("OMP_NUM_THREADS", "1"),
                # What is to be shown is the hand-over and the pool, not that a small model computes fast.
                ("MOONCACHE_CONDUCTOR_INLINE_TOKENS_MAX", "64"),
                ("MOONCACHE_CONNECTOR_BREAK_EVEN", "false"),
                *(extra_env or {}).items(),
            ),
        )
        cluster = EmbeddedCluster(settings)
        progress("starting a cluster")
        cluster.start(progress=lambda name, news: progress(f"starting a cluster: {name} {news.text}"))
        stop = threading.Event()
        keeper = threading.Thread(
            target=cluster.supervise, args=(_say_nothing, stop.is_set), name="chaos-supervisor", daemon=True
        )
        keeper.start()
        try:
            yield cluster.state_dir
        finally:
            stop.set()
            keeper.join(_STOP_S)
            cluster.stop()


def _say_nothing(_name: str, _news: PartNews) -> None:
    """The run itself says what it breaks."""
