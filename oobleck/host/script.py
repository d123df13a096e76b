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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from oobleck.errors import ConfigError, UsageError, shown
from oobleck.job import ScriptSpec

from .handover import TrainReached, receiving

SCRIPT_WAITS = "OOBLECK_SCRIPT_WAITS"
"""An environment variable that is set where a script waits already, in a process of its own, for the run to end, or
where nothing of it is to run: neither callbacks nor the lines after its `train()`."""

SCRIPT_STREAM = "script://data"
"""The shard, among a job's, that is what its script gives one after the other."""

_MODULE = "__oobleck_script__"
_MAIN_MODULE = "__oobleck_main__"
_MAIN = "__main__"
_FUNCTION = "job"

_running: list[ScriptSpec] = []
"""The script that is run at this moment, if one is."""


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
        _check_kinds(model=model, loss=loss, data=data, eval_data=eval_data, optimizer=optimizer, lr_lambda=lr_lambda)
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


_KINDS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "model": ((str, Mapping), "settings, or a function that returns it"),
    "loss": ((), "a function"),
    "data": ((Mapping,), "settings, or a function that returns it"),
    "eval_data": ((), "a function that returns it"),
    "optimizer": ((Mapping,), "settings, or a function that makes it"),
    "lr_lambda": ((), "a function"),
}
"""What each argument of a `Job` may be besides a function, and all of that in words."""


def _check_kinds(**given: object) -> None:
    """Raise ConfigError for an argument that is neither settings nor a function."""
    for name, value in given.items():
        kinds, expected = _KINDS[name]
        if value is not None and not callable(value) and not isinstance(value, kinds):
            raise ConfigError(f"Job({name}=…): it must be {expected}, not {shown(value)}")


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
    module = types.ModuleType(_MODULE)
    module.__file__ = script.name
    with _blaming(script), _surroundings(script):
        _execute(module, script.source)
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
        with suppress(TrainReached), receiving(end):
            run_as_main(script)
        if not reached:
            raise never_trained(script)
        job: Job = reached[0].job()
    return job


def never_trained(script: ScriptSpec) -> ConfigError:
    """What is wrong with a script that has come to its end without saying what to train."""
    return ConfigError(
        f"{script.name} has come to its end without a call of `train()` of an oobleck.transformers.Trainer, and has "
        f"no function {_FUNCTION}() that returns an oobleck.Job; it needs one of the two"
    )


def run_as_main(script: ScriptSpec) -> None:
    """Run a script as `python` does, as the module `__main__`. Raises whatever it raises."""
    module = types.ModuleType(_MAIN)
    module.__file__ = str(Path(script.directory) / script.name)
    with _surroundings(script):
        _execute(module, script.source)


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
        raise ConfigError(blamed(error, script)) from error


def blamed(error: Exception, script: ScriptSpec) -> str:
    """An error of a script, with the script's name and the line where it came about."""
    files = (script.name, str(Path(script.directory) / script.name))
    line = next(filter(None, (_line_of(error, file) for file in files)), "")
    return f"{script.name}{line}: {type(error).__name__}: {error}"


def is_running_script() -> bool:
    """Whether a script is being run for its job, in this process and at this moment."""
    return bool(_running)


def module_of(name: str, source: str, directory: str) -> types.ModuleType:
    """Run the text of a file whose functions a job has, as a module that is not `__main__`; what `launch` writes does.

    `directory` is where it lies: what it imports is looked for there. Raises ConfigError for one that fails.
    """
    module = types.ModuleType(_MAIN_MODULE)
    module.__file__ = name
    _look_in(directory)
    try:
        _execute(module, source)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(_blamed(error, name)) from error
    return module


def _execute(module: types.ModuleType, source: str) -> None:
    sys.modules[module.__name__] = module  # dataclasses, among others, look their own module up
    exec(compile(source, str(module.__file__), "exec"), module.__dict__)  # noqa: S102  it is the user's own


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
    _look_in(script.directory)
    _running.append(script)
    try:
        yield
    finally:
        _running.pop()
        sys.argv = arguments


def _look_in(directory: str) -> None:
    """Have imports look in a directory first, where there is such a one."""
    if Path(directory).is_dir() and directory not in sys.path:
        sys.path.insert(0, directory)


def _blamed(error: Exception, name: str) -> str:
    """An error of a script, with the script's name and the line where it came about."""
    return f"{name}{_line_of(error, name)}: {type(error).__name__}: {error}"


def _line_of(error: BaseException, name: str) -> str:
    if isinstance(error, SyntaxError) and error.filename == name:
        return f":{error.lineno}"
    line = None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == name:
            line = trace.tb_lineno
        trace = trace.tb_next
    return "" if line is None else f":{line}"
