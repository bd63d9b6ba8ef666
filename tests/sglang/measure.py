"""How fast pages move through real host pools, as a ratio to a plain copy of the same bytes in the same run.

    python -m tests.sglang.measure [layout] [pages] [rounds]

Pages are those of a model with 32 layers and 8 KV heads of 128 (bfloat16), 64 tokens each: 8 MiB. Each round copies all
pages within memory, stores them under new names, and reads them into another host pool; the bytes are compared in the
end. On a machine with other work the ratio of processor times (of this process, all threads) says more.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.sglang.package import need_sglang

need_sglang()

import torch  # noqa: E402

from mooncache import tiny_model  # noqa: E402
from tests.client.conftest import make_cluster  # noqa: E402
from tests.sglang import pools  # noqa: E402

GB = 1e9
LAYERS, HEADS, HEAD_DIM, PAGE = 32, 8, 128, 64


def seconds(action: Callable[..., object], *args: object) -> tuple[float, float]:
    """How long it took, and the processor time of all threads of this process."""
    begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
    action(*args)
    return time.perf_counter() - begun_s, time.process_time() - begun_cpu_s


def main(layout: str = "page_first", pages: int = 32, rounds: int = 7) -> None:
    pools.LAYERS, pools.HEAD_DIM, pools.TOKENS = LAYERS, HEAD_DIM, PAGE * pages
    shape = {"heads": HEADS, "page": PAGE, "dtype": torch.bfloat16}
    ours, theirs = (pools.mha_pool(layout, **shape) for _ in range(2))
    copy = torch.empty_like(ours.kv_buffer).fill_(1)
    size = ours.kv_buffer.nbytes
    indices = pools.indices(list(range(pages)), PAGE)
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model.build(Path(folder) / "tiny", layers=3)
        with make_cluster(Path(folder) / "pool", nodes=1, capacity_bytes=4 * size) as cluster:
            extra = {"mooncache.state_dir": str(cluster.state_dir), "mooncache.model_path": str(model)}
            writer, reader = (pools.load_backend(pool, extra) for pool in (ours, theirs))
            times: dict[str, list[tuple[float, float]]] = {"memcpy": [], "set": [], "get": []}
            for number in range(rounds + 4):  # the first ones touch all memory of the node
                keys = pools.hashes(pools.prompt(pages, f"round {number}", PAGE), PAGE)
                taken = {
                    "memcpy": seconds(copy.copy_, ours.kv_buffer),
                    "set": seconds(writer.batch_set_v1, keys, indices),
                    "get": seconds(reader.batch_get_v1, keys, indices),
                }
                assert reader.batch_exists(keys) == pages
                if number >= 4:
                    for name, value in taken.items():
                        times[name].append(value)
            assert theirs.kv_buffer.view(torch.uint8).equal(ours.kv_buffer.view(torch.uint8))
            for backend in (writer, reader):
                backend.close()
    print(
        f"{layout}: {pages} pages of {size // pages >> 20} MiB, {rounds} rounds, one thread; GB/s, and of memcpy"
    )
    for what, judge in (("median", statistics.median), ("best", min)):
        for clock, kind in enumerate(("time", "processor time")):
            rates = {name: size / GB / judge([one[clock] for one in found]) for name, found in times.items()}
            words = (f"{name} {rate:.2f} ({rate / rates['memcpy']:.2f})" for name, rate in rates.items())
            print(f"  {what} {kind}: {', '.join(words)}")


if __name__ == "__main__":
    layout, *numbers = sys.argv[1:] or ["page_first"]
    main(layout, *map(int, numbers))
