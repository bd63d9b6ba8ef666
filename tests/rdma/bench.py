"""`mooncache bench transfer` in the test machine, beside perftest over the same device: python -m tests.rdma.bench OUT

Writes OUT.json and OUT.md; further arguments go to the benchmark. For a quiet machine: processors and network are
emulated, so only ratios within one run say anything.
"""

from __future__ import annotations

import shlex
import shutil
import sys
import tempfile
from pathlib import Path

from tests.rdma.vm import interpreter
from tests.rdma.vm.machine import Machine

_TIMEOUT_S = 900.0
_SHAPE = ("--transport", "rdma", "--block", "1M", "--batch", "8", "--rounds", "7")


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        print(__doc__)
        return 2
    out, extra = Path(arguments[0]), arguments[1:] or list(_SHAPE)
    with tempfile.TemporaryDirectory(prefix="rdma-bench-") as share:
        machine = Machine(net="dummy", memory_mib=2560, python=True, share=Path(share))
        files = {suffix: Path(share) / f"rows{suffix}" for suffix in (".json", ".md")}
        command = f"{interpreter.COMMAND} -m mooncache.cli bench transfer {shlex.join(extra)}"
        # A console that is none: no spinner.
        command += " --json /share/rows.json --markdown /share/rows.md </dev/null 2>&1 | cat"
        ended = machine.run(command, timeout_s=_TIMEOUT_S)
        print(ended.output)
        if not files[".json"].exists():
            return 1
        for suffix, path in files.items():
            shutil.copyfile(path, out.with_suffix(suffix))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
