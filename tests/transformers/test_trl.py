"""TRL's trainers by one changed import: the losses and gradients of steps are those of TRL itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from oobleck.errors import ConfigError

from . import test_whole as whole

SCRIPT = Path(__file__).parents[1] / "e2e" / "trl_script.py"

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def from_the_scripts_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")


@pytest.mark.parametrize(
    ("case", "counting"),
    [
        ("sft", "items"),
        pytest.param("dpo", "samples", marks=pytest.mark.slow),
        pytest.param("reward", "samples", marks=pytest.mark.slow),
    ],
)
def test_steps_are_those_of_trl(case: str, counting: str, tmp_path: Path) -> None:
    assembly = whole.assembled(case, tmp_path, SCRIPT)
    assert assembly.job.model.whole_loss == counting
    losses, norms = whole.ours(assembly)
    their_losses, their_norms, _ = whole.theirs(case, tmp_path, SCRIPT)
    assert losses == pytest.approx(their_losses, rel=2e-5)
    assert norms == pytest.approx(their_norms, rel=2e-4)


def test_what_nodes_cannot_follow_is_refused_by_name(tmp_path: Path) -> None:
    make = whole.script(tmp_path, whole.OURS, SCRIPT)["make_trainer"]
    with pytest.raises(ConfigError, match=r"activation_offloading=True\): leave it out: nodes keep their activations"):
        make("sft", tmp_path / "ours", activation_offloading=True)
    with pytest.raises(ConfigError, match=r"DPOConfig\(sync_ref_model=True\): leave it out: the reference model stays"):
        make("dpo", tmp_path / "ours", sync_ref_model=True)
