"""What a job's model is made of, without loading torch into this process: a process of its own reports it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from oobleck.errors import ConfigError, ResourceLost
from oobleck.job import JobSpec
from oobleck.runtime.python_process import as_no_rank, module_command
from oobleck.wire import encode_json

_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOutline:
    """One layer; a parameter that is tied across layers counts in each of them."""

    name: str
    parameters: int
    trained: int
    """Of the parameters, those that are not frozen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOutline:
    """A model's layers, and the part of its configuration that determines its shape."""

    config: Mapping[str, bool | int | float | str]
    layers: tuple[LayerOutline, ...]


def outline_of(job: JobSpec) -> ModelOutline:
    """Ask a child process for the outline of the job's model; takes as long as torch takes to import.

    The vocabulary counts as the job asks for it; a tokenizer that finds too little text for it has a smaller one.

    Raises ConfigError for a model that cannot be, ResourceLost when the process fails or takes more than two minutes.
    """
    command = module_command("oobleck.training.process.outline")
    try:
        done = subprocess.run(
            command,
            input=encode_json(job).decode(),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
            env=as_no_rank(),
        )
    except subprocess.TimeoutExpired as error:
        raise ResourceLost(f"the model's outline took more than {_TIMEOUT_S:g} s") from error
    last_line = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    if done.returncode == 78:
        raise ConfigError(last_line)
    if done.returncode != 0:
        raise ResourceLost(f"the model's outline could not be made: {last_line}")
    answer = json.loads(done.stdout)
    return ModelOutline(
        config=answer["config"],
        layers=tuple(
            LayerOutline(name=each["name"], parameters=each["parameters"], trained=each["trained"])
            for each in answer["layers"]
        ),
    )
