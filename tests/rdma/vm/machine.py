"""Runs one command in a fresh machine that has RDMA devices, and says how it ended.

The guest is Debian's stock kernel under qemu's own translator: no KVM, no root, no disk. It sees this
machine's /usr and the given folders read-only at their own paths, and one scratch folder at /share.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from tests.rdma.vm import image, interpreter

DIED, TIMED_OUT = 200, 124
# Enough for x86-64-v2 programs and for checksums by carry-less multiplication, and half as much work for the
# translator as the richest model.
CPU = "Westmere"


@dataclass(frozen=True)
class Ended:
    code: int  # of the command; DIED or TIMED_OUT when it never got to say
    output: str

    @property
    def ok(self) -> bool:
        return self.code == 0


@dataclass
class Machine:
    """`net`: "none", "dummy" (one device rxe0) or "wire" (rxaN and rxbN joined by a cable, `rails` times)."""

    net: str = "dummy"
    rails: int = 1
    loss_percent: float = 0.0
    memory_mib: int = 1024
    cpus: int = 2
    folders: list[Path] = field(default_factory=list)  # shown read-only at the same path
    share: Path | None = None
    python: bool = False  # this package is there, for interpreter.COMMAND

    def run(self, command: str, timeout_s: float = 90) -> Ended:
        """Boots, runs `command` with bash in /share, powers off."""
        with tempfile.TemporaryDirectory(prefix="vm-") as scratch:
            share = self.share or Path(scratch)
            (share / ".vm").mkdir(exist_ok=True)
            (share / ".vm" / "folders").write_text("".join(f"{path}\n" for path in self.folders))
            (share / ".vm" / "command").write_text(command + "\n")
            log = Path(scratch) / "log"
            with log.open("wb") as out:
                process = subprocess.Popen(
                    self._command(share, Path(scratch)),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                )
                try:
                    status = process.wait(timeout_s)
                    # The debug-exit device makes it odd. Even: a panic, a reboot or a signal.
                    code = (status - 1) // 2 if status > 0 and status % 2 == 1 else DIED
                except subprocess.TimeoutExpired:
                    code = TIMED_OUT
                finally:
                    process.kill()
                    process.wait()
            return Ended(code, log.read_text(errors="replace").replace("\r\n", "\n"))

    def _first_files(self, files: Path, scratch: Path) -> Path:
        if not self.python:
            return files / "initrd"
        both = scratch / "initrd"  # the kernel unpacks archives that follow each other
        both.write_bytes((files / "initrd").read_bytes() + interpreter.make().read_bytes())
        return both

    def _command(self, share: Path, scratch: Path) -> list[str]:
        files = image.make()
        command = [image.require_qemu(), "-M", "q35", "-accel", "tcg,thread=multi", "-cpu", CPU]
        command += ["-smp", str(self.cpus), "-m", f"{self.memory_mib}M"]
        command += ["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-serial", "stdio"]
        command += ["-device", "isa-debug-exit,iobase=0x501,iosize=1"]
        command += ["-kernel", str(files / "vmlinux"), "-initrd", str(self._first_files(files, scratch))]
        command += ["-append", self._kernel_arguments()]
        shown = [("/usr", "usr", True), (str(files / "verbs"), "verbs", True), (str(share), "share", False)]
        shown += [(str(path), f"ro{number}", True) for number, path in enumerate(self.folders)]
        for path, tag, read_only in shown:
            about = f"local,path={path},mount_tag={tag},security_model=none,multidevs=remap"
            command += ["-virtfs", about + (",readonly=on" if read_only else "")]
        return command

    def _kernel_arguments(self) -> str:
        words = ["console=ttyS0", "quiet", "panic=-1", "reboot=t", "mitigations=off", "cryptomgr.notests"]
        words += ["apparmor=0", "rcupdate.rcu_expedited=1", "net.ifnames=0", "no_timer_check", "tsc=reliable"]
        # On a loaded machine the guest measures its clock several times too slow, and timers fire too early.
        if (speed := re.search(r"cpu MHz\s*: ([\d.]+)", Path("/proc/cpuinfo").read_text())) is not None:
            words.append(f"tsc_early_khz={int(float(speed[1]) * 1000)}")
        words += [f"vm.net={self.net}", f"vm.rails={self.rails}", f"vm.loss={self.loss_percent:g}"]
        return " ".join(words)
