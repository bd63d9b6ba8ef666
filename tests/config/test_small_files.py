"""What is wrong with a file that people wrote is said with its line, whoever reads it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mooncache.config import load
from mooncache.config.small_files import BYTES_MAX, nearest, read_small, read_toml
from mooncache.errors import (
    ClusterInvalid,
    ConfigInvalid,
    InvalidArgument,
    MooncacheError,
    PlanInvalid,
    ProfileInvalid,
)
from mooncache.plan import loading
from mooncache.simulate import description, profile

READERS = {
    "configuration file": (lambda path: load(path, env={}), ConfigInvalid),
    "plan's input": (loading.read, PlanInvalid),
    "cluster description": (description.read, ClusterInvalid),
    "model profile": (profile.read, ProfileInvalid),
}


@pytest.mark.parametrize("what", READERS)
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read: No such file"),
        (b"a = 1\nb = = 2\n", "is not TOML: Invalid value (at line 2, column 5)"),
        (b"a = 1\n# fine\nb = '\xff'\n", "is not text in UTF-8: byte 0xff on line 3"),
        (b"#" * (BYTES_MAX + 1), "is larger than 1 MiB"),
        (b"a = " + b"[" * 3000 + b"]" * 3000, "is not TOML"),
        (b"a = " + b"1" * 5000, "is not TOML"),
        (b"[a]\nb = [1, -" + b"1" * 400 + b"]", "is not TOML: b is a whole number of more than 64 bits"),
    ],
)
def test_every_reader_says_what_is_wrong_and_where(
    tmp_path: Path, what: str, content: bytes | None, said: str
) -> None:
    read, expected = READERS[what]
    path = tmp_path / "file.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(MooncacheError) as refused:
        read(path)
    assert type(refused.value) is expected
    assert refused.value.message.startswith(f"The {what} {path} ")
    assert said in refused.value.message


def test_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "file.toml"
    path.write_bytes(b"\xef\xbb\xbfa = 1\n")
    assert read_toml(path, "file", InvalidArgument) == {"a": 1}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_bytes_are_tables_or_a_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file.toml"
    path.write_bytes(content)
    assert read_small(path, "file", InvalidArgument) == content
    with contextlib.suppress(InvalidArgument):
        assert isinstance(read_toml(path, "file", InvalidArgument), dict)


def test_the_nearest_name() -> None:
    known = ["prefill", "decode"]
    assert nearest("prefil", known) == "did you mean prefill?"
    assert nearest("x", known) == "known are prefill, decode."
    assert nearest("x", known, "see the page") == "see the page"
