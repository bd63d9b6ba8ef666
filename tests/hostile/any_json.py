"""Strategies of JSON: any value, objects with the fields that a parser looks for, texts of them."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

DEEP = "[" * 20_000  # deeper than any parser of JSON goes
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def objects(*names: str) -> st.SearchStrategy[Any]:
    """Any JSON value, mostly objects with the fields that the parser looks for, at any depth of two."""
    fields = st.dictionaries(st.sampled_from(names) | st.text(max_size=4), JSON, max_size=len(names))
    return (
        JSON | fields | st.dictionaries(st.sampled_from(names), JSON | fields | st.lists(fields, max_size=2))
    )


def texts(*names: str) -> st.SearchStrategy[str]:
    return objects(*names).map(json.dumps) | st.text(max_size=200) | st.just(DEEP)
