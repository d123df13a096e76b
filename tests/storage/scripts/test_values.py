"""A state's values as JSON and back."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.errors import CorruptCheckpoint, UsageError
from oobleck.storage.scripts import TreeNode, from_tree, to_tree

KEYS = st.one_of(st.text(max_size=3), st.integers(), st.booleans())
PLAIN = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5))
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
    ),
    max_leaves=10,
)


def refused(value: object, path: str) -> TreeNode:
    raise UsageError(f"{path}: {type(value).__name__}")


@given(VALUES)
def test_values_come_back_as_they_were(value: object) -> None:
    tree = json.loads(json.dumps(to_tree(value, refused)))
    back = from_tree(tree, lambda said: said)
    assert back == value
    assert repr(back) == repr(value), "types as well: 1 is not True, and a tuple is no list"


@pytest.mark.parametrize(("sign", "bits"), [(1, 1024), (-1, 1025), (1, 20_000), (-1, 20_000)])
def test_a_number_of_any_size_comes_back(sign: int, bits: int) -> None:
    value = sign * 2**bits
    tree = json.loads(json.dumps(to_tree({"state": (value, 1)}, refused)))
    assert from_tree(tree, lambda said: said) == {"state": (value, 1)}
    with pytest.raises(UsageError, match="the key"):
        to_tree({value: 1}, refused)


def test_what_cannot_be_stored_is_named_by_its_place() -> None:
    with pytest.raises(UsageError, match=r"^optimizer\.groups\.1\.fn: function$"):
        to_tree({"optimizer": {"groups": [{}, {"fn": refused}]}}, refused)
    with pytest.raises(UsageError, match=r"model: the key \(1, 2\) cannot be stored"):
        to_tree({"model": {(1, 2): 0}}, refused)


def test_a_mapping_comes_back_as_a_dict_and_a_leaf_as_the_caller_reads_it() -> None:
    tree = to_tree(OrderedDict(a={1, 2}), lambda value, path: [path, sorted(value)])  # type: ignore[call-overload]
    assert from_tree(tree, lambda said: said) == {"a": ["a", [1, 2]]}


def test_a_counter_stays_one() -> None:
    tree = json.loads(json.dumps(to_tree({"milestones": Counter({30: 1, 80: 2})}, refused)))
    back = from_tree(tree, lambda said: said)
    assert repr(back) == repr({"milestones": Counter({30: 1, 80: 2})})


class Zeros(dict[str, int]):
    def __missing__(self, key: str) -> int:
        return 0


class Counts(Counter[str]):
    pass


@pytest.mark.parametrize("value", [defaultdict(list), Zeros(), Counts()])
def test_a_dict_with_defaults_is_refused(value: object) -> None:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    with pytest.raises(UsageError, match=rf"^a\.b is a {kind}, which would come back as a dict, .*; save dict\(…\)"):
        to_tree({"a": {"b": value}}, refused)
    with pytest.raises(UsageError, match=f"^the state is a {kind}, "):
        to_tree(value, refused)


def test_what_is_nested_too_deep_is_refused_with_a_short_place() -> None:
    deep: dict[str, object] = {}
    for _ in range(200):
        deep = {"a": deep}
    cycle: list[object] = []
    cycle.append(cycle)
    for value, place in ((deep, "a.a.a"), (cycle, "0.0.0")):
        with pytest.raises(UsageError, match=rf"^{place}.*….*: nested more than 100 deep$") as caught:
            to_tree(value, refused)
        assert len(str(caught.value)) < 120


@pytest.mark.parametrize(
    "tree",
    [{"tuple": 1}, {"dict": [[1]]}, {"dict": [[[], 1]]}, {"counter": [1]}, {"other": 1}, {"int": "1"}, {"int": 5}, {}],
)
def test_a_damaged_tree_is_refused(tree: TreeNode) -> None:
    with pytest.raises(CorruptCheckpoint):
        from_tree(tree, lambda said: said)
