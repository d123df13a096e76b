"""Identifies the script, and its arguments, whose states are in a place.

Scripts with the same name in two directories are two scripts. A script's text and its number of ranks may change
between runs.
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
"""The script whose states to use; a user sets it to continue from another script's states."""
_ARGUMENTS_VARIABLE = "OOBLECK_CHECKPOINT_ARGUMENTS"
_DEFAULT_TAG_VARIABLE = "OOBLECK_CHECKPOINT_DEFAULT_TAG"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptIdentity:
    """The script that saved states. Empty texts are not compared, because some launchers leave them unknown."""

    script: str = ""
    """The path, or the directory and the module or program."""
    arguments: str = ""
    default_tag: str = ""
    """The run's tag, unless the user named it; then the arguments must match, too."""

    @classmethod
    def of_environment(cls, environment: Mapping[str, str], *, main: str = "") -> ScriptIdentity:
        """`main` is the path of the running script, which counts where the launcher names none."""
        return cls(
            script=environment.get(SCRIPT_VARIABLE) or main,
            arguments=environment.get(_ARGUMENTS_VARIABLE, ""),
            default_tag=environment.get(_DEFAULT_TAG_VARIABLE, ""),
        )

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the variables for a rank; a script that the user names in `inherited` counts."""
        script = inherited.get(SCRIPT_VARIABLE) or self.script
        # A user who names another script's states continues from them on purpose, whatever its arguments were.
        default_tag = self.default_tag if script == self.script else ""
        return {SCRIPT_VARIABLE: script, _ARGUMENTS_VARIABLE: self.arguments, _DEFAULT_TAG_VARIABLE: default_tag}

    def check_script(self, note: PartNote, place: str) -> None:
        """Raise UsageError if another script saved the part."""
        if self.script and note.script and note.script != self.script:
            raise UsageError(
                f"the states in {place} were saved by {note.script}, and this is {self.script}; name another --tag, or "
                "another OOBLECK_CHECKPOINT_DIR. To continue from them with this script: "
                f"--env {SCRIPT_VARIABLE}={note.script} (under another launcher, in its environment)"
            )

    def check_arguments(self, note: PartNote, place: str) -> None:
        """Raise UsageError if the state was saved with other arguments and the user has not named the run."""
        if self.default_tag and note.arguments and note.arguments != self.arguments:
            raise UsageError(
                f"the newest state in {place} was saved with other arguments of the script; --tag {self.default_tag} "
                "continues from it with these, and another --tag begins again"
            )


def identity_of(run: RanksSpec) -> ScriptIdentity:
    digest = hashlib.sha256(json.dumps(run.command[1:]).encode()).hexdigest()[:16]
    script = os.path.normpath(os.path.join(run.directory, run.command[0]))
    if run.entry != "script":
        script = f"{os.path.normpath(run.directory)}: {run.kinds}"
    return ScriptIdentity(script=script, arguments=digest, default_tag="" if run.is_tag_given else run.tag)
