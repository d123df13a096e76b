"""Options about the model, the devices and the batch, of the commands that compute a plan: `plan` and `sim`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, cast, get_args

import typer

from oobleck.errors import UsageError
from oobleck.job import MAX_CHUNKS, MAX_DEVICES, MAX_NODES, ScheduleName

from .options import MAX_BATCH, MAX_TOKENS
from .values import whole

DevicesPerNodeOption = Annotated[
    int, typer.Option("--gpus-per-node", metavar="G", parser=whole(1, MAX_DEVICES), help="Devices of each node.")
]

FaultThresholdOption = Annotated[
    int,
    typer.Option(
        "-f",
        "--fault-threshold",
        metavar="F",
        parser=whole(0, MAX_NODES),
        help="Number of simultaneous node failures that never cost state.",
    ),
]

ChunksOption = Annotated[
    int,
    typer.Option(
        "--chunks", metavar="V", parser=whole(2, MAX_CHUNKS), help="Chunks of layers in each interleaved stage."
    ),
]

PipelinesOption = Annotated[
    int | None,
    typer.Option(
        "--pipelines", metavar="P", parser=whole(1, MAX_NODES), help="Ask the planner for exactly P pipelines."
    ),
]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """What layers cost: a profile that was measured, or a model and a device to estimate it by."""

    profile_file: Annotated[
        Path | None, typer.Option("--profile", metavar="FILE", help="JSON profile of the model on a device.")
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="NAME", help="Estimate for this model: gpt3-6.7b, …, or a transformers config.json."
        ),
    ] = None
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="NAME",
            help="Estimate for this device: A40, A100, H100, H200, CPU, or a data sheet (.json).",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """What a step computes."""

    global_batch: Annotated[
        int, typer.Option("--global-batch", metavar="B", parser=whole(1, MAX_BATCH), help="Samples in one step.")
    ]
    microbatch: Annotated[
        int | None,
        typer.Option(
            "--microbatch",
            metavar="b",
            parser=whole(1, MAX_BATCH),
            help="Samples in one microbatch; a profile sets its own.",
        ),
    ] = None
    sequence_length: Annotated[
        int | None,
        typer.Option(
            "--sequence-length",
            metavar="T",
            parser=whole(1, MAX_TOKENS),
            help="Tokens in a sample; a profile sets its own.",
        ),
    ] = None
    precision: Annotated[
        str,
        typer.Option("--precision", metavar="NAME", help="float32 or bfloat16, of estimates and of the device's peak."),
    ] = "bfloat16"
    recompute: Annotated[
        bool, typer.Option("--activation-checkpointing", help="Estimate with activation recomputation.")
    ] = False


def parse_schedule_name(name: str) -> ScheduleName:
    """Return the name of a schedule. Raises UsageError for another."""
    known = get_args(ScheduleName)
    if name not in known:
        raise UsageError(f"--schedule is {name!r}; it must be one of {', '.join(known)}")
    return cast("ScheduleName", name)
