"""Describes a model in a process of its own: `python -m oobleck.training.process.outline`.

It serves processes that must not load torch. It reads the job as a line of JSON from stdin and answers in JSON; a
problem of the job is a message on stderr, with the exit status 78. It allocates no memory for the model.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from oobleck.host.streams import answer_with
from oobleck.job import JobSpec
from oobleck.planner.profiles import CONFIG_KEYS
from oobleck.training.forking import quick_imports
from oobleck.wire import decode_json

if TYPE_CHECKING:
    from oobleck.training.model import ModelStructure


def main() -> int:
    """Read the job, print the outline; returns the exit status."""
    job = decode_json((JobSpec,), sys.stdin.readline())
    return answer_with(lambda: json.dumps(outline_of_job(job)))


def outline_of_job(job: JobSpec) -> dict[str, object]:
    """Return the shape and the layers of the job's model.

    Raises UserError for an impossible model or optimizer, or a model that devices cannot share.
    """
    with quick_imports():
        from oobleck.training.assembly import try_out

    structure = try_out(job)
    values = {key: getattr(structure.config, key, None) for key in CONFIG_KEYS}
    config = {key: value for key, value in values.items() if isinstance(value, bool | int | float | str)}
    return {
        "config": {
            **config,
            "model_type": structure.config.model_type,
            "hidden_size": structure.hidden_size,
            "num_hidden_layers": structure.num_blocks,
        },
        "layers": [
            {
                "name": name,
                "parameters": _count(structure, structure.layer_parameters(layer)),
                "trained": _count(structure, structure.trained_parameters(layer)),
            }
            for layer, name in enumerate(structure.layer_names)
        ],
    }


def _count(structure: ModelStructure, parameters: Iterable[str]) -> int:
    return sum(math.prod(structure.shapes[parameter]) for parameter in parameters)


if __name__ == "__main__":
    sys.exit(main())
