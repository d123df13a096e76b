"""The job as a Python script: what `oobleck up HOSTFILE train.py -- --its-args` runs.

    from oobleck import Job

    def job():
        return Job(model={"type": "llama", "hidden_size": 512}, learning_rate=3e-4, max_steps=1000)

A script is one file. Its text travels with the job, so the nodes need not have it; what it imports they need. It is
run once where `oobleck up` is, for its settings, and once in every worker, for what it makes: so it must not depend on
where or when it runs. Loads nothing but the standard library.

A script without a function `job` is one that calls `train()` of an `oobleck.transformers.Trainer`. It runs as
`__main__`, and ends there wherever it runs for what it makes.
"""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import ConfigError, UsageError
from .handover import TrainReached, receiving
from .job import ScriptSpec

__all__ = ["SCRIPT_STREAM", "Job", "has_job", "run_as_main", "run_script"]

SCRIPT_STREAM = "script://data"
"""The shard, among a job's, that is what its script gives one after the other."""

_MODULE = "__oobleck_script__"
_MAIN = "__main__"
_FUNCTION = "job"


class Job:
    """What a script's `job()` returns: settings, and what makes things that no setting can name.

    Arguments:
        model: settings of the model as in a job file, or a function that returns a transformers model or a list of
            layers.
        loss: with a list of layers, (output, labels, divisor, the same for all microbatches of a step) -> this
            microbatch's share of the loss: a sum over its tokens, divided; that of the next token where it is left out.
        data: settings as in a job file, or a function that returns samples: anything with a length whose items are
            tokens, at most `sequence_length`, or mappings of named arrays: `input_ids`, labels, masks.
        eval_data: a function like that, for evaluation.
        optimizer: settings, or a function from torch's parameter groups to an optimizer.
        lr_lambda: from a step's number, from 1, to a factor of the learning rate, as torch's LambdaLR takes it.
        streaming: `data` returns something to iterate over that has no length: a new iteration each time, which gives
            the same samples in the same order. Each is in one step an epoch, until `max_steps`, or there are no more.
        callbacks: objects with the events of transformers' `TrainerCallback`, and `on_recovery`.
        settings: any other key of a job file, and those of `TrainingArguments` that mean the same.
    """

    def __init__(
        self,
        *,
        model: str | Mapping[str, Any] | Callable[[], Any] | None = None,
        loss: Callable[..., Any] | None = None,
        data: Mapping[str, Any] | Callable[[], Any] | None = None,
        eval_data: Callable[[], Any] | None = None,
        optimizer: Mapping[str, Any] | Callable[..., Any] | None = None,
        lr_lambda: Callable[[int], float] | None = None,
        callbacks: Sequence[object] = (),
        streaming: bool = False,
        **settings: Any,
    ) -> None:
        parts = {"model": model, "loss": loss, "data": data, "eval_data": eval_data, "optimizer": optimizer}
        self.made: Mapping[str, Callable[..., Any]] = {
            name: value for name, value in {**parts, "lr_lambda": lr_lambda}.items() if callable(value)
        }
        """What the script makes itself, by the names of the arguments."""
        self.callbacks = tuple(callbacks)
        given = {name: value for name, value in parts.items() if value is not None and not callable(value)}
        self.settings: Mapping[str, Any] = {**settings, **given}
        if streaming:
            if not callable(data):
                raise ConfigError("streaming: it is for data that a script makes; give a function as `data`")
            self.settings = {**self.settings, "data": {"shards": [SCRIPT_STREAM]}}
        if callable(model):
            self.settings = {**self.settings, "model": {"type": "script"}}

    @property
    def provides(self) -> tuple[str, ...]:
        """What is to be asked of the script wherever it runs."""
        return (*sorted(self.made), *(("callbacks",) if self.callbacks else ()))


def has_job(script: ScriptSpec) -> bool:
    """Return whether a script has something called `job` at its top level: it is asked for that, and else run to its
    `train()`. One that cannot be read is said to have one: running it says what is wrong.
    """
    try:
        body = ast.parse(script.source).body
    except (SyntaxError, ValueError):
        return True
    names = {name for statement in body for name in _names_bound(statement)}
    return _FUNCTION in names


def _names_bound(statement: ast.stmt) -> Iterator[str]:
    is_scope = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    for node in [statement] if is_scope else ast.walk(statement):
        match node:
            case ast.FunctionDef(name=name):
                yield name
            case ast.ImportFrom(names=names):
                yield from (alias.asname or alias.name for alias in names)
            case ast.Name(id=name, ctx=ast.Store()):
                yield name


def run_script(script: ScriptSpec) -> Job:
    """Run a script, and its `job()`, or until its `train()`; its arguments are in `sys.argv` meanwhile.

    Raises ConfigError for one that fails, and UsageError for one that exits (argparse does, for wrong arguments).
    """
    if not has_job(script):
        return _run_to_train(script)
    module = _new_module(script, _MODULE)
    with _blaming(script), _surroundings(script):
        sys.modules[_MODULE] = module  # dataclasses, among others, look their own module up
        _execute(script, module)
        job = _function(module, script)()
    if not isinstance(job, Job):
        raise ConfigError(f"{script.name}: {_FUNCTION}() returns {type(job).__name__}, not an oobleck.Job")
    return job


def _run_to_train(script: ScriptSpec) -> Job:
    """Run a script until it hands a trainer over, which ends it."""
    reached: list[Any] = []

    def end(trainer: Any) -> None:
        reached.append(trainer)
        raise TrainReached(trainer)

    with _blaming(script):
        try:
            with receiving(end):
                run_as_main(script)
        except TrainReached:
            pass
        if not reached:
            raise ConfigError(
                f"{script.name} has come to its end without a call of `train()` of an oobleck.transformers.Trainer, "
                f"and has no function {_FUNCTION}() that returns an oobleck.Job; it needs one of the two"
            )
        job: Job = reached[0].job()
    return job


def run_as_main(script: ScriptSpec) -> None:
    """Run a script as `python` does, as the module `__main__`. Raises whatever it raises."""
    module = _new_module(script, _MAIN)
    with _surroundings(script):
        sys.modules[_MAIN] = module
        _execute(script, module)


def _new_module(script: ScriptSpec, name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__file__ = str(Path(script.directory) / script.name) if name == _MAIN else script.name
    return module


def _execute(script: ScriptSpec, module: types.ModuleType) -> None:
    exec(compile(script.source, script.name, "exec"), module.__dict__)  # noqa: S102  it is the user's own


@contextmanager
def _blaming(script: ScriptSpec) -> Iterator[None]:
    """Turn what a script raises into errors that name it, and the line where that came about."""
    try:
        yield
    except (ConfigError, UsageError):
        raise
    except SystemExit as end:
        raise UsageError(f"{script.name} exits with {end.code} for the arguments {' '.join(script.arguments)}") from end
    # It is somebody else's code, and may fail in any way.
    except Exception as error:
        raise ConfigError(f"{script.name}{_line_of(error, script)}: {type(error).__name__}: {error}") from error


def _function(module: types.ModuleType, script: ScriptSpec) -> Callable[[], object]:
    function: object = getattr(module, _FUNCTION, None)
    if not callable(function):
        raise ConfigError(f"{script.name}: it has no function {_FUNCTION}() that returns an oobleck.Job")
    return function


@contextmanager
def _surroundings(script: ScriptSpec) -> Iterator[None]:
    """What a script finds around it: its arguments, and the modules beside it where its directory is."""
    arguments = sys.argv
    sys.argv = [script.name, *script.arguments]
    if Path(script.directory).is_dir() and script.directory not in sys.path:
        sys.path.insert(0, script.directory)
    try:
        yield
    finally:
        sys.argv = arguments


def _line_of(error: BaseException, script: ScriptSpec) -> str:
    """The line of the script where an error came about."""
    if isinstance(error, SyntaxError) and error.filename == script.name:
        return f":{error.lineno}"
    line = None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == script.name:
            line = trace.tb_lineno
        trace = trace.tb_next
    return "" if line is None else f":{line}"
