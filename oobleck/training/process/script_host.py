"""Runs a script beside `oobleck up`, in a process of its own: `python -m oobleck.training.process.script_host WHAT`.

    describe    a ScriptSpec on stdin; its settings and what it makes on stdout, or what is wrong with it
    callbacks   a JobSpec on stdin, then the journal's entries, one JSON line each; "stop" on stdout when a callback
                wants that

What the script itself prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from typing import BinaryIO, TextIO

from oobleck.control.journal import JournalEntry
from oobleck.errors import ConfigError, UserError
from oobleck.host.script import blamed, run_script
from oobleck.host.streams import shield_scripts
from oobleck.job import JobSpec, ScriptSpec
from oobleck.wire import decode_json

from .plain_trainers import refuse_plain_trainers


def main() -> int:
    """Do what the first argument says; returns the exit status."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    shield_scripts()
    if sys.argv[1] == "describe":
        _describe(sys.stdin.buffer.readline(), answers)
    else:
        _run_callbacks(sys.stdin.buffer, answers)
    return 0


def _describe(line: bytes, answers: TextIO) -> None:
    script = decode_json((ScriptSpec,), line)
    refuse_plain_trainers()
    try:
        job = run_script(script)
        answer = _as_text({"settings": job.settings, "provides": job.provides}, script)
    except UserError as error:
        answer = json.dumps({"problem": str(error), "is_usage": not isinstance(error, ConfigError)})
    # What settings are made of is the user's own, samples and all, and may fail in any way.
    except Exception as error:  # noqa: BLE001
        answer = json.dumps({"problem": blamed(error, script), "is_usage": False})
    answers.write(answer)
    answers.flush()


def _as_text(described: dict[str, object], script: ScriptSpec) -> str:
    try:
        return json.dumps(described)
    except TypeError as error:
        raise ConfigError(f"{script.name}: a setting is no plain value: {error}") from error


def _run_callbacks(lines: BinaryIO, answers: TextIO) -> None:
    from .callbacks import CallbackRunner

    job = decode_json((JobSpec,), lines.readline())
    assert job.script is not None
    runner = CallbackRunner(run_script(job.script).callbacks, job)
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
