"""What the commands say of the devices, in the test machine: documents of one line each.

All in one process, because importing is what costs time on an emulated processor: `topology`; `doctor rdma` with
devices configured and a port down; the counters of a port.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import time

from mooncache.cli.app import run
from mooncache.topology.counters import trouble_of

DOWN_S = 1.0


def command(*arguments: str) -> None:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        run([*arguments, "--json"])
    print(json.dumps(json.loads(said.getvalue())), flush=True)


def main() -> None:
    command("topology")
    subprocess.run(["/usr/bin/ip", "link", "set", "va1", "down"], check=True)
    time.sleep(DOWN_S)
    os.environ["MOONCACHE_RDMA_DEVICES"] = "rxa0,rxa1"
    command("doctor", "rdma")
    print(json.dumps({"counters": trouble_of("rxa0", 1)}), flush=True)


if __name__ == "__main__":
    main()
