"""Images and other media under vLLM's own scheduler: blocks follow their content, whatever vLLM or a client calls them.

The objects are vLLM's own; no model with an encoder runs.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from mooncache.connectors.vllm import media
from mooncache.connectors.vllm.core.refusals import PoolRefusal, Uncached
from mooncache.connectors.vllm.media import MediaContents
from mooncache.kvcache.keys import content_passport, request_keys
from mooncache.kvcache.media import Medium
from tests.conditions import wait_until
from tests.connectors.harness import BLOCK_TOKENS, Harness, Make, ask, expected, prompt
from tests.kvcache.faulty import FaultyPool

pytest.importorskip("vllm", reason="vLLM is not installed (scripts/install_vllm.sh)")
pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

LENGTH = 10 * BLOCK_TOKENS + 7
BEGIN = 4 * BLOCK_TOKENS + 5
IMAGE_TOKENS = 40


def feature(content: object, *, name: str = "", begin: int = BEGIN, length: int = IMAGE_TOKENS) -> Any:
    """An image as the engine gets it: a seed of its pixels, tensors by name, or None."""
    import torch
    from vllm.multimodal.inputs import (
        MultiModalFeatureSpec,
        MultiModalFieldElem,
        MultiModalKwargsItem,
        MultiModalSharedField,
        PlaceholderRange,
    )

    if isinstance(content, int):
        pixels = torch.rand((3, 8, 8), generator=torch.Generator().manual_seed(content))
        content = {"pixel_values": pixels, "image_grid_thw": torch.tensor([1, 2, 4])}
    item = None
    if isinstance(content, dict):
        field = MultiModalSharedField(batch_size=1)
        item = MultiModalKwargsItem(
            {key: MultiModalFieldElem(data=value, field=field) for key, value in content.items()}
        )
    place = PlaceholderRange(offset=begin, length=length)
    return MultiModalFeatureSpec(data=item, modality="image", identifier=name or "name", mm_position=place)


def seeing(make: Make) -> Harness:
    """An engine whose scheduler has room for the results of an encoder."""
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

    engine = make()
    engine.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=4096)
    engine.scheduler.max_num_encoder_input_tokens = 4096
    return engine


def run(engine: Harness, name: str, tokens: list[int], *features: Any) -> dict[str, Any]:
    engine.add(name, tokens, ask=ask(), mm_features=list(features))
    engine.run()
    assert engine.outputs[name] == expected(tokens, 4)
    reported: dict[str, Any] = engine.reported(name)
    return reported


def test_engines_share_a_prompt_with_an_image_by_what_is_to_be_seen(make: Make, faulty: FaultyPool) -> None:
    tokens = prompt(91, LENGTH)
    assert run(seeing(make), "first", tokens, feature(1, name="a"))["saved_blocks"] == 10
    # The same image under another name; another image; another one under the first's name; no image.
    same = run(seeing(make), "same", tokens, feature(1, name="b"))
    assert (same["outcome"], same["loaded_tokens"]) == ("hit", 10 * BLOCK_TOKENS)
    for other in ([feature(2, name="c")], [feature(3, name="a")], []):
        apart = run(seeing(make), "apart", tokens, *other)
        assert apart["loaded_tokens"] == BEGIN // BLOCK_TOKENS * BLOCK_TOKENS
    again = run(seeing(make), "again", tokens, feature(2))
    assert again["loaded_tokens"] == 10 * BLOCK_TOKENS


def test_an_image_at_the_end_of_a_prompt_is_in_the_block_that_decoding_fills(
    make: Make, faulty: FaultyPool
) -> None:
    tokens = prompt(92, 3 * BLOCK_TOKENS - 2)
    at = {"begin": 3 * BLOCK_TOKENS - 9, "length": 5}
    longer = tokens + expected(tokens, 4) + prompt(93, 9)
    run(seeing(make), "first", tokens, feature(1, **at))
    assert run(seeing(make), "same", longer, feature(1, **at))["loaded_tokens"] == 3 * BLOCK_TOKENS
    assert run(seeing(make), "apart", longer, feature(2, **at))["loaded_tokens"] == 2 * BLOCK_TOKENS


def test_an_image_that_cannot_be_read_is_computed_and_says_so(make: Make, faulty: FaultyPool) -> None:
    engine, tokens = seeing(make), prompt(94, 100)
    reported = run(engine, "r", tokens, feature(None, begin=10))
    assert (reported["outcome"], reported["saved_blocks"]) == ("off", 0)
    assert reported["reason"] == "multimodal: the content of its image is not in the engine's process"
    assert engine.counted["uncached_requests:multimodal"] == 1
    assert faulty.blocks == {}


def identify(of: MediaContents, *features: Any) -> tuple[Medium, ...] | PoolRefusal:
    wait_until(lambda: of.ask("r", features) is not None, "an answer")
    found = of.ask("r", features)
    assert found is not None
    of.forget("r")
    return found


def test_a_name_that_stands_for_two_images_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "NAMES_MAX", 2)
    contents = MediaContents()
    assert contents.ask("none", []) == contents.ask("none", None) == ()
    first = identify(contents, feature(1, name="dog"))
    assert isinstance(first, tuple)
    assert identify(contents, feature(1, name="dog")) == first
    other = identify(contents, feature(2, name="dog"))
    assert isinstance(other, PoolRefusal)
    assert (other.code, "dog" in other.text) == (Uncached.MULTIMODAL, True)
    # As long as it may be remembered by the engine's encoder; the oldest of all names is forgotten.
    for number, name in enumerate(("cat", "cow")):
        identify(contents, feature(5 + number, name=name))
    assert isinstance(identify(contents, feature(2, name="dog")), tuple)
    assert not contents.pending
    contents.close()


def test_the_digest_is_that_of_types_shapes_and_bytes() -> None:
    import torch

    plain = torch.arange(8, dtype=torch.int32)
    ways: list[dict[str, Any]] = [
        {"a": plain},
        {"b": plain},
        {"a": plain.reshape(2, 4)},
        {"a": plain.reshape(4, 2)},
        {"a": plain.to(torch.int64)},
        {"a": plain.view(torch.float32)},
        {"a": plain + 1},
        {"a": [plain, plain]},
        {"a": [plain]},
        {"a": plain[:0]},
        {"a": torch.tensor(1)},
        {"a": 1},
        {"a": 1.0},
        {"a": True},
        {"a": "1"},
        {"a": plain, "b": plain},
    ]
    contents = MediaContents()
    found = [identify(contents, feature(way, name=str(number))) for number, way in enumerate(ways)]
    assert all(isinstance(one, tuple) for one in found)
    assert len(set(map(str, found))) == len(ways)
    # Memory in another order is the same content.
    turned = {"a": plain.reshape(4, 2).T.contiguous().T}
    assert identify(contents, feature(turned, name="turned")) == found[3]
    for unknown in (None, object(), [object()], {"x": 1}):
        assert isinstance(identify(contents, feature({"a": unknown}, name="u")), PoolRefusal)
    contents.close()


def test_keys_are_equal_where_those_of_vllm_are(make: Make, faulty: FaultyPool) -> None:
    """vLLM's names are hashes here, as they are unless a client gives them."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    hasher, chooser, passport = make().hasher, random.Random(5), content_passport(BLOCK_TOKENS)
    seen: dict[bytes, bytes] = {}
    base = prompt(95, 6 * BLOCK_TOKENS)
    for number in range(150):
        tokens = base[: chooser.choice([2, 5, 6]) * BLOCK_TOKENS]
        places = sorted(chooser.sample([3, 20, 31, 32, 70, 96, 128], chooser.randrange(3)))
        images = [chooser.randrange(3) for _ in places]
        features = [
            feature(image, name=f"hash-{image}", begin=place, length=9)
            for place, image in zip(places, images, strict=True)
        ]
        request = Request(
            request_id=str(number),
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            mm_features=features,
            block_hasher=hasher,
        )
        known = [Medium(place, place + 9, str(image)) for place, image in zip(places, images, strict=True)]
        keys = request_keys(passport, tokens, media=known)
        assert len(request.block_hashes) == len(keys) // 32
        for at, name in enumerate(request.block_hashes):
            assert seen.setdefault(bytes(name), keys[at * 32 : at * 32 + 32]) == keys[at * 32 : at * 32 + 32]
    assert len(set(seen.values())) == len(seen) > 50
