"""A rank's part in reading torch's flight recorder: which collectives it has joined in each of its groups.

The recorder is on where TORCH_FR_BUFFER_SIZE (before torch 2.9, TORCH_NCCL_TRACE_BUFFER_SIZE) is above 0. Its record is
taken from a thread, since the main one may wait in a collective.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from oobleck.control.protocol import FLIGHT_SIGNAL, FlightRecord, GroupRecord
from oobleck.host.writing import write_whole
from oobleck.wire import encode_json

_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


def write_when_asked(path: Callable[[], str]) -> None:
    """Write the record to a file whenever the agent asks. Called before any other thread starts."""
    # Blocked everywhere, so that the thread below takes it, and nothing ends by it where there is no recorder.
    signal.pthread_sigmask(signal.SIG_BLOCK, [FLIGHT_SIGNAL])
    if any(os.environ.get(name, "0") not in ("", "0") for name in _VARIABLES):
        threading.Thread(target=_serve, args=(path,), name="oobleck-flight", daemon=True).start()


def _serve(path: Callable[[], str]) -> None:
    while True:
        signal.sigwait([FLIGHT_SIGNAL])
        # What torch writes is its own, and may differ in another version.
        with suppress(OSError, ValueError, LookupError, AttributeError, TypeError):
            write_whole(Path(path()), encode_json(FlightRecord(groups=tuple(_records()))))


def _records() -> list[GroupRecord]:
    distributed: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if distributed is None or not distributed.is_initialized():
        return []
    bindings: Any = sys.modules["torch._C._distributed_c10d"]
    trace = json.loads(bindings._dump_fr_trace_json(includeCollectives=True, onlyActive=False))
    newest = {str(each["pg_id"]): each for each in trace.get("entries", ()) if not each["is_p2p"]}
    names = {each["process_group"][0]: number for number, each in newest.items()}
    records = []
    for group, name in list(distributed._world.pg_names.items()):
        number = names.get(name, "")
        status, entry = trace.get("pg_status", {}).get(number, {}), newest.get(number, {})
        joined = max(0, int(status.get("last_enqueued_collective", 0)))
        records.append(
            GroupRecord(
                group=name,
                ranks=tuple(sorted(distributed._world.pg_group_ranks[group])),
                num_joined=joined,
                what=str(entry.get("profiling_name", "")),
                is_waiting=joined > max(0, int(status.get("last_completed_collective", joined))),
            )
        )
    return records
