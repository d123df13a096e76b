"""Whose states lie in a place: of which script, and with which arguments.

Scripts of one name in two directories are two scripts. The text of a script may change between two runs, as may the
number of its ranks.
"""

from __future__ import annotations

import hashlib
import json
import os.path
from collections.abc import Mapping
from dataclasses import dataclass

from oobleck.errors import UsageError
from oobleck.job.ranks import RanksSpec

from .part import PartNote

SCRIPT_VARIABLE = "OOBLECK_CHECKPOINT_SCRIPT"
"""Which script's states these are; a user who sets it says that they are another one's."""
_ARGUMENTS_VARIABLE = "OOBLECK_CHECKPOINT_ARGUMENTS"
_DEFAULT_TAG_VARIABLE = "OOBLECK_CHECKPOINT_DEFAULT_TAG"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptIdentity:
    """A script, as states know it. Empty texts are not compared: a launcher of another kind says nothing."""

    script: str = ""
    """Its path, or the directory and the module or program."""
    arguments: str = ""
    """A digest of them."""
    default_tag: str = ""
    """The run's tag, if the user has not named one: then the arguments must be the same, too."""

    @classmethod
    def of_environment(cls, environment: Mapping[str, str]) -> ScriptIdentity:
        """Return what a rank was given."""
        return cls(
            script=environment.get(SCRIPT_VARIABLE, ""),
            arguments=environment.get(_ARGUMENTS_VARIABLE, ""),
            default_tag=environment.get(_DEFAULT_TAG_VARIABLE, ""),
        )

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return what a rank is given; a script that the user names in what it inherits is that one."""
        script = inherited.get(SCRIPT_VARIABLE) or self.script
        default_tag = self.default_tag if script == self.script else ""
        return {SCRIPT_VARIABLE: script, _ARGUMENTS_VARIABLE: self.arguments, _DEFAULT_TAG_VARIABLE: default_tag}

    def check_script(self, note: PartNote, place: str) -> None:
        """Raise UsageError for a part that another script has saved."""
        if self.script and note.script and note.script != self.script:
            raise UsageError(
                f"the states in {place} were saved by {note.script}, and this is {self.script}; name another --tag, or "
                "another OOBLECK_CHECKPOINT_DIR. To continue from them with this script: "
                f"--env {SCRIPT_VARIABLE}={note.script}"
            )

    def check_arguments(self, note: PartNote, place: str) -> None:
        """Raise UsageError for a state that was saved with other arguments, where the user has named no run."""
        if self.default_tag and note.arguments and note.arguments != self.arguments:
            raise UsageError(
                f"the newest state in {place} was saved with other arguments of the script; --tag {self.default_tag} "
                "continues from it with these, and another --tag begins again"
            )


def identity_of(run: RanksSpec) -> ScriptIdentity:
    """Return whose states a run saves, with a digest of its arguments in their place."""
    digest = hashlib.sha256(json.dumps(run.command[1:]).encode()).hexdigest()[:16]
    script = os.path.normpath(os.path.join(run.directory, run.command[0]))
    if run.entry != "script":
        script = f"{os.path.normpath(run.directory)}: {run.kinds}"
    return ScriptIdentity(script=script, arguments=digest, default_tag="" if run.is_tag_given else run.tag)
