"""Whatever stands in the note of a part: it is read, or named as damaged; no reader fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oobleck.storage import Layout, TensorSpec
from oobleck.storage.scripts import (
    Chosen,
    Holding,
    PartNote,
    Sharding,
    choose,
    find_parts,
    remove_old,
    sources,
    state_name,
    write_part,
)

LAYOUT = Layout.of({0: [TensorSpec(name="weight", dtype="U8", shape=(8,))]}, metadata={})
CUT = Sharding(device="cpu", mesh=(1, 2), names=("outer", "inner"), cut=(-1, 0))
NOTE = PartNote(
    name=state_name(7, "s1-a"),
    step=7,
    start="s1-a",
    rank=0,
    world_size=2,
    number=3,
    saved_at="",
    is_planned=True,
    shardings=(CUT,),
)

odd = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 1 << 31, 1 << 63, 10**400, 1e308]),
    st.sampled_from(["", ".", "../..", "a\0b", "s99999999999999999999-x", "\ud800"]),
    st.integers(),
    st.text(max_size=8),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@pytest.fixture(name="note", scope="module")
def _note(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a note that is whole."""
    directory = tmp_path_factory.mktemp("states")
    write_part(directory, NOTE, LAYOUT, memoryview(bytearray(LAYOUT.size_bytes)), is_planned=True)
    (path,) = directory.rglob("*.json")
    return path


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, each in inner for place in places(each, (*path, key)))]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_a_damaged_note_is_read_or_named_and_nothing_fails(note: Path, data: st.DataObject) -> None:
    whole = note.read_bytes()
    root = {"note": json.loads(whole)}
    for _ in range(data.draw(st.integers(1, 3))):
        *parents, key = data.draw(st.sampled_from([place for place in places(root) if len(place) > 1]))
        holder: Any = root
        for each in parents:
            holder = holder[each]
        if data.draw(st.booleans()):
            del holder[key]
        else:
            holder[key] = data.draw(odd)
    text = json.dumps(root["note"]).encode("utf-8", "surrogatepass")
    if data.draw(st.integers(0, 4)) == 0:
        text = text[: data.draw(st.integers(0, len(text)))]
    problems: list[str] = []
    try:
        note.write_bytes(text)
        parts = list(find_parts(None, note.parent.parent, tell=problems.append))
        holdings = [Holding(viewer=0, place="disk", note=part.note) for part in parts]
        chosen = choose(holdings)
        if isinstance(chosen, Chosen):
            sources(chosen, rank=0, world_size=chosen.note.world_size)
        remove_old(note.parent.parent, start="s1-a")
    finally:
        note.write_bytes(whole)
    assert len(parts) + len(problems) == 1
    assert all(str(note.parent) in problem for problem in problems)


def test_a_whole_note_is_read(note: Path) -> None:
    (part,) = find_parts(None, note.parent.parent)
    assert part.note == NOTE


@pytest.mark.parametrize(
    ("mesh", "cut"), [((0,), (0,)), ((2,), ()), ((2,), (-2,)), ((2, 2), (0, 1)), ((1 << 40,), (0,)), ((-1, -2), (0, 0))]
)
def test_a_mesh_that_no_ranks_form_is_refused(note: Path, mesh: tuple[int, ...], cut: tuple[int, ...]) -> None:
    whole = note.read_text()
    said = json.loads(whole)
    said["note"]["shardings"][0] |= {"mesh": mesh, "cut": cut, "names": []}
    problems: list[str] = []
    try:
        note.write_text(json.dumps(said))
        assert list(find_parts(None, note.parent.parent, tell=problems.append)) == []
    finally:
        note.write_text(whole)
    assert "a mesh of" in problems[0]
