"""Answers questions that need torch, in separate processes, so that this one does not load it."""

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

_TOKENIZER = "tokenizer.json"


def _answer_of(module: str, *arguments: str, stdin: bytes = b"", failed: str) -> str:
    """Run one of our modules and return its output.

    Raises ConfigError with its last line for unusable input, ResourceLost that begins with `failed` otherwise.
    """
    command = module_command(module, *arguments)
    done = subprocess.run(command, input=stdin, capture_output=True, check=False, env=as_no_rank())
    if done.returncode:
        last_line = (done.stderr.decode(errors="replace").strip().splitlines() or ["it printed nothing"])[-1]
        if done.returncode == ExitCode.CONFIG:
            raise ConfigError(last_line)
        raise ResourceLost(f"{failed}: {last_line}")
    return done.stdout.decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOutline:
    """The size of a layer; a parameter that is tied across layers counts in each of them."""

    name: str
    parameters: int
    trained: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOutline:
    """A model's layers, and the part of its configuration that determines its shape."""

    config: Mapping[str, bool | int | float | str]
    layers: tuple[LayerOutline, ...]


def outline_of(job: JobSpec) -> ModelOutline:
    """Return the outline of the job's model; takes as long as importing torch.

    The vocabulary has the size that the job names, although the tokenizer makes it smaller for a short text. Raises
    ConfigError for an impossible model, ResourceLost if the process fails.
    """
    module, failed = "oobleck.training.process.outline", "the model's outline could not be made"
    answer = json.loads(_answer_of(module, stdin=encode_json(job), failed=failed))
    layers = tuple(
        LayerOutline(name=each["name"], parameters=each["parameters"], trained=each["trained"])
        for each in answer["layers"]
    )
    return ModelOutline(config=answer["config"], layers=layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredProfile:
    key: str
    profile_json: str
    was_cached: bool


def run_profiler(job: JobSpec, *, cache_dir: Path, profile_dir: Path, num_workers: int, fresh: bool) -> MeasuredProfile:
    """Measure the job's layers, or return the profile in `profile_dir` unless `fresh`.

    `num_workers` workers are to share this machine. Takes as long as preparing the data and measuring. Raises
    ConfigError for an impossible job, ResourceLost if the process fails.
    """
    arguments = (str(cache_dir), str(profile_dir), str(num_workers), "fresh" if fresh else "cached")
    module, failed = "oobleck.training.process.profile_job", "the profile could not be measured"
    answer = json.loads(_answer_of(module, *arguments, stdin=encode_json(job), failed=failed))
    return MeasuredProfile(key=answer["key"], profile_json=answer["profile"], was_cached=answer["was_cached"])


def convert(what: str, source: Path, target: Path, *, model: str | None = None) -> str:
    """Export a checkpoint (`what` is `hf`, `peft` or `dcp`) or import one (`import`); return the converter's output.

    `model` is the model's directory or name of the hub, for a directory of torch's distributed checkpoints.

    Raises ConfigError for unusable input, ResourceLost if the process fails.
    """
    module, failed = "oobleck.training.checkpoint.conversion", "the checkpoint could not be converted"
    words = (what, str(source), str(target), *(() if model is None else (model,)))
    return _answer_of(module, *words, failed=failed).strip()


def find_tokenizer(cache_dir: Path, data_digest: str) -> Path | None:
    """Find the tokenizer for text with this digest, in a cache that training has filled."""
    for manifest in cache_dir.glob("*/manifest.json") if data_digest else ():
        with suppress(OSError, ValueError, KeyError, TypeError):  # it is being written, or from another version
            tokenizer = manifest.with_name(_TOKENIZER)
            if json.loads(manifest.read_bytes())["digest"] == data_digest and tokenizer.is_file():
                return tokenizer
    return None


def write_tokenizer(source: Path, target: Path) -> None:
    """Copy a tokenizer to where transformers' AutoTokenizer looks for it. Raises ResourceLost."""
    try:
        shutil.copyfile(source, target / _TOKENIZER)
        text = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}, indent=2)
        write_in_place(target / "tokenizer_config.json", text + "\n")
    except OSError as error:
        raise ResourceLost(f"the tokenizer could not be written to {target}: {error.strerror}") from error
