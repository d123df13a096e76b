"""`oobleck init` and `oobleck schema`: a job file to start from, and what editors need to complete and check one."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from oobleck.errors import UsageError
from oobleck.host.writing import write_in_place

from .inputs import job_schema

_JOB = """\
# yaml-language-server: $schema=./{schema}
# Train it here: oobleck up --local 4 --job {job}
# or on a cluster: oobleck up hosts.txt --job {job}
tag: {tag}
model:
  type: llama                # any decoder-only model type of transformers; or `path: DIRECTORY` with its weights
  hidden_size: 320
  intermediate_size: 864
  num_hidden_layers: 8
  num_attention_heads: 5
data:
  paths: []                  # your text files or directories; without any, Python's own sources are used
  sequence_length: 128
optimizer:
  learning_rate: 6e-4
  warmup_steps: 20
max_steps: 200
global_batch_size: 16
microbatch_size: 2
"""


def init(
    file: Annotated[Path, typer.Argument(help="The job file to write.")] = Path("job.yaml"),
) -> None:
    """Write a job file to start from, and next to it the schema by which editors complete its keys."""
    if file.exists():  # so does the empty name, which is this directory's
        raise UsageError(f"{file} exists already; name another file")
    if not str(file).isprintable():
        raise UsageError(f"{str(file)!r} has a character that cannot be printed; name another file")
    schema, job = file.with_name("job.schema.json"), shlex.quote(str(file))
    write_in_place(schema, json.dumps(job_schema(), indent=1) + "\n")
    # A tag has fewer characters than a file's name may have.
    tag = "".join(each if each.isalnum() and each.isascii() else "-" for each in file.stem).strip("-")[:40]
    write_in_place(file, _JOB.format(schema=schema.name, job=job, tag=tag or "job"))
    typer.echo(f"{file} is written; train it by `oobleck up --local 4 --job {job}`")


def schema() -> None:
    """Print the JSON schema of job files, which editors take for completion and checks."""
    typer.echo(json.dumps(job_schema(), indent=1))
