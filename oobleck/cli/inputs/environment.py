"""Environment variables of a run, from `--env`, `--env-file` and the key `env` of a job.

Their values reach processes through this one's environment, and nodes through SSH. A job that leaves this module holds
their digests alone, so no journal, log or report can have a value.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from oobleck.cli.option_fields import option
from oobleck.errors import ConfigError, UsageError
from oobleck.host.user_path import expand_user
from oobleck.job import JobSpec
from oobleck.job.secrets import secret_digest, with_variables
from oobleck.runtime.files import BASE_DIR_VARIABLE, read_input
from oobleck.runtime.python_process import as_no_rank

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ELSEWHERE = {
    BASE_DIR_VARIABLE: "--base-dir names the directory",
    **dict.fromkeys(
        ("HOME", "TMPDIR"), "agents are found by it before they start; set it in the login shell's files on the nodes"
    ),
}


@dataclass(frozen=True, kw_only=True)
class EnvironmentOptions:
    panel: ClassVar[str] = "Code and environment"

    env: list[str] | None = option(
        "--env", "NAME[=VALUE]", "Give all processes this variable, by default with its value here; may be repeated."
    )
    env_file: list[Path] | None = option(
        "--env-file", "FILE", "Give all processes the variables of a file with lines NAME=VALUE or NAME; --env wins."
    )

    workdir: Path | None = option(
        "--workdir",
        "DIRECTORY",
        "Copy this directory to all nodes, without what git ignores; processes run in it and import from it.",
    )

    def variables(self) -> dict[str, str]:
        return read_variables(self.env or (), self.env_file or (), os.environ)


def read_variables(settings: Sequence[str], files: Sequence[Path], here: Mapping[str, str]) -> dict[str, str]:
    """Return variables in the order of their precedence, lowest first. Raises UserError that names option or line."""
    found: dict[str, str] = {}
    for file in files:
        # Not `splitlines`, which also splits at characters that values may have.
        for number, line in enumerate(read_input(file, "--env-file").split("\n"), 1):
            text = line.strip()
            if text and not text.startswith("#"):
                found |= _variable(text.removeprefix("export ").lstrip(), f"{file}:{number}", here, quoted=True)
    for setting in settings:
        found |= _variable(setting, "--env", here)
    return found


def _variable(text: str, place: str, here: Mapping[str, str], *, quoted: bool = False) -> dict[str, str]:
    name, equals, value = text.partition("=")
    if not _NAME.fullmatch(name):
        # The rest may be a secret.
        raise UsageError(f"{place}: {name!r} is no name of a variable; write NAME or NAME=VALUE")
    if not equals:
        if name not in here:
            raise UsageError(f"{place}: {name} is not set here; give its value, as in {name}=1")
        return {name: here[name]}
    if quoted:
        value = _unquoted(name, value, place)
    if "\0" in value:
        raise UsageError(f"{place}: the value of {name} has a zero byte, which no variable can have")
    return {name: value}


def _unquoted(name: str, value: str, place: str) -> str:
    quote = value[:1]
    if quote not in ("'", '"'):
        if re.search(r"\s#", value):
            why = f"the value of {name} has a # after a space; put the value in quotes, or a comment on its own line"
            raise UsageError(f"{place}: {why}")
        return value
    # Programs differ in what else quotes mean: lines that go on, backslashes, parts of a value.
    if len(value) < 2 or value[-1] != quote or quote in value[1:-1]:
        why = f"the value of {name} begins with a quote; the same must end it on this line, and not be within it"
        raise UsageError(f"{place}: {why}")
    return value[1:-1]


def read_workdir(named: Path) -> Path:
    """Return the directory that `--workdir` names. Raises UsageError."""
    path = expand_user(named).resolve()
    if not path.is_dir():
        raise UsageError(f"--workdir: there is no directory {named}")
    return path


def apply_environment(job: JobSpec, own: Mapping[str, str]) -> JobSpec:
    """Set a job's variables, then `own`, in this process's environment; return the job with digests for values.

    Raises ConfigError for a variable that the run sets itself.
    """
    values = {**job.env, **own}
    for name, why in _refused(values):
        raise ConfigError(f"env.{name}: {why}")
    os.environ.update(values)
    job = with_variables(job, os.environ)
    return replace(job, env={name: secret_digest((name, value)) for name, value in sorted(values.items())})


def _refused(values: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if name in _ELSEWHERE:
            yield name, _ELSEWHERE[name]
        elif not _NAME.fullmatch(name) or "\0" in value:
            yield name, "it is no name of a variable, or its value has a zero byte"
        elif not as_no_rank({name: value}):
            yield name, "the run places its processes itself; leave it out"
