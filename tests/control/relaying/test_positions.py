"""The shape of the tree follows from positions alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from oobleck.control.relaying import child_towards, children_of, parent_of
from tests.examples import examples

positions, fanouts = st.integers(0, 50_000), st.integers(2, 64)


@examples(100)
@given(positions, fanouts)
def test_a_position_is_a_child_of_its_parent_alone(position: int, fanout: int):
    parent = parent_of(position, fanout)
    if parent is None:
        assert position < fanout
    else:
        assert position in children_of(parent, fanout)
        assert parent < position
        assert child_towards(parent, position, fanout) == position


@examples(100)
@given(positions, positions, fanouts)
def test_the_child_on_the_way_is_a_child_and_leads_there(position: int, target: int, fanout: int):
    above = [target]
    while (parent := parent_of(above[-1], fanout)) is not None:
        above.append(parent)
    towards = child_towards(position, target, fanout)
    if position in above[1:]:
        assert towards == above[above.index(position) - 1]
    else:
        assert towards is None


def test_three_levels_have_room_for_thirty_thousand():
    depths = [0] * 4
    for position in range(33_825):
        depth, at = 0, position
        while (parent := parent_of(at, 32)) is not None:
            depth, at = depth + 1, parent
        depths[depth] += 1
    assert depths == [32, 32 * 32, 32 * 32 * 32, 1]
