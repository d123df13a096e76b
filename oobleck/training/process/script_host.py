"""Runs a script next to `oobleck up`, in a process of its own: `python -m oobleck.training.process.script_host WHAT`.

    describe    stdin: a ScriptSpec; stdout: its settings and what it makes, or a problem. Then, optionally, stdin: the
                JobSpec made of them; stdout: the outcome of its trials
    callbacks   stdin: a JobSpec, then the journal's entries, one JSON line each; stdout: "stop" when a callback asks
                for that, and failures of callbacks

The script's own output goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, BinaryIO, TextIO

from oobleck.control.journal import JournalEntry
from oobleck.errors import ConfigError, UnbuiltModel, UserError
from oobleck.host.script import SCRIPT_WAITS, blamed, run_script
from oobleck.host.streams import shield_scripts
from oobleck.job import JobSpec, ScriptSpec
from oobleck.training.forking import quick_imports
from oobleck.wire import decode_json

from .plain_trainers import refuse_plain_trainers


def main() -> int:
    """Do what the first argument names; returns the exit status."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    shield_scripts()
    if sys.argv[1] == "describe":
        _describe(sys.stdin.buffer, answers)
    else:
        _run_callbacks(sys.stdin.buffer, answers)
    return 0


def _describe(lines: BinaryIO, answers: TextIO) -> None:
    script = decode_json((ScriptSpec,), lines.readline())
    refuse_plain_trainers()
    made: Mapping[str, Callable[..., Any]] = {}

    def describe() -> dict[str, object]:
        nonlocal made
        job = run_script(script)
        _require_no_weights(job.callbacks)
        made = job.made
        return {"settings": job.settings, "provides": job.provides}

    _answer(describe, script, answers)
    if line := lines.readline():
        _answer(lambda: _tried(decode_json((JobSpec,), line), made), script, answers)


def _answer(make: Callable[[], dict[str, object]], script: ScriptSpec, answers: TextIO) -> None:
    try:
        answer = _as_text(make(), script)
    except UserError as error:
        is_unbuilt = isinstance(error, UnbuiltModel)
        problem = {"problem": str(error), "is_usage": not isinstance(error, ConfigError), "is_unbuilt": is_unbuilt}
        answer = json.dumps(problem)
    # The script's code makes the settings and the samples, and may fail in any way.
    except Exception as error:  # noqa: BLE001
        answer = json.dumps({"problem": blamed(error, script), "is_usage": False})
    answers.write(f"{answer}\n")
    answers.flush()


def _tried(job: JobSpec, made: Mapping[str, Callable[..., Any]]) -> dict[str, object]:
    """Try a job with what its script makes; returns a note for people."""
    # Describing a script needs no torch, which takes seconds to import.
    with quick_imports():
        from oobleck.training.assembly import try_out

    structure = try_out(job, made)
    if "model" in made and structure.keeps_buffers:
        return {
            "note": "the script's model() gives parameters or buffers values by itself: each worker builds the whole "
            "model once, in the host's memory, and training starts from these values"
        }
    return {"note": ""}


def _require_no_weights(callbacks: Iterable[object]) -> None:
    """Raise ConfigError for a callback that holds a model or parts of one, which no training would change."""
    if (torch := sys.modules.get("torch")) is None:
        return
    for callback in callbacks:
        for name, value in getattr(callback, "__dict__", {}).items():
            for each in value if isinstance(value, list | tuple) else (value,):
                if isinstance(each, (torch.nn.Module, torch.nn.Parameter)):
                    raise ConfigError(
                        f"Job(callbacks=…): {type(callback).__name__}.{name} is a {type(each).__name__}: callbacks run "
                        "next to the master, and the trained weights are on the nodes; leave it out, and read "
                        "checkpoints (`oobleck checkpoint export`)"
                    )


def _as_text(described: dict[str, object], script: ScriptSpec) -> str:
    try:
        return json.dumps(described)
    except TypeError as error:
        raise ConfigError(f"{script.name}: a setting is no plain value: {error}") from error


def _has_callbacks(job: JobSpec) -> bool:
    return job.script is not None and "callbacks" in job.script.provides and SCRIPT_WAITS not in os.environ


def _run_callbacks(lines: BinaryIO, answers: TextIO) -> None:
    from .callbacks import CallbackRunner, trackers

    job = decode_json((JobSpec,), lines.readline())
    own = run_script(job.script).callbacks if job.script is not None and _has_callbacks(job) else ()
    runner = CallbackRunner((*own, *trackers(job)), job)
    for line in lines:
        runner.take(decode_json(JournalEntry, line))
        while runner.failures:
            answers.write(f"failed {json.dumps(runner.failures.pop(0))}\n")
            answers.flush()
        if runner.wants_stop:
            answers.write("stop\n")
            answers.flush()


if __name__ == "__main__":
    sys.exit(main())
