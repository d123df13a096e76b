"""Where the pieces of sharded tensors lie."""

from __future__ import annotations

import math
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.errors import UsageError
from oobleck.storage.scripts import Sharding, overlap, resharded
from oobleck.storage.scripts.shards import Box, is_covered


def sharding(mesh: tuple[int, ...], cut: tuple[int, ...]) -> Sharding:
    return Sharding(device="cpu", mesh=mesh, cut=cut)


def elements(box: Box) -> set[tuple[int, ...]]:
    ranges = [range(start, start + size) for start, size in zip(box.starts, box.sizes, strict=True)]
    return set(product(*ranges))


MESHES = st.sampled_from(
    [sharding((n,), (cut,)) for n in (1, 2, 3, 5) for cut in (0, 1)]
    + [sharding((2, 3), cut) for cut in ((-1, 0), (0, 1), (0, 0), (1, -1), (-1, -1))]
    + [Sharding(device="cpu", mesh=(2, 3), cut=(0, 0), is_late=(True, False))]
)


@given(MESHES, st.tuples(st.integers(0, 7), st.integers(1, 5)))
def test_pieces_are_disjoint_and_all_there_is(of: Sharding, shape: tuple[int, int]) -> None:
    by_piece = {of.piece(rank): elements(of.box(rank, shape)) for rank in range(math.prod(of.mesh))}
    for rank in range(math.prod(of.mesh)):
        assert elements(of.box(rank, shape)) == by_piece[of.piece(rank)], "replicas are alike"
    assert sum(map(len, by_piece.values())) == math.prod(shape)
    assert set().union(*by_piece.values()) == elements(Box((0, 0), shape))


@given(MESHES, MESHES, st.tuples(st.integers(1, 7), st.integers(1, 5)))
def test_a_box_is_made_of_its_overlaps_with_another_arrangement(
    before: Sharding, now: Sharding, shape: tuple[int, int]
) -> None:
    box = now.box(0, shape)
    pieces = {before.piece(rank): before.box(rank, shape) for rank in range(math.prod(before.mesh))}
    shared = [found for each in pieces.values() if (found := overlap(each, box)) is not None]
    assert sum(len(elements(each)) for each in shared) == len(elements(box))
    assert set().union(*map(elements, shared)) == elements(box)


def test_chunks_are_as_torch_cuts_them() -> None:
    of = sharding((4,), (0,))
    assert [of.box(rank, (10,)).sizes[0] for rank in range(4)] == [3, 3, 3, 1]
    assert [of.box(rank, (5,)).sizes[0] for rank in range(4)] == [2, 2, 1, 0]
    assert of.box(1, (10,)).within(of.box(1, (10,))) == (slice(0, 3),)


def test_a_late_cut_cuts_what_the_others_have_left() -> None:
    of = Sharding(device="cpu", mesh=(2, 2), cut=(0, 0), is_late=(True, False))
    assert [of.box(rank, (8,)).starts[0] for rank in range(4)] == [0, 4, 2, 6]


def test_replicas_stand_in_for_each_other() -> None:
    hybrid = sharding((2, 2), (-1, 0))
    assert is_covered(hybrid, [0, 1])
    assert is_covered(hybrid, [0, 3])
    assert not is_covered(hybrid, [0, 2])
    assert is_covered(sharding((3,), (-1,)), [2])
    assert not is_covered(sharding((3,), (0,)), [0, 1])


def test_one_dimension_fits_any_number_of_ranks_and_more_only_the_same() -> None:
    assert resharded(sharding((4,), (0,)), 3).mesh == (3,)
    assert resharded(sharding((2, 2), (-1, 0)), 4).mesh == (2, 2)
    with pytest.raises(UsageError, match="a mesh of 2x2 ranks, and there are 3"):
        resharded(sharding((2, 2), (-1, 0)), 3)
