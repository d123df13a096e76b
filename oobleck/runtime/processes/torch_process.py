"""What takes torch, without loading it into this process: a process of its own answers, as long as that takes."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from oobleck.errors import ConfigError, ExitCode, ResourceLost
from oobleck.host.writing import write_in_place
from oobleck.job import JobSpec
from oobleck.runtime.python_process import as_no_rank, module_command
from oobleck.wire import encode_json

_OUTLINE_S = 120.0
_TOKENIZER = "tokenizer.json"


def _answer_of(module: str, *arguments: str, said: bytes = b"", failed: str, timeout_s: float | None = None) -> str:
    """Return what one of our modules prints that reads `said`.

    Raises ConfigError with its last line for input that cannot be used, ResourceLost that begins with `failed`.
    """
    command = module_command(module, *arguments)
    try:
        done = subprocess.run(
            command, input=said, capture_output=True, timeout=timeout_s, check=False, env=as_no_rank()
        )
    except subprocess.TimeoutExpired as error:
        raise ResourceLost(f"{failed}: it took more than {timeout_s:g} s") from error
    if done.returncode:
        last_line = (done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        if done.returncode == ExitCode.CONFIG:
            raise ConfigError(last_line)
        raise ResourceLost(f"{failed}: {last_line}")
    return done.stdout.decode()


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
    """Ask for the outline of the job's model; takes as long as torch takes to import.

    The vocabulary counts as the job asks for it; a tokenizer that finds too little text for it has a smaller one.

    Raises ConfigError for a model that cannot be, ResourceLost when the process fails or takes more than two minutes.
    """
    module, failed = "oobleck.training.process.outline", "the model's outline could not be made"
    answer = json.loads(_answer_of(module, said=encode_json(job), failed=failed, timeout_s=_OUTLINE_S))
    layers = tuple(
        LayerOutline(name=each["name"], parameters=each["parameters"], trained=each["trained"])
        for each in answer["layers"]
    )
    return ModelOutline(config=answer["config"], layers=layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredProfile:
    key: str
    """Under which runs look for it."""
    profile_json: str
    was_cached: bool


def run_profiler(job: JobSpec, *, cache_dir: Path, profile_dir: Path, num_workers: int, fresh: bool) -> MeasuredProfile:
    """Have the layers measured, unless `profile_dir` has what would be found and `fresh` is false.

    `num_workers` is how many workers are to share this machine. Takes as long as the data and the measurement do.
    Raises ConfigError for a job that cannot be, ResourceLost when the process fails.
    """
    arguments = (str(cache_dir), str(profile_dir), str(num_workers), "fresh" if fresh else "cached")
    module, failed = "oobleck.training.process.profile_job", "the profile could not be measured"
    answer = json.loads(_answer_of(module, *arguments, said=encode_json(job), failed=failed))
    return MeasuredProfile(key=answer["key"], profile_json=answer["profile"], was_cached=answer["was_cached"])


def convert(what: str, source: Path, target: Path) -> str:
    """Run `hf` or `peft`, which export a checkpoint, or `import`, from one path to another; returns what it said.

    Raises ConfigError for input that cannot be used, ResourceLost when the process fails.
    """
    module, failed = "oobleck.training.checkpoint.conversion", "the checkpoint could not be converted"
    return _answer_of(module, what, str(source), str(target), failed=failed).strip()


def find_tokenizer(cache_dir: Path, data_digest: str) -> Path | None:
    """Find the tokenizer that text of this digest was cut with, in a cache that training has filled."""
    for manifest in cache_dir.glob("*/manifest.json") if data_digest else ():
        with suppress(OSError, ValueError, KeyError, TypeError):  # another writes it, or it is of another version
            found = manifest.with_name(_TOKENIZER)
            if json.loads(manifest.read_bytes())["digest"] == data_digest and found.is_file():
                return found
    return None


def write_tokenizer(source: Path, target: Path) -> None:
    """Put a tokenizer where transformers' AutoTokenizer looks for it. Raises ResourceLost."""
    try:
        shutil.copyfile(source, target / _TOKENIZER)
        text = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}, indent=2)
        write_in_place(target / "tokenizer_config.json", text + "\n")
    except OSError as error:
        raise ResourceLost(f"the tokenizer could not be written to {target}: {error.strerror}") from error
