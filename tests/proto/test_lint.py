"""House rules of the protos: names, a comment on everything, numbers that never change their meaning."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from google.protobuf import descriptor_pb2

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "gen_protos.py"
Files = descriptor_pb2.FileDescriptorSet


def needs_compiler() -> None:
    # Looked for, not imported: it may not live in one process with NIXL, which other tests load.
    if importlib.util.find_spec("grpc_tools") is None:
        pytest.skip("grpcio-tools is not installed")


def generator() -> ModuleType:
    needs_compiler()
    spec = importlib.util.spec_from_file_location("gen_protos", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def descriptors(tmp_path_factory: pytest.TempPathFactory) -> Files:
    made: Files = generator().compile_protos(tmp_path_factory.mktemp("protos"))
    return made


def own(descriptors: Files) -> list[descriptor_pb2.FileDescriptorProto]:
    return [file for file in descriptors.file if file.package == "mooncache.v1"]


def test_generated_code_is_up_to_date() -> None:
    needs_compiler()
    done = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_everything_has_a_comment(descriptors: Files) -> None:
    bare = []
    for file in descriptors.file:
        commented = {
            tuple(place.path) for place in file.source_code_info.location if place.leading_comments.strip()
        }
        expected: dict[tuple[int, ...], str] = {}

        def message(owner: descriptor_pb2.DescriptorProto, path: tuple[int, ...], expected=expected) -> None:  # type: ignore[no-untyped-def]
            if owner.options.map_entry:
                return
            expected[path] = owner.name
            expected.update({(*path, 2, i): f"{owner.name}.{f.name}" for i, f in enumerate(owner.field)})
            for i, nested in enumerate(owner.nested_type):
                message(nested, (*path, 3, i))
            for i, enum in enumerate(owner.enum_type):
                values(enum, (*path, 4, i))

        def values(
            enum: descriptor_pb2.EnumDescriptorProto, path: tuple[int, ...], expected=expected
        ) -> None:  # type: ignore[no-untyped-def]
            expected[path] = enum.name
            expected.update({(*path, 2, i): f"{enum.name}.{v.name}" for i, v in enumerate(enum.value)})

        for i, item in enumerate(file.message_type):
            message(item, (4, i))
        for i, enum in enumerate(file.enum_type):
            values(enum, (5, i))
        for i, service in enumerate(file.service):
            expected[6, i] = service.name
            expected.update({(6, i, 2, j): f"{service.name}.{m.name}" for j, m in enumerate(service.method)})
        bare += [f"{file.name}: {name}" for path, name in expected.items() if path not in commented]
    assert not bare, bare


def test_names(descriptors: Files) -> None:
    wrong = []
    for file in own(descriptors):
        for message in file.message_type:
            if not re.fullmatch(r"(?:[A-Z][a-z0-9]*)+", message.name):
                wrong.append(message.name)
            for field in message.field:
                if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", field.name):
                    wrong.append(f"{message.name}.{field.name}")
                if field.name != "page_size" and re.search(
                    r"(^|_)(size|length|timeout|interval|duration|ttl|age|uptime|lease|memory)$", field.name
                ):
                    wrong.append(f"{message.name}.{field.name} has no unit")
        for enum in file.enum_type:
            prefix = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", enum.name).upper() + "_"
            if enum.value[0].name != prefix + "UNSPECIFIED" or enum.value[0].number != 0:
                wrong.append(f"{enum.name}: zero has to be {prefix}UNSPECIFIED")
            wrong += [value.name for value in enum.value if not value.name.startswith(prefix)]
        for service in file.service:
            for method in service.method:
                request, response = method.input_type.split(".")[-1], method.output_type.split(".")[-1]
                if not (
                    request.endswith(f"{method.name}Request") and response.endswith(f"{method.name}Response")
                ):
                    wrong.append(f"{service.name}.{method.name}: {request}, {response}")
                if method.client_streaming or method.server_streaming:
                    wrong.append(
                        f"{service.name}.{method.name} is a stream; in-memory channels carry unary calls"
                    )
    assert not wrong, wrong


def test_every_rpc_has_messages_of_its_own(descriptors: Files) -> None:
    used = [
        name
        for file in own(descriptors)
        for service in file.service
        for method in service.method
        for name in (method.input_type, method.output_type)
    ]
    assert len(used) == len(set(used))


def test_numbers_that_left_are_reserved(descriptors: Files) -> None:
    """Every number of the lock is in use with the same meaning or reserved (checked by merged_lock as well)."""
    made = generator()
    known = {line.split(" ", 2)[0]: set() for line in made.LOCK.read_text().splitlines() if line[0] != "#"}
    for line in made.LOCK.read_text().splitlines():
        if line[0] != "#":
            known[line.split(" ")[0]].add(int(line.split(" ")[1]))
    alive = {name: set() for name in known}
    for line in made.number_lines(descriptors):
        alive[line.split(" ")[0]].add(int(line.split(" ")[1]))
    reserved: dict[str, set[int]] = {}
    for file in own(descriptors):
        for message in file.message_type:
            reserved[message.name] = {n for r in message.reserved_range for n in range(r.start, r.end)}
        for enum in file.enum_type:
            reserved[enum.name] = {n for r in enum.reserved_range for n in range(r.start, r.end + 1)}
    missing = {name: known[name] - alive[name] - reserved.get(name, set()) for name in known}
    assert not {name: numbers for name, numbers in missing.items() if numbers}


def test_a_number_with_a_new_meaning_is_refused(descriptors: Files) -> None:
    made = generator()
    with pytest.raises(SystemExit, match="new meaning"):
        made.merged_lock(descriptors, "ClusterMap 1 something_else uint64\n")
    with pytest.raises(SystemExit, match="new meaning"):
        made.merged_lock(descriptors, "ConductorService.Schedule 0 OtherRequest ScheduleResponse\n")


def test_the_lock_remembers_every_call(descriptors: Files) -> None:
    """One that left stays there, where test_numbers_that_left_are_reserved finds it."""
    made = generator()
    lock = made.merged_lock(descriptors, "ConductorService.Gone 0 GoneRequest GoneResponse\n").splitlines()
    calls = {
        f"{service.name}.{m.name}"
        for file in own(descriptors)
        for service in file.service
        for m in service.method
    }
    assert {line.split()[0] for line in lock if " 0 " in line and "Request " in line} == calls | {
        "ConductorService.Gone"
    }
