"""The journals that a few traces come to, as digests: `python -m tests.sim.digests` prints them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace

from oobleck.planner import Profile, device_sheet, estimate_profile, model_shape
from oobleck.sim.cluster.run import journal_digest, run_cluster
from oobleck.sim.sweep.settings import SweepSettings
from oobleck.sim.sweep.sweep import sweep
from oobleck.sim.trace import Trace
from oobleck.sim.trace.generate import FailSlow, FailureModel, generate
from tests.sim.golden import DIRECTORY, read_golden
from tests.sim.virtual import Setting

__all__ = ["digests"]

_SEEDS = range(3)


def _golden() -> Iterator[tuple[str, str]]:
    for path in sorted(DIRECTORY.glob("*.json")):
        golden = read_golden(path)
        yield path.stem, _play(golden.trace, golden.setting, golden.seed)


def _cluster() -> Iterator[tuple[str, str]]:
    model = FailureModel(mean_lifetime_s=200.0, batches={1: 3, 2: 1}, repairs=((1.0, 20.0),))
    for seed in _SEEDS:
        trace = generate(model, num_nodes=6, duration_s=60.0, seed=seed)
        yield f"cluster mode {seed}", _play(trace, Setting(num_nodes=6), seed)


def _play(trace: Trace, setting: Setting, seed: int) -> str:
    return run_cluster(
        trace,
        job=setting.job,
        profile=setting.profile,
        seed=seed,
        devices_per_node=setting.devices,
        delays=setting.delays,
    ).digest


def _sweep() -> Iterator[tuple[str, str]]:
    model = FailureModel(
        mean_lifetime_s=72_000.0,
        batches={1: 1, 3: 1},
        repairs=((1.0, 4000.0),),
        fail_slow=FailSlow(rate_per_node_hour=0.1, mean_duration_s=600.0, least_factor=1.1, most_factor=2.0),
    )
    for seed in _SEEDS:
        trace = generate(model, num_nodes=20, duration_s=21_600.0, seed=seed)
        settings = SweepSettings(profile=_uneven_profile(seed), global_batch_size=256)
        yield f"sweep mode {seed}", journal_digest(tuple(sweep(trace, settings)))


def _uneven_profile(seed: int) -> Profile:
    """One whose layers all take times of their own, so that their sums are rounded."""
    rng = random.Random(seed)
    shape, sheet = model_shape("gpt2-medium"), device_sheet("A100")
    profile = estimate_profile(shape, sheet, microbatch_size=1, sequence_length=1024)
    layers = tuple(
        replace(
            layer,
            forward_s={number: rng.uniform(0.7, 1.4) * seconds for number, seconds in layer.forward_s.items()},
            backward_s={number: rng.uniform(0.7, 1.4) * seconds for number, seconds in layer.backward_s.items()},
        )
        for layer in profile.layers
    )
    return replace(profile, layers=layers)


def digests() -> dict[str, str]:
    """Play the golden traces and some that are drawn, in both modes."""
    return {**dict(_golden()), **dict(_cluster()), **dict(_sweep())}


if __name__ == "__main__":
    print(json.dumps(digests()))
