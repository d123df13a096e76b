from __future__ import annotations

import pytest

from oobleck.control.journal import Unreachable, WorkerEnded
from oobleck.control.protocol import ErrorKind, Raised
from oobleck.control.training.startup import StartupFailures


def failures(num_nodes: int, *noted: tuple[str, str, bool]) -> StartupFailures:
    found = StartupFailures(num_nodes)
    for node, reason, is_users in noted:
        error = WorkerEnded(pid=8, end=Raised(kind=ErrorKind.JOB, message=reason))
        found.note(node, error if is_users else Unreachable(problem=reason))
    return found


def told(found: StartupFailures) -> list[str]:
    """Return what is said of each reason."""
    return str(found).splitlines()[1:]


def test_nothing_noted_is_no_failure():
    assert not failures(4)
    assert failures(4, ("a", "why", False))


def test_a_reason_that_several_nodes_give_is_told_once():
    found = failures(4, ("b", "no trio", False), ("c", "refused", False), ("a", "no trio", False))
    assert told(found) == ["a, b: no trio", "c: refused"]


def test_a_reason_that_all_nodes_give_names_none():
    found = failures(2, ("a", "no such model", True), ("b", "no such model", True))
    assert told(found) == ["all 2 nodes: no such model"]


def test_the_only_node_is_named():
    assert told(failures(1, ("a", "refused", False))) == ["a: refused"]


def test_of_many_nodes_only_the_first_are_named():
    found = failures(30, *((f"n{index:02}", "refused", False) for index in range(12)))
    assert told(found) == ["n00, n01, n02, n03, n04, n05, n06, n07 and 4 more nodes: refused"]


@pytest.mark.parametrize(("users", "code"), [((True, True), 78), ((True, False), 1), ((False,), 1)])
def test_the_configuration_is_to_blame_when_nothing_else_is(users, code):
    assert failures(9, *((f"n{index}", "why", user) for index, user in enumerate(users))).exit_code == code
