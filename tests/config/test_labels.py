"""Labels of a node: what is one, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncache.config import Config
from mooncache.config.labels import LABELS_MAX, checked_labels, labels_of
from mooncache.errors import InvalidArgument
from mooncache.master.messages import registration_of
from mooncache.proto.v1 import master_pb2


def test_words_become_labels() -> None:
    assert labels_of(["zone=eu-1a", "rack=r-12"]) == {"rack": "r-12", "zone": "eu-1a"}
    assert labels_of(["zone=a", "zone=b"]) == {"zone": "b"}
    assert Config.model_validate({"store_node": {"labels": "zone=a,rack=r1"}}).store_node.labels == (
        "zone=a",
        "rack=r1",
    )


@pytest.mark.parametrize(
    "word", ["zone", "=a", "zone=", "Zone=a", "zone=a b", "z" * 64 + "=a", "zone=" + "a" * 64]
)
def test_what_is_no_label_is_refused_with_a_sentence(word: str) -> None:
    with pytest.raises(ValueError, match="is no label; write"):
        labels_of([word])
    with pytest.raises(ValueError, match="is no label; write"):
        Config.model_validate({"store_node": {"labels": word}})


def test_a_node_has_a_bounded_number_of_labels() -> None:
    with pytest.raises(ValueError, match="at most 16"):
        labels_of([f"label{n}=a" for n in range(LABELS_MAX + 1)])


@given(st.dictionaries(st.text(max_size=70), st.text(max_size=70), max_size=20))
def test_any_text_is_a_label_or_refused(labels: dict[str, str]) -> None:
    request = master_pb2.RegisterNodeRequest(node_id="n", host_id="h", labels=labels)
    try:
        taken = registration_of(request)
    except InvalidArgument:
        with pytest.raises(ValueError):
            checked_labels(labels)
        return
    assert dict(taken.labels) == labels
    assert taken.domains == (labels.get("zone", ""), labels.get("rack", ""), "h")
