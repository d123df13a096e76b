"""A script by plain `python`: what is wrong is said before anything is launched, and by its own words alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from oobleck.errors import ConfigError
from oobleck.transformers.launched import show_user_errors_alone

from .trainers import trainer

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(autouse=True)
def own_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)


def shown(error: Exception, capfd: pytest.CaptureFixture[str]) -> str:
    try:
        raise error
    except Exception as raised:  # noqa: BLE001
        sys.excepthook(type(raised), raised, raised.__traceback__)
    return capfd.readouterr().err


def test_an_error_that_is_the_users_is_shown_without_a_traceback(capfd: pytest.CaptureFixture[str]):
    show_user_errors_alone()
    assert shown(ConfigError("change it"), capfd) == "oobleck: change it\n"
    assert "Traceback" in shown(ValueError("a fault"), capfd)


def test_what_train_refuses_is_shown_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    with pytest.raises(ConfigError) as refused:
        trainer(tmp_path, auto_find_batch_size=True).train()
    assert shown(refused.value, capfd).startswith("oobleck: TrainingArguments(auto_find_batch_size=True): leave it out")
