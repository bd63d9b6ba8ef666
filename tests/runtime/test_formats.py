"""The numbers of runtime/formats.py are those that the native code writes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mooncache.runtime.formats import DATA_PLANE, DISK, FORMATS, KEPT_MEMORY

NATIVE = Path(__file__).parents[2] / "native" / "src"


@pytest.mark.parametrize(
    ("name", "header", "constant"),
    [
        (DATA_PLANE, "wire/frame.h", "uint8_t kVersion"),
        (KEPT_MEMORY, "store/catalogue.h", "uint32_t kCatalogueVersion"),
        (DISK, "store/disk/format.h", "uint32_t kFormatVersion"),
    ],
)
def test_numbers_are_those_of_the_native_code(name: str, header: str, constant: str) -> None:
    found = re.search(rf"{constant} = (\d+);", (NATIVE / header).read_text(encoding="utf-8"))
    assert found is not None
    assert FORMATS[name] == int(found[1])
