"""The house rules that no linter knows, checked like any other behaviour.

Each test collects every offender and prints them together. RATCHET lists the few files and functions that
may be longer than their budget: an entry may only shrink, and has to go once the budget is kept.
"""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.native_functions import functions

ROOT = Path(__file__).resolve().parent.parent
SERVICES = ROOT / "services"
NATIVE = ROOT / "native"

FILE_LINES_MAX = 500
NATIVE_FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70
RATCHET: dict[str, int] = {}

# Spelt in halves, so that this file does not offend itself.
BANNED_WORDS = re.compile(r"\b(" + "|".join(("FIX" + "ME", "TO" + "DO", "XX" + "X")) + r")\b")
# Words that make a reader look twice; "no request", "is no longer", "reported" and the like say the same.
# A phrase counts also where a comment's line breaks within it.
UNCLEAR_WORDS = re.compile(
    r"\b(nobody|somebody|everybody|told|senseless|for ever|in vain|any more|pretended)\b".replace(
        " ", r"\s+(?:(?:#|//)\s*)?"
    ),
    re.IGNORECASE,
)
GUEST = (
    "tests/rdma/guest"  # a program of its own in the virtual machine: it reports what came late, and goes on
)
CONSOLE_MODULES = ("cli", "bench", "reporting")
CORE_BANNED = {
    "time": "take now_s as an argument",
    "datetime": "take now_s as an argument",
    "random": "take a seeded random.Random from the caller (import it under TYPE_CHECKING)",
    "secrets": "take the value as an argument",
    "asyncio": "return what has to be done; the shell waits",
    "threading": "a core is called from one thread",
    "socket": "return what has to be sent; the shell sends",
    "grpc": "return what has to be sent; the shell sends",
    "os": "take the value as an argument",
    "subprocess": "return what has to be run; the shell runs it",
}
# Services meet through protos and the client, never by import.
INDEPENDENT = ("master", "store_node", "conductor", "gateway", "worker", "hf_engine", "connectors")
RPC_FOLDERS = {
    "MasterService": "master",
    "StoreNodeService": "store_node",
    "ConductorService": "conductor",
    "WorkerService": "worker",
    "ProcessService": "runtime",
}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def files(folder: str, *suffixes: str) -> tuple[Path, ...]:
    """Source files under a folder, without generated code and build outputs."""
    found = (path for path in sorted((ROOT / folder).rglob("*")) if path.suffix in suffixes)
    generated = SERVICES / "proto"
    return tuple(p for p in found if "__pycache__" not in p.parts and not p.is_relative_to(generated))


def python_files() -> tuple[Path, ...]:
    return (*files("services", ".py"), *files("tests", ".py"), *files("scripts", ".py"), ROOT / "setup.py")


def native_files() -> tuple[Path, ...]:
    return files("native", ".cpp", ".h")


def documents() -> tuple[Path, ...]:
    return (*sorted(ROOT.glob("*.md")), *files("docs", ".md"))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def line_count(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import that runs; those for type checkers only do not count."""
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            skipped.update(inner for statement in node.body for inner in ast.walk(statement))
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def over_budget(sizes: dict[str, int], budget: int) -> list[str]:
    """Offenders beyond their budget or ratchet, and ratchet entries that are no longer true."""
    offenders = []
    for name, lines in sizes.items():
        allowed = RATCHET.get(name, budget)
        if lines > allowed:
            offenders.append(f"{name}: {lines} lines, at most {allowed}")
        elif name in RATCHET and lines < allowed:
            advice = "remove it from RATCHET" if lines <= budget else f"lower its RATCHET entry to {lines}"
            offenders.append(f"{name}: now {lines} lines, {advice}")
    return offenders


def report(offenders: list[str]) -> str:
    return "\n" + "\n".join(sorted(set(offenders)))


def test_files_are_short() -> None:
    offenders = over_budget({relative(path): line_count(path) for path in python_files()}, FILE_LINES_MAX)
    native = {relative(path): line_count(path) for path in native_files()}
    offenders += over_budget(native, NATIVE_FILE_LINES_MAX)
    assert not offenders, report(offenders)


def test_python_functions_are_short() -> None:
    sizes: dict[str, int] = {}
    for path in python_files():
        for node in ast.walk(tree(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                name = f"{relative(path)}:{node.name}"
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                sizes[name] = max(lines, sizes.get(name, 0))
    offenders = over_budget(sizes, FUNCTION_LINES_MAX)
    assert not offenders, report(offenders)


def test_native_functions_are_short() -> None:
    sizes: dict[str, int] = {}
    for path in native_files():
        for function, lines in functions(path.read_text(encoding="utf-8")):
            name = f"{relative(path)}:{function}"
            sizes[name] = max(lines, sizes.get(name, 0))
    assert len(sizes) > 1500, "the scan finds what the native sources have"
    offenders = over_budget(sizes, FUNCTION_LINES_MAX)
    assert not offenders, report(offenders)


NATIVE_EXAMPLE = """
#define LOOP(x) { x {
namespace a {
struct Point { int x = 1'000; std::vector<int> tail{f(1), 2}; };
const Row kRows[] = {
  {f(1), "}"},
};
class Shape : Base<decltype(f(0))> {
 public:
  Shape(int side)
      : side_{side},
        name_{"{"} {
    run([&] { return '{'; });
  }  // }
  ~Shape();
  bool operator==(const Shape&) const { return R"(})" != nullptr; }
};
template <typename T>
auto made(T value) -> std::vector<T> {
  /* { */
  return {value};
}
}  // namespace a
"""


def test_the_scan_of_native_functions_finds_them() -> None:
    found = dict(functions(NATIVE_EXAMPLE))
    assert found == {"Shape": 5, "operator==": 1, "made": 5}


def test_ratchet_names_exist() -> None:
    missing = [name for name in RATCHET if not (ROOT / name.split(":")[0]).exists()]
    assert not missing, report(missing)


def test_no_leftover_words() -> None:
    protos = files("protos", ".proto")
    scripts = (*files("scripts", ".sh"), ROOT / "Makefile", ROOT / "pyproject.toml")
    offenders = [
        f"{relative(path)}:{number}: {line.strip()}"
        for path in (*python_files(), *native_files(), *documents(), *protos, *scripts)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if BANNED_WORDS.search(line)
    ]
    assert not offenders, report(offenders)


def test_no_unclear_words() -> None:
    """In what users and engineers read; decisions of the past and tests keep their words."""
    native = (
        *files("native/src", ".cpp", ".h"),
        *files("native/include", ".h"),
        *files("native/python", ".cpp", ".h"),
    )
    pages = (*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "ARCHITECTURE.md")
    offenders = [
        f"{relative(path)}:{text.count(chr(10), 0, found.start()) + 1}: {' '.join(found[0].split())}"
        for path in (*files("services", ".py", ".pyi"), *native, *files("protos", ".proto"), *pages)
        for text in (path.read_text(encoding="utf-8"),)
        for found in UNCLEAR_WORDS.finditer(text)
    ]
    assert not offenders, report(offenders)


def test_no_tabs_and_no_trailing_space() -> None:
    offenders = [
        f"{relative(path)}:{number}"
        for path in (*python_files(), *native_files(), *files("protos", ".proto"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if "\t" in line or line != line.rstrip()
    ]
    assert not offenders, report(offenders)


def waits(loop: ast.For | ast.While) -> bool:
    """True for a loop that goes on until a deadline, or blocks its thread in sleeps."""
    text = ast.unparse(loop)
    reads_a_pipe = "select.select(" in text
    bounded = isinstance(loop, ast.While) and "monotonic(" in ast.unparse(loop.test) and not reads_a_pipe
    return "time.sleep(" in text or bounded or ("asyncio.sleep(" in text and "monotonic(" in text)


def test_tests_wait_in_one_place() -> None:
    """`two_ranks.py` is a program of its own, outside of the package of tests."""
    offenders = [
        f"{relative(path)}:{node.lineno}: wait with tests/conditions.py"
        for path in files("tests", ".py")
        if path.name not in {"conditions.py", "two_ranks.py"} and not path.is_relative_to(ROOT / GUEST)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.For | ast.While) and waits(node)
    ]
    assert not offenders, report(offenders)


def test_docstrings_tell_something() -> None:
    """A docstring that only points elsewhere costs its reader a second look-up."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    offenders = [
        f"{relative(path)}: {text}"
        for path in files("services", ".py")
        for node in ast.walk(tree(path))
        if isinstance(node, kinds)
        and re.match(r"See [^.]*\.?$|See the module", text := ast.get_docstring(node) or "")
    ]
    assert not offenders, report(offenders)


def test_only_the_console_prints() -> None:
    offenders = []
    for path in files("services", ".py"):
        if path.relative_to(SERVICES).parts[0] in CONSOLE_MODULES:
            continue
        offenders += [
            f"{relative(path)}:{node.lineno}: log an event with a code instead"
            for node in ast.walk(tree(path))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
        ]
    assert not offenders, report(offenders)


def test_cores_are_pure() -> None:
    offenders = []
    for path in files("services", ".py"):
        if "core" not in path.relative_to(SERVICES).parts[:-1]:
            continue
        for line, module in imported(path):
            top = module.split(".")[0]
            if top in CORE_BANNED:
                offenders.append(f"{relative(path)}:{line}: import of {top}: {CORE_BANNED[top]}")
            if module.startswith("mooncache.proto"):
                offenders.append(
                    f"{relative(path)}:{line}: import of a message: messages.py turns it into plain values"
                )
    assert not offenders, report(offenders)


FIRST_LOADERS = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    loaded = [other for other in sys.modules if other == "grpc" or other.startswith("mooncache.proto")]
    if loaded:
        sys.exit(f"{name} loads {loaded}, by itself or by what it imports")
"""


def test_cores_are_pure_with_all_they_import() -> None:
    """In a fresh interpreter no core brings gRPC or a message along, whatever lies between them."""
    cores = [
        ".".join(("mooncache", *path.relative_to(SERVICES).with_suffix("").parts)).removesuffix(".__init__")
        for path in files("services", ".py")
        if "core" in path.relative_to(SERVICES).parts[:-1]
    ]
    assert len(cores) > 100, "the cores were not found"
    command = [sys.executable, "-c", FIRST_LOADERS, *cores]
    child = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert child.returncode == 0, child.stderr


def module_imports() -> dict[str, set[str]]:
    """Module -> the modules of the package that it imports, also inside of functions and for types only."""
    modules = {
        ".".join(path.relative_to(SERVICES).with_suffix("").parts).removesuffix(".__init__"): path
        for path in files("services", ".py")
    }
    graph: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("mooncache"):
                continue
            base = (node.module or "").removeprefix("mooncache").removeprefix(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}".removeprefix(".")
                graph[name].add(inner if inner in modules else base)
        graph[name] &= modules.keys() - {name}
    return graph


def test_modules_import_in_one_direction() -> None:
    graph = module_imports()
    assert sum(map(len, graph.values())) > 1000, "the imports were not found"
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        raise AssertionError("a circle of imports: " + " -> ".join(error.args[1])) from None


def test_services_do_not_import_each_other() -> None:
    offenders = []
    for path in files("services", ".py"):
        owner = path.relative_to(SERVICES).parts[0]
        if owner not in INDEPENDENT:
            continue
        others = tuple(f"mooncache.{name}" for name in (*INDEPENDENT, "cli", "bench") if name != owner)
        offenders += [
            f"{relative(path)}:{line}: imports {module}"
            for line, module in imported(path)
            if any(module == other or module.startswith(f"{other}.") for other in others)
        ]
    assert not offenders, report(offenders)


def test_nothing_unpickles() -> None:
    banned = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
    offenders = [
        f"{relative(path)}:{line}: {module}"
        for path in files("services", ".py")
        for line, module in imported(path)
        if module.split(".")[0] in banned
    ]
    assert not offenders, report(offenders)


def test_folders_with_modules_are_packages() -> None:
    folders = {path.parent for path in SERVICES.rglob("*.py")}
    missing = [relative(folder) for folder in folders if not (folder / "__init__.py").exists()]
    assert not missing, f"the wheel would lack these folders (no __init__.py): {report(missing)}"


def test_modules_say_their_idea() -> None:
    written = [path for path in files("services", ".py") if path.stat().st_size]
    offenders = [relative(path) for path in written if not ast.get_docstring(tree(path))]
    assert not offenders, f"no module docstring: {report(offenders)}"


def test_every_rpc_is_one_file() -> None:
    offenders = []
    for proto in files("protos", ".proto"):
        service = ""
        for line in proto.read_text(encoding="utf-8").splitlines():
            if match := re.match(r"service (\w+)", line):
                service = match[1]
            elif match := re.match(r"\s*rpc (\w+)", line):
                verb_noun = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", match[1]).lower()
                op = SERVICES / RPC_FOLDERS[service] / "ops" / f"{verb_noun}.py"
                if not op.exists():
                    offenders.append(f"{service}.{match[1]}: no {relative(op)}")
    assert not offenders, report(offenders)


def test_documents_have_one_title() -> None:
    offenders = []
    for path in documents():
        prose = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        titles = re.findall(r"^# ", prose, flags=re.MULTILINE)
        if len(titles) != 1:
            offenders.append(f"{relative(path)}: {len(titles)} titles")
    assert not offenders, report(offenders)


def test_links_in_documents_lead_somewhere() -> None:
    offenders = []
    for path in documents():
        for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
            if not re.match(r"[a-z]+:|#", target) and not (path.parent / target.split("#")[0]).exists():
                offenders.append(f"{relative(path)}: {target}")
    assert not offenders, report(offenders)


def native_dependencies() -> dict[str, set[str]]:
    """Component -> components it may include, as the build file declares them."""
    text = (NATIVE / "CMakeLists.txt").read_text(encoding="utf-8")
    declared = re.findall(r"^mooncache_component\((\w+)([\w ]*)\)", text, flags=re.MULTILINE)
    return {name: {name, *rest.split()} for name, rest in declared}


def test_native_components_include_only_what_they_link() -> None:
    allowed = native_dependencies()
    assert {"base", "hash", "store", "wire"} <= set(allowed)
    offenders = []
    for path in files("native/src", ".cpp", ".h"):
        component = path.relative_to(NATIVE / "src").parts[0]
        for target in re.findall(r'#include "(\w+)/', path.read_text(encoding="utf-8")):
            if target in allowed and target not in allowed[component]:
                offenders.append(f"{relative(path)}: includes {target}/, which {component} does not link")
    assert not offenders, report(offenders)


def test_only_one_native_folder_knows_python() -> None:
    offenders = [
        relative(path)
        for path in native_files()
        if not path.is_relative_to(NATIVE / "python")
        and re.search(r"#include [<\"](nanobind|Python\.h)", path.read_text(encoding="utf-8"))
    ]
    assert not offenders, report(offenders)


def test_every_build_has_rdma() -> None:
    """Only the comparison of rdma/abi.h with rdma-core's headers includes them, and the build asks for none."""
    offenders = [
        relative(path)
        for path in native_files()
        if path != NATIVE / "tests" / "rdma" / "abi_test.cpp"
        and re.search(r"#include [<\"]infiniband/", path.read_text(encoding="utf-8"))
    ]
    assert not offenders, report(offenders)
    assert "infiniband" not in (NATIVE / "CMakeLists.txt").read_text(encoding="utf-8")


def test_wire_code_never_reinterprets_bytes() -> None:
    offenders = [
        relative(path)
        for path in files("native/src/wire", ".cpp", ".h")
        if "reinterpret_cast" in path.read_text(encoding="utf-8")
    ]
    assert not offenders, f"read fields with mooncache::Reader: {report(offenders)}"
