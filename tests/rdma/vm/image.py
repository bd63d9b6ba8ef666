"""Makes the files that the virtual machine boots from, once, out of Debian packages.

Packages are unpacked into a cache folder, never installed: the guest's /usr is this machine's /usr with the
RDMA user space laid over it. What cannot be had is said in one sentence, which becomes the reason of a skip.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
from pathlib import Path

from tests.rdma.vm.cpio import Archive
from tests.rdma.vm.kernel import load_order, module_name, read_module, unpack_image

HERE = Path(__file__).resolve().parent
CACHE = HERE.parents[2] / "build" / "vm"
STAMP = "made-2"  # raise the number when what is made here changes

USER_SPACE = [
    *("busybox-static", "iproute2", "libibverbs1", "ibverbs-providers", "librdmacm1", "ibverbs-utils"),
    *(
        "rdmacm-utils",
        "perftest",
        "libibumad3",
        "libpci3",
        "python3-pyverbs",
        "libnl-3-200",
        "libnl-route-3-200",
    ),
    *("python3.11-minimal", "libpython3.11-minimal", "libpython3.11-stdlib"),  # what pyverbs is built for
]
# crc32_generic: rxe asks the kernel's crypto interface for it by name, so no dependency line names it.
MODULES = [
    *("virtio_pci", "9pnet_virtio", "9p", "overlay", "veth", "dummy", "sch_netem", "crc32_generic"),
    *("crc32c_generic", "libcrc32c", "ib_uverbs", "rdma_ucm", "iw_cm", "rdma_rxe"),
]
WANTED_OF_KERNEL = [
    *(
        "./boot/vmlinuz*",
        "*/infiniband/core/*",
        "*/infiniband/sw/*",
        "*/drivers/net/*.ko*",
        "*/drivers/virtio/*",
    ),
    *("*/net/9p/*", "*/fs/9p/*", "*/fs/netfs/*", "*/fs/fscache/*", "*/fs/overlayfs/*", "*/net/core/*"),
    *(
        "*/net/ipv[46]/*udp_tunnel*",
        "*/net/sched/*",
        "*/kernel/crypto/*",
        "*/kernel/lib/*",
        "*/fs/configfs/*",
    ),
]
ETC = {
    "passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    "group": "root:x:0:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost\n",
    "nsswitch.conf": "hosts: files\n",
    "libibverbs.d/rxe.driver": "driver rxe\n",
}


class UnavailableError(Exception):
    """The machine cannot be made here; the text says why."""


def _run(*command: str, cwd: Path | None = None, timeout_s: float = 600) -> str:
    try:
        done = subprocess.run(
            command, cwd=cwd, timeout=timeout_s, capture_output=True, text=True, check=True, errors="replace"
        )
    except FileNotFoundError:
        raise UnavailableError(f"{command[0]} was not found") from None
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"{command[0]} {command[1]} took longer than {timeout_s:.0f} s") from None
    except subprocess.CalledProcessError as error:
        last = (error.stderr or error.stdout).strip().splitlines()[-1:]
        raise UnavailableError(f"{' '.join(command[:2])} failed: {' '.join(last)}") from None
    return done.stdout


def require_qemu() -> str:
    """Path of the emulator. Installs its Debian package when that is possible, else UnavailableError."""
    name, package = "qemu-system-x86_64", "qemu-system-x86"
    if (found := shutil.which(name)) is not None:
        return found
    if os.geteuid() != 0:
        raise UnavailableError(
            f"{name} (Debian package {package}) is not installed, and only root can install it"
        )
    install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=300"]
    _run("apt-get", "update", "-qq")
    _run(*install, package)
    if (found := shutil.which(name)) is None:
        raise UnavailableError(f"the package {package} brought no {name}")
    return found


def _download(folder: Path) -> str:
    """Fetches kernel and user space; the name of the kernel's package."""
    depends = _run("apt-cache", "depends", "linux-image-amd64")
    kernel = re.search(r"Depends: (linux-image-\S+)", depends)
    if kernel is None:
        _run("apt-get", "update", "-qq")
        kernel = re.search(r"Depends: (linux-image-\S+)", _run("apt-cache", "depends", "linux-image-amd64"))
    if kernel is None:
        raise UnavailableError("apt knows no package linux-image-amd64")
    folder.mkdir(parents=True, exist_ok=True)
    _run("apt-get", "download", "-q", kernel[1], *USER_SPACE, cwd=folder, timeout_s=900)
    return kernel[1]


def _package(folder: Path, name: str) -> Path:
    return max(folder.glob(f"{name}_*.deb"), key=lambda path: path.stat().st_mtime)


def _unpack_kernel(package: Path, into: Path) -> None:
    into.mkdir(parents=True)
    tar = into / "kernel.tar"
    with tar.open("wb") as out:
        subprocess.run(["dpkg", "--fsys-tarfile", str(package)], stdout=out, check=True)
    _run("tar", "-xf", str(tar), "-C", str(into), "--wildcards", *WANTED_OF_KERNEL)
    tar.unlink()


def _unpack_user_space(debs: Path, into: Path) -> None:
    into.mkdir(parents=True)
    for name in USER_SPACE:
        _run("dpkg", "-x", str(_package(debs, name)), str(into))
    for name in ("bin", "sbin", "lib"):  # as on a merged system, or the overlay of /usr would miss them
        if (into / name).is_dir():
            shutil.copytree(into / name, into / "usr" / name, dirs_exist_ok=True, symlinks=True)
            shutil.rmtree(into / name)
    shutil.rmtree(into / "usr" / "share", ignore_errors=True)


def _initial_files(kernel: Path, verbs: Path) -> bytes:
    archive = Archive()
    for folder in (
        "dev",
        "proc",
        "sys",
        "tmp",
        "run",
        "mnt",
        "etc",
        "root",
        "var",
        "share",
        "host/usr",
        "verbs",
        "usr",
    ):
        archive.folder(folder)
    for name in ("bin", "sbin", "lib", "lib64"):
        archive.link(name, f"usr/{name}")
    archive.file("bb/busybox", (verbs / "usr" / "bin" / "busybox").read_bytes(), 0o755)
    modules = load_order(kernel / "lib" / "modules", MODULES)
    for path in modules:
        archive.file(f"modules/{module_name(path)}.ko", read_module(path))
    archive.file("modules/order", "".join(f"{module_name(path)}.ko\n" for path in modules).encode())
    for name, text in ETC.items():
        archive.file(f"etc/{name}", text.encode())
    archive.file("init", (HERE / "init.sh").read_bytes(), 0o755)
    return archive.finish()


def make(cache: Path = CACHE) -> Path:
    """The folder with `vmlinux`, `initrd` and `verbs/`; makes it when it is not there. One process at a time."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (cache / STAMP).exists():
            for name in ("kernel", "verbs", "vmlinux", STAMP):
                path = cache / name
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
            package = _download(cache / "debs")
            _unpack_kernel(_package(cache / "debs", package), cache / "kernel")
            _unpack_user_space(cache / "debs", cache / "verbs")
            image = next((cache / "kernel" / "boot").glob("vmlinuz-*"))
            (cache / "vmlinux").write_bytes(unpack_image(image.read_bytes()))
            shutil.rmtree(cache / "debs")
            (cache / STAMP).touch()
        # cheap, and what it says may have changed
        initrd = _initial_files(cache / "kernel", cache / "verbs")
        temporary = cache / f"initrd.{os.getpid()}"
        temporary.write_bytes(initrd)
        temporary.replace(cache / "initrd")
    return cache
