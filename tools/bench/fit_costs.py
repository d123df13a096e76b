"""Fit the simulator's costs on small clusters, and check them on the larger ones of the same measurement.

    python tools/bench/fit_costs.py --up-to 256
    python tools/bench/scale.py --output measured.json && python tools/bench/fit_costs.py --measured measured.json

Without a file it measures the control plane alone, as `scale.py` does.

Costs of the master are processor seconds of the control plane alone, which a busy machine does not change much. Real
workers (`--sections workers`) share the processors of one machine: all N (N - 1) links are made by the same few, so
their stall is fitted as a + b N (N - 1), and only says whether one machine follows such a law. The table is Markdown.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, it finds its neighbours

from tools.bench.scale_control import ControlPlane, measure_loss
from tools.smoke import parse_arguments

Row = Mapping[str, Any]
Terms = Callable[[Row], Sequence[float]]
"""What the coefficients of a cost are multiplied with."""

_CONTROL: Mapping[str, tuple[Callable[[Row], float], Terms]] = {
    "fence_worker_s": (lambda row: row["answers_decode_s"], lambda row: (row["fences"]["number"],)),
    "decide_s, decide_worker_s": (lambda row: row["decide_s"], lambda row: (1.0, row["nodes"])),
    "update_bytes": (lambda row: _update_bytes(row), lambda row: (1.0,)),
    "encode_byte_s": (lambda row: row["updates"]["encode_s"], lambda row: (row["updates"]["bytes"],)),
    "read_byte_s": (lambda row: row["update_decode_s"], lambda row: (_update_bytes(row),)),
}
"""By the names of the coefficients: what was measured, and their terms."""
_WORKERS: Mapping[str, tuple[Callable[[Row], float], Terms]] = {
    "stall of one machine": (lambda row: row["stall_s"], lambda row: (1.0, row["nodes"] * (row["nodes"] - 1))),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", type=Path, help="what scale.py --output wrote")
    parser.add_argument("--control", type=int, nargs="+", default=(16, 64, 256, 1024, 2048), help="sizes to measure")
    parser.add_argument("--up-to", type=int, default=256, help="fit on clusters up to this size")
    given = parse_arguments(parser, control=(16, 32, 64), up_to=32)
    if given.measured is not None:
        measured = json.loads(given.measured.read_text(encoding="utf-8"))
    else:
        measured = {"control": [asdict(measure_loss(ControlPlane(number), 1)) for number in given.control]}
    print("| cost | fitted | N, measured, predicted, off by |\n|---|---|---|")
    for section, costs in (("control", _CONTROL), ("workers", _WORKERS)):
        rows = measured.get(section, [])
        small = [row for row in rows if row["nodes"] <= given.up_to]
        for name, (value, terms) in costs.items() if small else ():
            fitted = _fit([terms(row) for row in small], [value(row) for row in small])
            checked = [_checked(row, value(row), float(np.dot(fitted, terms(row)))) for row in rows if row not in small]
            print(f"| {name} | {', '.join(f'{each:.3g}' for each in fitted)} | {'; '.join(checked)} |")


def _update_bytes(row: Row) -> float:
    return float(row["updates"]["bytes"]) / float(row["updates"]["number"])


def _fit(terms: Sequence[Sequence[float]], values: Sequence[float]) -> Sequence[float]:
    """Least squares of the relative errors: a large cluster counts no more than a small one."""
    scaled = np.array(terms, dtype=float) / np.array(values)[:, None]
    found, *_ = np.linalg.lstsq(scaled, np.ones(len(values)), rcond=None)
    return [float(each) for each in found]


def _checked(row: Row, measured: float, predicted: float) -> str:
    return f"{row['nodes']:,}: {measured:.3g}, {predicted:.3g}, {predicted / measured - 1:+.0%}"


if __name__ == "__main__":
    main()
