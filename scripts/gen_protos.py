"""Turns protos/*/*.proto into services/proto/*/*_pb2.py(i) and keeps protos/v1/numbers.lock.

The generated modules are committed, so that installing needs no compiler; `--check` makes them again
elsewhere and fails when the committed files differ. No service stubs are generated: both channels dispatch by
method name.

numbers.lock has one line for every field, enum value and call (number 0) that ever existed. A number may leave the
proto (then it has to be `reserved`), but it may never come back with another meaning; tests/proto reads the
lock and says so.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from google.protobuf import descriptor_pb2

ROOT = Path(__file__).resolve().parent.parent
PROTO_DIR = ROOT / "protos" / "v1"
OUT_DIR = ROOT / "services" / "proto"
LOCK = PROTO_DIR / "numbers.lock"
PREFIX = "mooncache/proto"
OWN_PACKAGE = "mooncache.v1"  # the lock guards our own numbers; etcd's are etcd's
INIT_TEXT = {
    "__init__.py": '"""Generated protobuf modules; see scripts/gen_protos.py."""\n',
    "envoy/__init__.py": '"""Messages of Envoy that the endpoint picker uses, generated from protos/envoy."""\n',
    "etcd/__init__.py": '"""Messages of etcd that the coordination uses, generated from protos/etcd."""\n',
    "keda/__init__.py": '"""Messages of KEDA that the conductor uses, generated from protos/keda."""\n',
    "v1/__init__.py": '"""Messages of mooncache.v1, generated from protos/v1."""\n',
}


def compile_protos(target: Path) -> descriptor_pb2.FileDescriptorSet:
    """Generate modules under target/mooncache/proto and return the descriptors, comments included.

    The compiler runs in a process of its own: grpc_tools brings its own protobuf and dies where another
    library of this process (NIXL's, for one) has loaded a different version of it.
    """
    names = [
        f"{PREFIX}/{path.relative_to(ROOT / 'protos')}" for path in sorted((ROOT / "protos").rglob("*.proto"))
    ]
    descriptor_file = target / "descriptors.bin"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PREFIX}={ROOT / 'protos'}"]
    command += [f"--python_out={target}", f"--pyi_out={target}", f"--descriptor_set_out={descriptor_file}"]
    command += ["--include_source_info", *names]
    if subprocess.run(command, check=False).returncode != 0:
        raise SystemExit("protoc refused the files under protos/v1; its message is above")
    return descriptor_pb2.FileDescriptorSet.FromString(descriptor_file.read_bytes())


def number_lines(descriptors: descriptor_pb2.FileDescriptorSet) -> list[str]:
    """One line 'Owner number name type' for every field, enum value and call, in the files' order."""
    lines: list[str] = []

    def add_message(message: descriptor_pb2.DescriptorProto, prefix: str) -> None:
        owner = prefix + message.name
        for field in message.field:
            kind = descriptor_pb2.FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
            repeated = field.label == descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED
            type_name = field.type_name.rsplit(".", 1)[-1] or kind
            lines.append(f"{owner} {field.number} {field.name} {'repeated ' if repeated else ''}{type_name}")
        for nested in message.nested_type:
            add_message(nested, owner + ".")
        for enum in message.enum_type:
            add_enum(enum, owner + ".")

    def add_enum(enum: descriptor_pb2.EnumDescriptorProto, prefix: str) -> None:
        lines.extend(f"{prefix}{enum.name} {value.number} {value.name} value" for value in enum.value)

    for file in descriptors.file:
        if file.package != OWN_PACKAGE:
            continue
        for message in file.message_type:
            add_message(message, "")
        for enum in file.enum_type:
            add_enum(enum, "")
        for service in file.service:
            for method in service.method:
                request, response = (
                    name.rsplit(".", 1)[-1] for name in (method.input_type, method.output_type)
                )
                lines.append(f"{service.name}.{method.name} 0 {request} {response}")
    return lines


def merged_lock(descriptors: descriptor_pb2.FileDescriptorSet, known_text: str) -> str:
    """The lock with new numbers added; lines never leave it. Raises SystemExit when a number changed its meaning."""
    known = {
        tuple(line.split(" ", 2)[:2]): line for line in known_text.splitlines() if line and line[0] != "#"
    }
    for line in number_lines(descriptors):
        owner_number = tuple(line.split(" ", 2)[:2])
        if known.setdefault(owner_number, line) != line:
            raise SystemExit(
                f"a number got a new meaning: was '{known[owner_number]}', is '{line}'; use a new number"
            )
    ordered = sorted(known.values(), key=lambda line: (line.split(" ")[0], int(line.split(" ")[1])))
    return (
        "# owner number name type; written by scripts/gen_protos.py; lines are never taken out\n"
        + "\n".join(ordered)
        + "\n"
    )


def generated_files(target: Path) -> dict[str, bytes]:
    """Every generated file by its path below services/proto."""
    base = target / PREFIX
    files = {str(path.relative_to(base)): path.read_bytes() for path in base.rglob("*_pb2.py*")}
    return files | {name: text.encode() for name, text in INIT_TEXT.items()}


def check(files: dict[str, bytes], lock_text: str) -> list[str]:
    """Paths of committed files that differ from what the protos say."""
    stale = [name for name, data in files.items() if not _same(OUT_DIR / name, data)]
    stale += [
        str(path.relative_to(OUT_DIR))
        for path in OUT_DIR.rglob("*.py*")
        if path.suffix in (".py", ".pyi") and str(path.relative_to(OUT_DIR)) not in files
    ]
    if not _same(LOCK, lock_text.encode()):
        stale.append(str(LOCK.relative_to(ROOT)))
    return sorted(stale)


def _same(path: Path, data: bytes) -> bool:
    return path.is_file() and path.read_bytes() == data


def main() -> int:
    """Generate, or with --check compare; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="change nothing; fail when committed files are stale"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        descriptors = compile_protos(Path(folder))
        files = generated_files(Path(folder))
        lock_text = merged_lock(descriptors, LOCK.read_text() if LOCK.is_file() else "")
        if options.check:
            stale = check(files, lock_text)
            for name in stale:
                print(f"stale: {name}; run python scripts/gen_protos.py", file=sys.stderr)
            return 1 if stale else 0
        shutil.rmtree(OUT_DIR, ignore_errors=True)
        for name, data in files.items():
            path = OUT_DIR / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        LOCK.write_text(lock_text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
