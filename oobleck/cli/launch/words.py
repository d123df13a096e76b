"""Turns a job and keyword arguments into words of `oobleck up`; a job that is no path becomes a file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from functools import cache
from os import PathLike, fspath
from pathlib import Path

import typer

from oobleck.cli.inputs import did_you_mean, load_job
from oobleck.cli.up import up
from oobleck.errors import ConfigError, UsageError, shown
from oobleck.host.script import Job
from oobleck.host.user_path import expand_user
from oobleck.host.writing import write_whole
from oobleck.job.secrets import without_secrets
from oobleck.runtime.files import LAUNCHED_DIRECTORY, private_directory

from .script_text import script_text

_Job = str | PathLike[str] | Mapping[str, object] | Job | Callable[[], Job] | None
_MADE_OF = "the job given to launch()"
_ARGUMENTS = frozenset({"base_dir", "job"})  # arguments of `launch` itself
_OF_TERMINALS = frozenset(
    {"plain", "json", "dry_run", "until_eof", "detach", "help", "install_completion", "show_completion"}
)


@cache
def known_options() -> Mapping[str, tuple[str, bool]]:
    """Return the options of `oobleck up` for launched runs, keyed by keyword: the option, and whether it is a flag."""
    app = typer.Typer()
    app.command()(up)
    found: dict[str, tuple[str, bool]] = {}
    for parameter in typer.main.get_command(app).params:
        # An option may have a short name too, as `-f` and `--fault-threshold`.
        option = max(parameter.opts, key=len)
        keyword = option.removeprefix("--").replace("-", "_")
        if option.startswith("--") and keyword not in _ARGUMENTS | _OF_TERMINALS:
            found[keyword] = option, bool(getattr(parameter, "is_flag", False))
    return found


def option_words(options: Mapping[str, object]) -> Iterator[str]:
    """Yield these keyword arguments as words of a command line; None yields nothing.

    Raises UsageError for an unknown option, or a value that no command line can have.
    """
    known = known_options()
    for keyword, value in options.items():
        if keyword not in known:
            raise UsageError(f"launch() has no option {keyword!r}; {did_you_mean(keyword, known)}")
        option, is_flag = known[keyword]
        if is_flag:
            if not isinstance(value, bool):
                raise UsageError(f"{keyword}: expected True or False, got {shown(value)}")
            yield from (option,) if value else ()
        elif value is not None:
            yield from (f"{option}={text}" for text in _texts(keyword, value))


def environment_of(env: object) -> dict[str, str | None]:
    """Return the variables of a run, from values by name, or from names alone, which stand for values here."""
    match env:
        case None:
            return {}
        case str():
            return {env: None}
        case Mapping():
            return {str(name): next(iter(_texts(f"env.{name}", value))) for name, value in env.items()}
        case Sequence() if all(isinstance(name, str) and "=" not in name for name in env):
            return dict.fromkeys(env)
    raise UsageError("env: expected a mapping of names to values, or names of variables that are set here")


def _texts(keyword: str, value: object) -> list[str]:
    match value:
        case bool():
            pass
        case str() | int() | float():
            return [str(value)]
        case PathLike():
            return [str(fspath(value))]
        case Mapping() if keyword == "set":
            return [f"{key}={json.dumps(item)}" for key, item in value.items()]
        case Sequence():
            return [text for each in value for text in _texts(keyword, each)]
    raise UsageError(f"{keyword}: expected text, a number or a path, got {shown(value)}")


def without_secrets_of(job: _Job) -> tuple[_Job, dict[str, str], dict[str, str]]:
    """Return a job for a file, its variables, and those that `${NAME}` in the file stands for."""
    if not isinstance(job, Mapping | Job):
        return job, {}, {}
    settings, secrets = without_secrets(job if isinstance(job, Mapping) else job.settings)
    own: dict[str, str] = {}
    if isinstance(env := settings.get("env"), Mapping):
        own = {name: each if isinstance(each, str) else json.dumps(each) for name, each in env.items()}
        # What is no value is refused with the rest of the job.
        settings["env"] = {name: each for name, each in env.items() if not isinstance(each, bool | int | float | str)}
    if isinstance(job, Mapping):
        return settings, own, secrets
    kept = copy(job)
    kept.settings = settings
    return kept, own, secrets


def job_words(
    job: _Job,
    arguments: tuple[str, ...],
    base_dir: Path,
) -> list[str]:
    """Return the words that name a job, and its script's arguments. Raises UserError."""
    match job:
        case None:
            return []
        case str() | PathLike():
            return _of_path(Path(fspath(job)), arguments)
        case Mapping():
            return _of_settings(job, base_dir)
        case Job() if not job.provides:
            return _of_settings(job.settings, base_dir)
        case Job() | Callable():
            text, default_arguments = script_text(job)
            path = _written(text, "job.py", base_dir)
            return [str(path), "--", *(arguments or default_arguments)]
    raise UsageError(
        f"launch() takes a path, a job file's keys, an oobleck.Job or a function that returns one, not {shown(job)}"
    )


def _of_path(path: Path, arguments: tuple[str, ...]) -> list[str]:
    if path.suffix == ".py":
        return [str(expand_user(path)), "--", *arguments]
    if path.suffix not in (".yaml", ".yml", ".json"):
        raise UsageError(f"{path}: a job is a script (.py) or a job file (.yaml); give one of these")
    if arguments:
        raise UsageError(f"arguments: only a script takes them, and {path} is a job file; leave them out")
    return [f"--job={path}"]


def _of_settings(settings: Mapping[str, object], base_dir: Path) -> list[str]:
    try:
        text = json.dumps(dict(settings))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{_MADE_OF}: a setting is not a plain value: {error}") from error
    # The child would report an error of the job in its own words; here it names the caller's argument.
    load_job(text, source=_MADE_OF, has_lines=False)
    return [f"--job={_written(text, 'job.yaml', base_dir)}"]


def _written(text: str, name: str, base_dir: Path) -> Path:
    # Named for its content, the same job is the same file, by which a run without a master is recognised.
    directory = base_dir.resolve() / LAUNCHED_DIRECTORY / hashlib.sha256(text.encode()).hexdigest()[:12]
    try:
        base_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        private_directory(directory.parent)
        private_directory(directory)
        write_whole(directory / name, text)
    except OSError as error:
        raise ConfigError(f"base directory {base_dir}: {error.strerror}") from error
    return directory / name
