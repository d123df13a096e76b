"""The job as a Python script: what `oobleck up HOSTFILE train.py -- --its-args` runs.

    from oobleck import Job

    def job():
        return Job(model={"type": "llama", "hidden_size": 512}, learning_rate=3e-4, max_steps=1000)

A script is one file. Its text travels with the job, so nodes need its imports but not the file. It runs once next to
`oobleck up`, for its settings, and once in every worker, for the objects that it makes, so it must not depend on where
or when it runs. This module imports only the standard library.

A script without a function `job` calls `train()` of an `oobleck.transformers.Trainer`. It runs as `__main__`, and in
workers it ends at that call.
"""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from oobleck.errors import ConfigError, UsageError, shown
from oobleck.job import ScriptSpec

from .handover import TrainReached, receiving

SCRIPT_WAITS = "OOBLECK_SCRIPT_WAITS"
"""An environment variable that is set if a script already waits for the run in its own process, or if neither its
callbacks nor the lines after its `train()` are to run."""

SCRIPT_ANSWERS = "answers"
"""The value of SCRIPT_WAITS with which the script that waits lets each step begin."""

SCRIPT_STREAM = "script://data"
"""The shard that stands for the samples of a job's script."""

GATHERS = "gathers"
"""The part of a Trainer's script that is there if it wants the weights of each evaluation's step."""

_MODULE = "__oobleck_script__"
_MAIN_MODULE = "__oobleck_main__"
_MAIN = "__main__"
_FUNCTION = "job"

_running: list[ScriptSpec] = []
"""The script that runs at this moment, if one does."""


class Job:
    """The result of a script's `job()`: settings, and functions that make what no setting can name.

    Arguments:
        model: settings of the model as in a job file, or a function that returns a transformers model or a list of
            layers.
        loss: for a list of layers, a function (output, labels, divisor) that returns this microbatch's share of the
            loss: a sum over its tokens, divided by `divisor`, which is the same for all microbatches of a step. The
            default is the loss of the next token.
        data: settings as in a job file, or a function that returns samples: any sequence whose items are tokens, at
            most `sequence_length`, or mappings of named arrays: `input_ids`, labels, masks.
        eval_data: a function like `data`, for evaluation.
        optimizer: settings, or a function from torch's parameter groups to an optimizer.
        lr_lambda: a function from a step's number, from 1, to a factor of the learning rate, as for torch's LambdaLR.
        streaming: `data` returns an iterable without a length, which yields the same samples in the same order each
            time. Each sample is in one step of an epoch, until `max_steps` or the last sample.
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
        _check_kinds(model=model, loss=loss, data=data, eval_data=eval_data, optimizer=optimizer, lr_lambda=lr_lambda)
        parts = {"model": model, "loss": loss, "data": data, "eval_data": eval_data, "optimizer": optimizer}
        self.made: Mapping[str, Callable[..., Any]] = {
            name: value for name, value in {**parts, "lr_lambda": lr_lambda}.items() if callable(value)
        }
        """The functions that were passed, keyed by argument."""
        self.callbacks = tuple(callbacks)
        plain = {name: value for name, value in parts.items() if value is not None and not callable(value)}
        self.settings: Mapping[str, Any] = {**settings, **plain}
        if streaming:
            if not callable(data):
                raise ConfigError("streaming: it is for data that a script makes; pass a function as `data`")
            self.settings = {**self.settings, "data": {"shards": [SCRIPT_STREAM]}}
        if callable(model):
            self.settings = {**self.settings, "model": {"type": "script"}}

    @property
    def provides(self) -> tuple[str, ...]:
        """The parts that workers get from the script."""
        return (*sorted(self.made), *(("callbacks",) if self.callbacks else ()))


# Each argument of a `Job` may have these types besides functions; errors name them by the words.
_KINDS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "model": ((str, Mapping), "settings, or a function that returns it"),
    "loss": ((), "a function"),
    "data": ((Mapping,), "settings, or a function that returns it"),
    "eval_data": ((), "a function that returns it"),
    "optimizer": ((Mapping,), "settings, or a function that makes it"),
    "lr_lambda": ((), "a function"),
}


def _check_kinds(**arguments: object) -> None:
    for name, value in arguments.items():
        kinds, expected = _KINDS[name]
        if value is not None and not callable(value) and not isinstance(value, kinds):
            raise ConfigError(f"Job({name}=…): it must be {expected}, not {shown(value)}")


def has_job(script: ScriptSpec) -> bool:
    """Return whether a script binds the name `job` at its top level; one without it runs to its `train()`."""
    try:
        body = ast.parse(script.source).body
    except (SyntaxError, ValueError):
        return True  # running it reports what is wrong
    return any(_FUNCTION in _names_bound(statement) for statement in body)


def _names_bound(statement: ast.stmt) -> Iterator[str]:
    is_scope = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    # The names in the body of a function or a class are local to it.
    for node in [statement] if is_scope else ast.walk(statement):
        match node:
            case ast.FunctionDef(name=name):
                yield name
            case ast.ImportFrom(names=names):
                yield from (alias.asname or alias.name for alias in names)
            case ast.Name(id=name, ctx=ast.Store()):
                yield name


def run_script(script: ScriptSpec) -> Job:
    """Run a script and its `job()`, or run it until its `train()`, with its arguments in `sys.argv`.

    Raises ConfigError if it fails, and UsageError if it exits, as argparse does for wrong arguments.
    """
    if not has_job(script):
        return _run_to_train(script)
    module = types.ModuleType(_MODULE)
    module.__file__ = script.name
    with _blaming(script), _surroundings(script):
        _execute(module, script.source)
        function: object = getattr(module, _FUNCTION, None)
        if not callable(function):
            raise ConfigError(f"{script.name}: it has no function {_FUNCTION}() that returns an oobleck.Job")
        job = function()
    if not isinstance(job, Job):
        raise ConfigError(f"{script.name}: {_FUNCTION}() returns {type(job).__name__}, not an oobleck.Job")
    return job


def _run_to_train(script: ScriptSpec) -> Job:
    reached: list[Any] = []

    def end(trainer: Any) -> None:
        reached.append(trainer)
        raise TrainReached(trainer)

    with _blaming(script):
        with suppress(TrainReached), receiving(end, in_worker=True):
            run_as_main(script)
        if not reached:
            raise never_trained(script)
        job: Job = reached[0].job()
    return job


def never_trained(script: ScriptSpec) -> ConfigError:
    """Return the error of a script that has reached its end without a job."""
    return ConfigError(
        f"{script.name} has reached its end without a call of `train()` of an oobleck.transformers.Trainer, and has "
        f"no function {_FUNCTION}() that returns an oobleck.Job; it needs one of the two"
    )


def run_as_main(script: ScriptSpec) -> None:
    """Run a script as `python` does, as the module `__main__`. Raises all that it raises."""
    module = types.ModuleType(_MAIN)
    module.__file__ = str(Path(script.directory) / script.name)
    with _surroundings(script):
        _execute(module, script.source)


@contextmanager
def _blaming(script: ScriptSpec) -> Iterator[None]:
    """Turn the exceptions of a script into errors that name its file and line."""
    try:
        yield
    # Our own errors name the place and what to change already.
    except (ConfigError, UsageError):
        raise
    except SystemExit as end:
        raise UsageError(f"{script.name} exits with {end.code} for the arguments {' '.join(script.arguments)}") from end
    # A user's code may fail in any way.
    except Exception as error:
        raise ConfigError(blamed(error, script)) from error


def blamed(error: Exception, script: ScriptSpec) -> str:
    """Return the message of a script's exception, with the script's name and line."""
    return _located(error, script.name, script.name, str(Path(script.directory) / script.name))


def _located(error: Exception, name: str, *files: str) -> str:
    line = next(filter(None, (_line_of(error, file) for file in files)), "")
    return f"{name}{line}: {type(error).__name__}: {error}"


def is_running_script() -> bool:
    """Return whether this process runs a script for its job at this moment."""
    return bool(_running)


def module_of(name: str, source: str, directory: str) -> types.ModuleType:
    """Run the text of a file as a module other than `__main__`; the scripts that `launch` writes call this.

    `directory` is that of the file, for its imports. Raises ConfigError if it fails.
    """
    module = types.ModuleType(_MAIN_MODULE)
    module.__file__ = name
    _look_in(directory)
    try:
        _execute(module, source)
    except ConfigError:
        raise
    # The user's lines may fail in any way.
    except Exception as error:
        raise ConfigError(_located(error, name, name)) from error
    return module


def _execute(module: types.ModuleType, source: str) -> None:
    # Dataclasses and pickle look a module up by its name.
    sys.modules[module.__name__] = module
    exec(compile(source, str(module.__file__), "exec"), module.__dict__)  # noqa: S102  it is the user's own


@contextmanager
def _surroundings(script: ScriptSpec) -> Iterator[None]:
    """Set a script's arguments, and let it import the modules of its directory."""
    arguments = sys.argv
    sys.argv = [script.name, *script.arguments]
    _look_in(script.directory)
    _running.append(script)
    try:
        yield
    finally:
        _running.pop()
        sys.argv = arguments


def _look_in(directory: str) -> None:
    """Put a directory first on the import path, if it exists."""
    if Path(directory).is_dir() and directory not in sys.path:
        sys.path.insert(0, directory)


def _line_of(error: BaseException, name: str) -> str:
    if isinstance(error, SyntaxError) and error.filename == name:
        return f":{error.lineno}"
    line = None
    trace = error.__traceback__
    while trace is not None:
        # The last match is the innermost line of the script: what follows it is a library's.
        if trace.tb_frame.f_code.co_filename == name:
            line = trace.tb_lineno
        trace = trace.tb_next
    return "" if line is None else f":{line}"
