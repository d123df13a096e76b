"""`oobleck.launch`: starts a run from a job and keyword arguments."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from os import PathLike, fspath
from pathlib import Path

from oobleck.cli.common_options import base_dir_of
from oobleck.errors import ConfigError
from oobleck.host.script import Job, is_running_script

from .display import show_values_as_tables
from .master import MasterProcess
from .run import Run, failure_without_journal
from .words import environment_of, job_words, option_words, without_secrets_of


def launch(
    job: str | PathLike[str] | Mapping[str, object] | Job | Callable[[], Job] | None = None,
    *,
    hosts: str | PathLike[str] | None = None,
    arguments: Sequence[str] = (),
    base_dir: str | PathLike[str] | None = None,
    **options: object,
) -> Run:
    """Start a run, as `oobleck up` does, and return once its job is accepted. For example::

        run = oobleck.launch("train.py", hosts="hosts.txt")
        run = oobleck.launch({"model": "gpt2", "max_steps": 100}, local=4)
        run = oobleck.launch(oobleck.Job(model=layers, data=samples, max_steps=100), local=4, save_every="5m")

    Arguments:
        job: the path of a script (.py) or of a job file (.yaml); the keys of a job file; a `Job`; or a function that
            returns a `Job`. None is the default job. Functions of a `Job` must be at the top level of a file or of a
            notebook's cell, where workers find them: each worker runs the file that calls `launch` again, so the call
            belongs below `if __name__ == "__main__":`. A function that returns a `Job` may make any objects.
        hosts: the hostfile.
        arguments: the script's arguments.
        base_dir: the directory of all runs.
        options: the long options of `oobleck up`, as in `local=4`, `steps=100`, `hosts_from="./hosts.sh"`,
            `no_check=True`; `kill=["node2@20"]` and `set={"optimizer.learning_rate": 3e-4}` may hold several;
            `env={"NAME": "value"}`, or `env=["NAME"]` for their values here.

    Raises ConfigError or UsageError, with the message of `oobleck up`, for input that it refuses; RunFailed if the
    master fails at once for another reason.
    """
    # Each worker runs the file again, and must not start another run.
    if is_running_script():
        raise ConfigError(
            'launch() is called while this file is run for its job; put the call below `if __name__ == "__main__":`'
        )
    directory = base_dir_of(None if base_dir is None else Path(fspath(base_dir))).absolute()
    named = () if hosts is None else (fspath(hosts),)
    kept, own, secrets = without_secrets_of(job)
    variables = {**own, **environment_of(options.pop("env", None))}
    options["env"] = list(variables)  # a command line can be read by all users of this machine
    words = [*named, *option_words(options), *job_words(kept, tuple(arguments), directory)]
    given = {name: text for name, text in variables.items() if text is not None}
    master = MasterProcess(words, directory, {**secrets, **given})
    try:
        held = master.wait_until_accepted()
    except BaseException:
        # The caller gets no `Run` by which to stop the master.
        master.interrupt()
        raise
    if held is None:
        raise failure_without_journal(master)
    if text := master.words_so_far():
        with suppress(OSError, ValueError):
            sys.stderr.write(f"{text}\n")
    show_values_as_tables()
    return Run(master, held)
