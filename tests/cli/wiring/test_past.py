"""A journal on disk is read from its image on, and costs no run its past where the image is missing or broken."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from functools import partial
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from oobleck.cli.wiring.past import advance_image, is_any_alive, keep_image, read_books, read_past
from oobleck.control.journal import Action, JournalEntry, Notice, PlanAdopted
from oobleck.control.replay import BooksImage
from oobleck.job import NodeSpec
from oobleck.runtime.journals import JournalWriter, read_image, read_journal, set_aside, write_image
from tests.control.journals import adopted, books_of, committed, job_started, plan, run_with_a_loss
from tests.examples import examples

ROWS = tuple(tuple(f"node{8 * row + place}" for place in range(4)) for row in range(24))
NODES = tuple(node for row in ROWS for node in row)


def large_run() -> Iterable[JournalEntry]:
    """A run of 24 pipelines that loses one in each generation; its plans are written as what they change."""
    yield job_started(NODES)
    for generation in range(1, 8):
        rows, spares = ROWS[generation - 1 :], tuple(node for row in ROWS[: generation - 1] for node in row)
        yield adopted(
            10.0 * generation,
            generation,
            plan(*rows, microbatches=192, spares=spares),
            Action.START if generation == 1 else Action.REINSTANTIATE,
            pipeline_generations=(*([1] * (len(rows) - 1)), generation),
            oldest=max(0, generation - 1),
        )
        for step in range(1, 6):
            yield committed(10.0 * generation + step, 5 * (generation - 1) + step, generation)


LARGE = tuple(large_run())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


def write(path: Path, entries: Iterable[JournalEntry]) -> None:
    with JournalWriter(path) as journal:
        for entry in entries:
            journal.append(entry)


def image_path(path: Path) -> Path:
    return path.with_name(".journal.jsonl.image")


def make_image(path: Path, entries: Iterable[JournalEntry]) -> None:
    """Make the image of a journal's beginning."""
    write(path, entries)
    advance_image(path)


def test_plans_of_many_pipelines_are_short_lines_and_come_back_whole(path: Path):
    write(path, LARGE)
    assert tuple(read_journal(path)) == LARGE
    lines = [line for line in path.read_bytes().splitlines() if b'"PlanLine"' in line]
    assert len(lines) == 7
    assert max(map(len, lines[1:])) < len(lines[0]) / 2
    changed = b"".join(lines[1:])
    assert changed.count(b'"node187"') == 0, "what stays is not named again"


@pytest.mark.parametrize("entries", [LARGE, tuple(run_with_a_loss(ends=False))], ids=["large", "small"])
def test_from_an_image_a_journal_comes_to_the_same(path: Path, entries: tuple[JournalEntry, ...]):
    for place in (1, len(entries) // 3, len(entries) - 1):
        path.unlink(missing_ok=True)
        make_image(path, entries[:place])
        before = path.stat().st_size
        write(path, entries[place:])
        books, end, read_bytes = read_books(path)
        assert books.image() == books_of(entries).image()
        assert (end, read_bytes) == (path.stat().st_size, path.stat().st_size - before)


@examples(60)
@given(data=st.data())
def test_a_journal_that_is_cut_anywhere_comes_to_what_is_left_of_it(tmp_path_factory, data: st.DataObject):
    path = tmp_path_factory.mktemp("cut") / "journal.jsonl"
    place = data.draw(st.integers(1, len(LARGE)), label="entries before the image")
    make_image(path, LARGE[:place])
    write(path, LARGE[place:])
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)), label="bytes that are left")
    path.write_bytes(whole[:cut])
    books, end, _ = read_books(path)
    assert books.image() == books_of(LARGE[: whole[:cut].count(b"\n")]).image()
    assert end == whole[:cut].rfind(b"\n") + 1


@examples(60)
@given(data=st.data())
def test_an_image_that_is_torn_or_damaged_anywhere_costs_nothing(tmp_path_factory, data: st.DataObject):
    path = tmp_path_factory.mktemp("torn") / "journal.jsonl"
    make_image(path, LARGE[:20])
    write(path, LARGE[20:])
    image = image_path(path).read_bytes()
    place = data.draw(st.integers(0, len(image) - 1), label="byte")
    if data.draw(st.booleans(), label="torn"):
        image_path(path).write_bytes(image[:place])
    else:
        change = bytes([image[place] ^ data.draw(st.integers(1, 255), label="change")])
        image_path(path).write_bytes(image[:place] + change + image[place + 1 :])
    books, _, _ = read_books(path)
    assert books.image() == books_of(LARGE).image()


def test_an_image_of_another_journal_is_not_used(path: Path, caplog: pytest.LogCaptureFixture):
    make_image(path, run_with_a_loss(steps=40))
    other = tuple(run_with_a_loss(steps=60, num_pipelines=3))
    path.unlink()
    write(path, other)
    assert read_books(path)[0].image() == books_of(other).image()
    assert "the whole journal is read" in caplog.text


def test_an_image_of_another_version_is_not_used(path: Path, caplog: pytest.LogCaptureFixture):
    write(path, LARGE)
    write_image(path, Notice(t_s=0.0, level="info", text="of another kind"), path.stat().st_size)
    assert read_image(path, BooksImage) is None
    assert read_books(path)[0].image() == books_of(LARGE).image()
    assert "is not used" in caplog.text


def test_a_journal_that_is_set_aside_leaves_no_image(path: Path):
    make_image(path, LARGE)
    set_aside(path)
    assert not image_path(path).exists()


def test_an_image_is_its_users_alone(path: Path):
    make_image(path, LARGE)
    assert image_path(path).stat().st_mode & 0o777 == 0o600
    assert sorted(each.name for each in path.parent.iterdir()) == [".journal.jsonl.image", "journal.jsonl"]


def test_a_plan_that_changes_one_that_is_not_there_is_named(path: Path):
    write(path, LARGE)
    lines = path.read_bytes().splitlines(keepends=True)
    plans = [number for number, line in enumerate(lines) if b'"PlanLine"' in line]
    path.write_bytes(b"".join(line for number, line in enumerate(lines) if number != plans[1]))
    with pytest.raises(Exception, match=r"changes the plan of generation 2; the plan before is that of generation 1"):
        tuple(read_journal(path))


def test_after_lost_entries_a_plan_is_whole(path: Path):
    """Who reads may lack the plan before."""
    plans = [entry for entry in LARGE if isinstance(entry, PlanAdopted)]
    with JournalWriter(path, max_bytes=0) as journal:
        journal.append(plans[0])
        journal.append(plans[1])
    assert tuple(read_journal(path)) == tuple(plans[:2])


def test_nothing_is_read_where_there_is_nothing(path: Path):
    books, place = read_past(path)
    assert (books.finish(), books.finished, place) == (None, None, 0)


async def until(is_so: Callable[[], bool]) -> None:
    with trio.fail_after(60):
        while not is_so():  # noqa: ASYNC110  a file of another thread
            await trio.sleep(0.01)


async def test_an_image_is_made_again_as_the_journal_grows(path: Path):
    entries, places = tuple(run_with_a_loss()), []
    with JournalWriter(path) as journal:
        async with trio.open_nursery() as nursery:
            for entry in entries[:30]:
                journal.append(entry)
            keep = partial(keep_image, path, lambda: journal.size_bytes, place=0, period_s=0.01, least_bytes=1000)
            nursery.start_soon(keep)
            await until(lambda: read_image(path, BooksImage) is not None)
            places.append(journal.size_bytes)
            while journal.size_bytes < 20 * image_path(path).stat().st_size:
                journal.append(committed(1000.0, 100))
            await until(lambda: (read_image(path, BooksImage) or (None, 0))[1] > places[0])
            nursery.cancel_scope.cancel()
    assert read_books(path)[0].image() == books_of(read_journal(path)).image()


async def test_a_journal_whose_image_cannot_be_made_ends_nothing(path: Path, caplog: pytest.LogCaptureFixture):
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(keep_image, path, lambda: 10**9, place=0, period_s=0.01, least_bytes=1000))
        await until(lambda: "no image of" in caplog.text)
        nursery.cancel_scope.cancel()


class Living:
    """Nodes of which some have an agent; a look at the others takes as long as a connection that is not answered."""

    def __init__(self, *nodes: str) -> None:
        self._nodes = nodes
        self.asked: list[str] = []

    async def found_again(self, nodes: Sequence[NodeSpec], asked: Set[str]) -> Sequence[NodeSpec]:
        return [node for node in nodes if node.name not in asked]

    async def is_alive(self, node: NodeSpec) -> bool:
        self.asked.append(node.name)
        if node.name not in self._nodes:
            await trio.sleep(10.0)
        return node.name in self._nodes


SPECS = tuple(NodeSpec(name=f"n{index}", host="h") for index in range(1000))


async def test_of_thousands_that_live_a_few_are_asked(autojump_clock):
    nodes = Living(*(f"n{index}" for index in range(3, 1000)))
    assert await is_any_alive(nodes, nodes, SPECS)
    assert len(nodes.asked) == 8
    assert trio.current_time() < 1.0


async def test_one_that_lives_is_found_wherever_it_is(autojump_clock):
    last, none = Living("n999"), Living()
    assert await is_any_alive(last, last, SPECS)
    assert trio.current_time() < 60.0
    assert not await is_any_alive(none, none, SPECS)
    assert not await is_any_alive(none, none, ())
