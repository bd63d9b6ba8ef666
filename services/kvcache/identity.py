"""What a model is: digests of its weights, its configuration and its tokenizer, taken from the files themselves.

Idea: a name says nothing (two folders with one name, two revisions of one id), bytes do. Weights are hashed in chunks
by several threads over a memory map, in native code with the GIL released. As that takes seconds for large models, the
digest of a file is remembered in the state folder under its path, size, mtime, ctime and inode. The memory is only
ever a saving: damaged, unreadable or unwritable it is as good as absent.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from mooncache import _native
from mooncache.config.small_files import read_small
from mooncache.errors import ConfigInvalid

CACHE_FILE: Final = "model-digests.json"
NO_TOKENIZER: Final = "none"

_CACHE_VERSION: Final = 2
_CACHE_BYTES_MAX: Final = 16 << 20
_CACHE_FILES_MAX: Final = 20_000
_CHUNK_BYTES: Final = 32 << 20
_THREADS_MAX: Final = 8
_SMALL_FILE_BYTES_MAX: Final = 256 << 20

_WEIGHT_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
_NOT_WEIGHTS: Final = frozenset({"training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth"})
_CONFIG_FILES: Final = ("config.json", "params.json")
# These say where the file comes from, not what the model computes.
_CONFIG_IGNORED: Final = frozenset({"_name_or_path", "transformers_version"})
_ADAPTER_CONFIG: Final = "adapter_config.json"
# These say what the adapter was trained on and with, not what it computes.
_ADAPTER_IGNORED: Final = frozenset(
    {"base_model_name_or_path", "inference_mode", "peft_version", "revision"} | _CONFIG_IGNORED
)
_TOKENIZER_FILE: Final = "tokenizer.json"
_TOKENIZER_FILES: Final = (
    "added_tokens.json",
    "merges.txt",
    "special_tokens_map.json",
    "spiece.model",
    "tekken.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
)
_TOKENIZER_SETTINGS: Final = "tokenizer_config.json"
_SETTINGS_IGNORED: Final = frozenset(
    {"_commit_hash", "name_or_path", "processor_class", "tokenizer_file", "transformers_version"}
)
_TEMPLATE_FILES: Final = ("chat_template.jinja", "chat_template.json")
_MORE_TEMPLATES: Final = "additional_chat_templates/*.jinja"


def resolve_model(model: str, revision: str | None = None) -> Path:
    """Folder (or single file) of a model that is given as a path or as an id on the Hugging Face hub.

    Never uses the network: an engine that serves the model has its files on this machine.

    Raises:
        ConfigInvalid: there is no such folder and the hub's local store does not have the id.
    """
    path = Path(model).expanduser()
    if path.exists():
        return path.absolute()
    try:
        hub = import_module("huggingface_hub")
        return Path(hub.snapshot_download(model, revision=revision, local_files_only=True))
    except Exception as error:  # noqa: BLE001  (the hub's own errors are many, and all mean "not here")
        raise ConfigInvalid(
            f"The model {model!r} is neither a folder nor in this machine's Hugging Face store "
            f"({type(error).__name__}). Download it first, or give the folder."
        ) from None


def weights_digest(
    model_dir: Path | str, *, state_dir: Path | None = None, load_format: str = "auto", seed: int = 0
) -> str:
    """Digest of the bytes of all weight files, in the order of their names.

    Args:
        model_dir: folder of the model, or one weight file.
        state_dir: where digests are remembered; None remembers nothing.
        load_format: the engine's; "dummy" weights are made from `seed` and the configuration, not read.

    Raises:
        ConfigInvalid: no weight files, or one that cannot be read.
    """
    folder = Path(model_dir)
    if load_format == "dummy":
        return f"dummy:{seed}:{config_digest(folder)}"
    files = _weight_files(folder)
    if not files:
        raise ConfigInvalid(f"{folder} has no weight files ({', '.join(_WEIGHT_SUFFIXES)}).")
    known = _read_cache(state_dir)
    parts: list[bytes] = []
    changed = False
    for path in files:
        try:
            identity = _identity(path)
            entry = known.get(str(path))
            if entry is None or entry[:-1] != identity:
                entry = [*identity, _file_digest(path)]
                known[str(path)] = entry
                changed = True
        except OSError as error:
            raise ConfigInvalid(f"The weight file {path} cannot be read: {error.strerror}.") from None
        parts.append(f"{path.name}\0{identity[0]}\0{entry[-1]}\n".encode())
    if changed:
        _write_cache(state_dir, known)
    return _native.blake3(b"".join(parts)).hex()


def config_digest(model_dir: Path | str) -> str:
    """Digest of the model's configuration: equal for equal content, whatever the order and spacing of the JSON.

    Raises:
        ConfigInvalid: no configuration, or it is not JSON.
    """
    folder = Path(model_dir)
    if folder.is_file():
        folder = folder.parent
    for name in _CONFIG_FILES:
        if not (folder / name).is_file():
            continue
        try:
            content = json.loads(_read_small(folder / name))
        except (ValueError, RecursionError):
            raise ConfigInvalid(f"{folder / name} is not JSON.") from None
        if isinstance(content, dict):
            content = {key: value for key, value in content.items() if key not in _CONFIG_IGNORED}
        return digest_of(content)
    raise ConfigInvalid(f"{folder} has no config.json.")


def tokenizer_digest(model_dir: Path | str, *, chat_template: str = "") -> str:
    """Digest of what makes tokens of a request: the tokenizer, its settings and the chat template.

    tokenizer.json counts, or all tokenizer files when there is none. A model without any of it is "none".

    Args:
        model_dir: folder of the model, or one file in it.
        chat_template: a template that the engine was given, as a file or as text; it counts in place of the folder's.

    Raises:
        ConfigInvalid: a file that cannot be read.
    """
    folder = Path(model_dir)
    if folder.is_file():
        folder = folder.parent
    names = [_TOKENIZER_FILE] if (folder / _TOKENIZER_FILE).is_file() else _loose_tokenizer_files(folder)
    content: dict[str, Any] = {name: _native.blake3(_read_small(folder / name)).hex() for name in names}
    settings = _settings_of(folder / _TOKENIZER_SETTINGS)
    templates = {"tokenizer_config": settings.pop("chat_template", None)}
    for path in (*(folder / name for name in _TEMPLATE_FILES), *sorted(folder.glob(_MORE_TEMPLATES))):
        if path.is_file():
            templates[path.name] = _native.blake3(_read_small(path)).hex()
    if chat_template:
        templates = {"given": _template_text(chat_template)}
    content |= {"settings": settings, "templates": templates}
    known = names or settings or any(templates.values())
    return digest_of(content) if known else NO_TOKENIZER


def _loose_tokenizer_files(folder: Path) -> list[str]:
    names = [name for name in _TOKENIZER_FILES if (folder / name).is_file()]
    return names + sorted(path.name for path in folder.glob("*.tiktoken"))


def _settings_of(path: Path) -> dict[str, object]:
    """The settings in a file, without those that say where it comes from; empty when there is no file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(_read_small(path))
    except (ValueError, RecursionError):
        raise ConfigInvalid(f"{path} is not JSON.") from None
    found = content if isinstance(content, dict) else {"content": content}
    return {name: value for name, value in found.items() if name not in _SETTINGS_IGNORED}


def _template_text(given: str) -> str:
    """A template given as vLLM takes it: the name of a file, or the text itself."""
    with contextlib.suppress(OSError, ValueError):
        path = Path(given)
        if path.is_file():
            return _read_small(path).decode("utf-8", "replace")
    return given


def adapter_digest(adapter_dir: Path | str, *, state_dir: Path | None = None) -> str:
    """Digest of a LoRA adapter: its weight files and its configuration. Its name and its folder do not count.

    Args:
        adapter_dir: the folder, as `resolve_model` finds it.
        state_dir: as of `weights_digest`.

    Raises:
        ConfigInvalid: a file that is missing or cannot be read.
    """
    folder = Path(adapter_dir)
    try:
        config = json.loads(_read_small(folder / _ADAPTER_CONFIG))
    except (ValueError, RecursionError):
        raise ConfigInvalid(f"{folder / _ADAPTER_CONFIG} is not JSON.") from None
    if isinstance(config, dict):
        config = {key: value for key, value in config.items() if key not in _ADAPTER_IGNORED}
    return digest_of([config, weights_digest(folder, state_dir=state_dir)])


def adapter_marks(adapter_dir: Path | str) -> tuple[tuple[str, int, int, int, int, int], ...]:
    """What changes when the files of an adapter do: of each of them, of its folder and of links on the way its path,
    size, inode, device, mtime and ctime in nanoseconds.

    Raises:
        ConfigInvalid: the folder or a file cannot be read.
    """
    folder = Path(adapter_dir)
    found = []
    try:
        links = [path for path in (folder, *folder.parents) if path.is_symlink()]
        paths = [folder, folder / _ADAPTER_CONFIG, *_weight_files(folder)]
        statuses = [
            *((path, path.lstat()) for path in (*links, *paths)),
            *((path, path.stat()) for path in paths),
        ]
    except OSError as error:
        raise ConfigInvalid(f"The adapter {folder} cannot be read: {error.strerror}.") from None
    for path, status in statuses:
        size, mtime, inode, device, ctime = (
            status.st_size,
            status.st_mtime_ns,
            status.st_ino,
            status.st_dev,
            status.st_ctime_ns,
        )
        found.append((str(path), size, inode, device, mtime, ctime))
    return tuple(found)


def weights_changed_ns(model_dir: Path | str) -> int:
    """Wall clock, in nanoseconds, at which a weight file, or the configuration beside it, changed last.

    Raises:
        ConfigInvalid: a file that cannot be read.
    """
    folder = Path(model_dir)
    beside = folder.parent if folder.is_file() else folder
    configs = [beside / name for name in _CONFIG_FILES if (beside / name).is_file()]
    try:
        statuses = [path.stat() for path in (*_weight_files(folder), *configs)]
    except OSError as error:
        raise ConfigInvalid(f"The weight files of {folder} cannot be read: {error.strerror}.") from None
    return max((max(status.st_mtime_ns, status.st_ctime_ns) for status in statuses), default=0)


def code_digest(model_dir: Path | str) -> str:
    """Digest of the Python files beside the model: an engine that trusts them computes what they say.

    Raises:
        ConfigInvalid: a file that cannot be read.
    """
    folder = Path(model_dir)
    files = sorted(folder.glob("*.py")) if folder.is_dir() else []
    return digest_of([[path.name, _native.blake3(_read_small(path)).hex()] for path in files])


def digest_of(content: object) -> str:
    """Digest of plain data (what JSON can say), independent of the order of keys."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), default=str)
    return _native.blake3(text.encode()).hex()


# --- files -------------------------------------------------------------------------------------------------------


def _weight_files(folder: Path) -> list[Path]:
    if folder.is_file():
        return [folder.absolute()]
    try:
        found = sorted(path for path in folder.iterdir() if path.suffix in _WEIGHT_SUFFIXES)
    except OSError as error:
        raise ConfigInvalid(f"The model folder {folder} cannot be read: {error.strerror}.") from None
    return [path.absolute() for path in found if path.name not in _NOT_WEIGHTS and path.is_file()]


def _identity(path: Path) -> list[int]:
    """Size, times and inode of the file itself: hub folders are links, and a link does not change with its file.

    Tools set the mtime back when they rewrite a file in place; no tool can set the ctime.
    """
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev, status.st_ctime_ns]


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            return _native.blake3(b"").hex()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:

            def chunk(at: int) -> bytes:
                with view[at : at + _CHUNK_BYTES] as piece:
                    return _native.blake3(piece)

            threads = min(_THREADS_MAX, os.cpu_count() or 1)
            with ThreadPoolExecutor(threads, "model-digest") as pool:
                digests = list(pool.map(chunk, range(0, size, _CHUNK_BYTES)))
    return _native.blake3(b"".join(digests)).hex()


def _read_small(path: Path) -> bytes:
    return read_small(path, "model's file", ConfigInvalid, _SMALL_FILE_BYTES_MAX)


# --- the memory of digests ---------------------------------------------------------------------------------------


def _read_cache(state_dir: Path | None) -> dict[str, list[object]]:
    """Path -> [size, mtime, inode, device, ctime, digest]; empty for whatever is not exactly that."""
    if state_dir is None:
        return {}
    try:
        with (state_dir / CACHE_FILE).open("rb") as file:
            content = json.loads(file.read(_CACHE_BYTES_MAX))
        if content["version"] != _CACHE_VERSION:
            return {}
        return {str(path): list(entry) for path, entry in content["files"].items() if _sound(entry)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def _sound(entry: object) -> bool:
    return (
        isinstance(entry, list)
        and len(entry) == 6
        and all(type(number) is int for number in entry[:5])
        and isinstance(entry[5], str)
        and len(entry[5]) == 64
        and all(letter in "0123456789abcdef" for letter in entry[5])
    )


def _write_cache(state_dir: Path | None, known: dict[str, list[object]]) -> None:
    """Whole or not at all; what another process wrote at the same moment may be lost and is then made again."""
    if state_dir is None:
        return
    while len(known) > _CACHE_FILES_MAX:
        known.pop(next(iter(known)))
    partial = state_dir / f".{CACHE_FILE}.{secrets.token_hex(8)}"
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump({"version": _CACHE_VERSION, "files": known}, file)
        partial.replace(state_dir / CACHE_FILE)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
