"""Whose states lie in a place."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oobleck.errors import UsageError
from oobleck.job.ranks import RanksSpec
from oobleck.storage.scripts import PartNote, ScriptIdentity, identity_of, state_name
from oobleck.storage.scripts.identity import SCRIPT_VARIABLE

RUN = RanksSpec(tag="train", entry="script", command=("train.py", "--lr", "1"), directory="/a", is_tag_given=False)


def given(run: RanksSpec, **inherited: str) -> ScriptIdentity:
    """What a rank of a run finds in its environment."""
    return ScriptIdentity.of_environment(identity_of(run).environment(inherited))


def saved(run: RanksSpec) -> PartNote:
    """What a rank of a run notes of a part."""
    whose = given(run)
    return PartNote(
        name=state_name(1, "s1-a"),
        step=1,
        start="s1-a",
        rank=0,
        world_size=1,
        number=1,
        saved_at="",
        is_planned=True,
        shardings=(),
        script=whose.script,
        arguments=whose.arguments,
    )


def check(run: RanksSpec, note: PartNote, **inherited: str) -> None:
    whose = given(run, **inherited)
    whose.check_script(note, "there")
    whose.check_arguments(note, "there")


@pytest.mark.parametrize("directory", ["/a", "/a/", "/a/b/.."])
def test_the_same_command_in_the_same_directory_continues(directory: str) -> None:
    check(replace(RUN, directory=directory), saved(RUN))


@pytest.mark.parametrize("run", [replace(RUN, directory="/b"), replace(RUN, entry="module", command=("train",))])
def test_another_script_is_refused_by_name_unless_the_user_says_that_it_is_the_same(run: RanksSpec) -> None:
    for asked in (run, replace(run, is_tag_given=True)):
        with pytest.raises(UsageError, match=rf"saved by /a/train\.py, and this is .*--env {SCRIPT_VARIABLE}=/a/"):
            check(asked, saved(RUN))
    check(run, saved(RUN), **{SCRIPT_VARIABLE: "/a/train.py"})


def test_a_module_of_another_directory_is_another_script() -> None:
    here = replace(RUN, entry="module", command=("package.train",))
    with pytest.raises(UsageError, match="-m package"):
        check(replace(here, directory="/b"), saved(here))
    check(here, saved(here))


def test_other_arguments_continue_only_where_the_user_names_the_run() -> None:
    other = replace(RUN, command=("train.py", "--lr", "2"))
    with pytest.raises(UsageError, match=r"with other arguments .* --tag train continues"):
        check(other, saved(RUN))
    check(replace(other, is_tag_given=True), saved(RUN))
    with pytest.raises(UsageError, match="with other arguments"):
        check(RUN, saved(replace(other, is_tag_given=True)))


def test_arguments_are_not_readable_in_what_is_saved() -> None:
    secret = saved(replace(RUN, command=("train.py", "--token", "hunter2")))
    assert "hunter2" not in repr(secret)


def test_states_of_which_nothing_is_known_are_taken() -> None:
    """Those of an earlier version, and of a script that another launcher has started."""
    check(RUN, replace(saved(RUN), script="", arguments=""))
    ScriptIdentity().check_script(saved(RUN), "there")
