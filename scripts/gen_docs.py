"""Writes the reference pages that can be read off the code, so that they cannot drift from it.

usage: gen_docs.py [--check]    docs/reference-{errors,configuration,events,grpc}.md
"""

from __future__ import annotations

import re
import sys
import tempfile
import textwrap
from pathlib import Path

from gen_protos import OWN_PACKAGE, compile_protos
from google.protobuf import descriptor_pb2

from mooncache import config, errors
from mooncache.conductor.ops.table import ADMIN_ONLY as CONDUCTOR_ADMIN
from mooncache.config import schema
from mooncache.master.ops.table import ADMIN_ONLY as MASTER_ADMIN
from mooncache.runtime import logs

DOCS = Path(__file__).parent.parent / "docs"
MADE = "<!-- Made by scripts/gen_docs.py. Change the code, then run `make docs`. -->"
GROUPS = {
    1: "The caller",
    2: "Lookup",
    3: "Capacity",
    4: "Connections",
    5: "Security and protocol",
    6: "Cluster",
}


def cell(text: object) -> str:
    return " ".join(str(text).split()).replace("|", "\\|") or "(empty)"


def table(head: tuple[str, ...], rows: list[tuple[object, ...]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return lines + ["| " + " | ".join(cell(value) for value in row) + " |" for row in rows]


def wrapped(words: list[str]) -> list[str]:
    """Words as a paragraph."""
    return textwrap.wrap(", ".join(words) + ".", 120, break_on_hyphens=False)


def errors_page() -> str:
    lines = ["# Errors", MADE, ""]
    lines += [
        "Every error has a stable number, the same in Python, in C++, on the data plane and in gRPC's trailing",
        "metadata (`mooncache-code`). Branch on the number or the class, never on the text.",
        "",
    ]
    catalogue = sorted(errors.catalogue(), key=lambda kind: kind.code)
    last = None
    for kind in catalogue:
        group = GROUPS.get(kind.code // 100, "Everything else")
        if group != last:
            members = [k for k in catalogue if GROUPS.get(k.code // 100, "Everything else") == group]
            rows = [
                (k.code, f"`{k.name}`", f"`{k.__name__}`", "yes" if k.retryable else "no", k.hint)
                for k in members
            ]
            lines += [f"## {group}", "", *table(("code", "name", "class", "retry", "what to do"), rows), ""]
            last = group
    return "\n".join(lines).rstrip() + "\n"


def configuration_page() -> str:
    lines = ["# Configuration", MADE, ""]
    lines += [
        "One schema for all services. A setting is `section.name` in a TOML file (`--config`, `MOONCACHE_CONFIG`) and",
        "`MOONCACHE_<SECTION>_<NAME>` in the environment; the environment wins. Sizes take `8GiB`, durations `250ms`.",
        "An unknown name is an error that names the nearest right one. `mooncache config explain` prints every value",
        "and where it came from; `mooncache config explain --toml` prints a file to start from.",
        "",
    ]
    rows = config.explain(config.load(env={}))
    wanted = [f"`{row.name}`" for row in rows if row.audience is config.Audience.COMMON]
    lines += [
        "Most clusters set some of these; all others have defaults that suit nearly all clusters:",
        "",
        *wrapped(wanted),
        "",
    ]
    for section, field in schema.Config.model_fields.items():
        mine = [row for row in rows if row.name.startswith(section + ".")]
        body = [(f"`{row.name.split('.', 1)[1]}`", f"`{cell(row.default)}`", row.help) for row in mine]
        lines += [
            f"## {section}",
            "",
            cell(field.description),
            "",
            *table(("name", "default", "meaning"), body),
            "",
        ]
    return "\n".join(lines).rstrip() + "\n"


def events_page() -> str:
    lines = ["# Log events", MADE, ""]
    lines += [
        "Services log one JSON object per line on stderr. `event` is one of these codes; it keeps its meaning over",
        "versions, so alerts may be built on it.",
        "",
    ]
    # the meaning of an event is the comment beside it
    source = Path(logs.__file__).read_text(encoding="utf-8")
    found = re.findall(r'^    [A-Z_]+ = "([a-z_.]+)"  # (?:noqa: \S+\s+)?(.+)$', source, re.MULTILINE)
    if len(found) != len(logs.Event):
        raise SystemExit("an event in services/runtime/logs.py has no comment that says when it is written")
    lines += table(("event", "when"), [(f"`{value}`", meaning) for value, meaning in found])
    return "\n".join(lines) + "\n"


def comment_at(file: descriptor_pb2.FileDescriptorProto, *path: int) -> str:
    """The comment above the thing at `path` of a file, on one line."""
    found = (place for place in file.source_code_info.location if tuple(place.path) == path)
    return " ".join(next(found).leading_comments.split())


def item(text: str) -> list[str]:
    """An entry of a list, over as many lines as it needs."""
    return textwrap.wrap(text, 120, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)


def tenants_may(service: str, method: str) -> bool:
    """Whether a tenant's token is enough; store nodes and workers take the cluster token only."""
    admin = {"MasterService": MASTER_ADMIN, "ConductorService": CONDUCTOR_ADMIN}.get(service)
    return admin is not None and method not in admin


def grpc_page() -> str:
    lines = ["# gRPC services", MADE, ""]
    lines += [
        "Every call of the control ports. How to call them from any language: [grpc.md](grpc.md). The fields of each",
        "message are described in the `.proto` file that stands above each list. A call needs the cluster's control",
        "key; one that a tenant may make, too, is marked with *tenants*.",
        "",
    ]
    with tempfile.TemporaryDirectory() as folder:
        files = compile_protos(Path(folder)).file
    for file in files:
        for number, service in enumerate(file.service if file.package == OWN_PACKAGE else ()):
            source = file.name.removeprefix("mooncache/proto/")
            lines += [f"## {file.package}.{service.name}", ""]
            text = f"{comment_at(file, 6, number)} Messages: [{source}](../protos/{source})."
            lines += [*textwrap.wrap(text, 120, break_on_hyphens=False), ""]
            for place, method in enumerate(service.method):
                names = [name.rsplit(".", 1)[-1] for name in (method.input_type, method.output_type)]
                mark = " *tenants*" if tenants_may(service.name, method.name) else ""
                text = comment_at(file, 6, number, 2, place)
                lines += item(f"**{method.name}**(`{names[0]}`) returns `{names[1]}`{mark}: {text}")
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


PAGES = {
    "reference-errors.md": errors_page,
    "reference-configuration.md": configuration_page,
    "reference-events.md": events_page,
    "reference-grpc.md": grpc_page,
}


def main() -> int:
    check = "--check" in sys.argv[1:]
    stale = []
    for name, make in PAGES.items():
        path, text = DOCS / name, make()
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if not check:
                path.write_text(text, encoding="utf-8")
    if check and stale:
        print(f"docs are behind the code: {', '.join(stale)}; run `make docs`")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
