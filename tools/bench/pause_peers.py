"""How long a save keeps the training thread waiting: `oobleck.checkpoint.save`, beside other ways of saving.

    python tools/bench/pause_peers.py --python peers/bin/python --mib 256 --saves 7

Each row is of a process of its own with one state of float32 tensors, and takes turns with a copy of the same bytes
into memory that was written before (memcpy); medians count. What a save leaves to its background, such as a file's
writing or a copy in another rank's memory, is not timed, and has ended before the next one. Files are in the temporary
directory, and are not forced to the disk. LM Resiliency's two ranks do all at the same time. torchft saves nothing, and
NVRx cannot save beside training without CUDA. The other interpreter is the one of `restart_peers.py`; its torch is the
one of torch's own rows. The table is Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, it finds its neighbours

from tools.bench import save_pause
from tools.bench.restart import kill_all, processes_with
from tools.bench.restart_peers import remove_shared
from tools.smoke import parse_arguments

_JOB = Path(__file__).with_name("pause_peers_job.py")
_WAYS = {
    "oobleck": "oobleck.checkpoint.save",
    "torch": "torch.save to a file",
    "dcp": "DCP save",
    "async-dcp": "DCP async_save",
    "lm-resiliency": "LM Resiliency, in memory and in its peer's",
    "dlrover": "DLRover, in memory",
    "nvrx": "NVRx, async_save",
}
_LIMIT_S = 300.0


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has the peers")
    parser.add_argument("--mib", type=int, default=256, help="size of the state")
    parser.add_argument("--saves", type=int, default=7, help="saves in each row")
    parser.add_argument("--ways", nargs="+", choices=_WAYS, default=tuple(_WAYS), help="the rows")
    given = parse_arguments(parser, mib=1, saves=1, ways=["oobleck", "dcp", "lm-resiliency"])
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # which ends all that it has started too
    print(f"| how {given.mib} MiB are saved | pause ms | memcpy ms | of memcpy |")
    print("|---|---|---|---|")
    for way in given.ways:
        print(_row(given.python, way, given.mib, given.saves), flush=True)


def _row(python: str, way: str, mib: int, saves: int) -> str:
    """Return the row of a way, or why it has none."""
    if way == "oobleck":
        copies_s, saves_s, _ = save_pause.measure(mib, saves)
    else:
        said, error = _run(python, way, mib, saves)
        if error:
            return f"| {_WAYS[way]} | not run: {error} | | |"
        copies_s, saves_s = json.loads(said)
    copy_s, save_s = statistics.median(copies_s), statistics.median(saves_s)
    return f"| {_WAYS[way]} | {save_s * 1e3:.1f} | {copy_s * 1e3:.1f} | {save_s / copy_s:.2f} |"


def _run(python: str, way: str, mib: int, saves: int) -> tuple[str, str]:
    """Return the last line that a way's process has printed, or of why it failed."""
    directory = Path(tempfile.mkdtemp(prefix="obs"))
    command = [python, str(_JOB), way, str(directory), str(mib), str(saves)]
    environment = {**os.environ, "TMPDIR": str(directory), "OMP_NUM_THREADS": "1"}
    environment["TORCHELASTIC_RUN_ID"] = directory.name  # DLRover names its shared memory after it
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False, env=environment)
    except subprocess.TimeoutExpired:
        return "", f"not within {_LIMIT_S:g} s"
    finally:
        kill_all(processes_with(f"TMPDIR={directory}"))
        remove_shared(directory)
        shutil.rmtree(directory, ignore_errors=True)
    said, errors = (text.strip().splitlines() or ["nothing"] for text in (done.stdout, done.stderr))
    return (said[-1], "") if not done.returncode else ("", errors[-1])


if __name__ == "__main__":
    main()
