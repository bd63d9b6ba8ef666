"""The runner of stories: what it runs, what it writes, and how it says that a story went otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stories import compare, played, table

STORY = """# An empty shelf.
put 1 2

# Two things.
show
----
1
2

put 3 by=tens
show
----
1
2
30
"""


class Shelf:
    def __init__(self) -> None:
        self.things: list[int] = []

    def do_put(self, *things: str, by: str = "ones") -> None:
        self.things += [int(thing) * {"ones": 1, "tens": 10}[by] for thing in things]

    async def do_show(self) -> str:
        return table([(thing,) for thing in self.things])

    def do_take_out(self, thing: str) -> str | None:
        return None if int(thing) in self.things else "not here"


async def test_a_story_that_is_true_stays_as_it_is(tmp_path: Path) -> None:
    assert await played(STORY, Shelf()) == STORY
    (tmp_path / "a.txt").write_text(STORY)
    compare(tmp_path / "a.txt", STORY, rewrite=False)


async def test_another_answer_fails_with_the_difference_and_is_written_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(STORY.replace("30", "3"))
    now = await played(path.read_text(), Shelf())
    with pytest.raises(pytest.fail.Exception) as failure:
        compare(path, now, rewrite=False)
    message = str(failure.value)
    assert "a.txt went otherwise" in message
    assert "\n put 3 by=tens\n show\n ----\n 1\n 2\n-3\n+30\n" in message
    assert "--rewrite" in message
    compare(path, now, rewrite=True)
    assert path.read_text() == STORY


async def test_answers_get_a_mark_and_a_mark_without_answers_stays() -> None:
    assert await played("take-out 7\n", Shelf()) == "take-out 7\n----\nnot here\n"
    assert await played("put 7\n----\nnot here\n", Shelf()) == "put 7\n----\n"
    assert await played("\n\n# a remark\n\n\n\nput 7\n\n", Shelf()) == "# a remark\n\nput 7\n"


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("drop 1", "no command 'drop'; known: put, show, take-out"),
        ("show 1", "too many positional arguments"),
        ("take-out", "missing a required argument: 'thing'"),
        ("put 1 colour=red", "unexpected keyword argument 'colour'"),
    ],
)
async def test_a_wrong_command_names_its_line(command: str, text: str) -> None:
    with pytest.raises(TypeError, match=text) as failure:
        await played(f"# a remark\nput 1\n{command}\n", Shelf())
    assert f"line 3 of the story: {command}" in failure.value.__notes__
