"""The table knows every argument of the installed transformers, and the documentation shows it."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

import pytest
import transformers

from oobleck.transformers.table import INIT_ARGUMENTS, METHODS, TRAINING_ARGUMENTS, Fate, Rule

PAGE = Path(__file__).parents[2] / "docs" / "trainer.md"
OF_OTHER_VERSIONS = {"group_by_length", "logging_dir", "warmup_ratio"}


def test_every_training_argument_of_the_installed_transformers_is_in_the_table():
    installed = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    assert installed <= TRAINING_ARGUMENTS.keys(), "a new argument: say in the table what becomes of it"
    assert TRAINING_ARGUMENTS.keys() - installed <= OF_OTHER_VERSIONS


def test_every_argument_of_the_trainer_is_in_the_table():
    installed = set(inspect.signature(transformers.Trainer.__init__).parameters) - {"self"}
    assert installed == INIT_ARGUMENTS.keys()


def test_every_public_method_of_the_trainer_is_in_the_table():
    names = {name for name in dir(transformers.Trainer) if not name.startswith("_")}
    methods = {name for name in names if callable(getattr(transformers.Trainer, name))}
    assert methods <= METHODS.keys()


@pytest.mark.parametrize("rules", [TRAINING_ARGUMENTS, INIT_ARGUMENTS, METHODS])
def test_what_is_refused_or_without_effect_says_more(rules: dict[str, Rule]):
    assert [name for name, rule in rules.items() if rule.fate in (Fate.REFUSED, Fate.UNUSED) and not rule.note] == []


@pytest.mark.parametrize("rules", [TRAINING_ARGUMENTS, INIT_ARGUMENTS, METHODS])
def test_the_documentation_shows_the_table(rules: dict[str, Rule]):
    table = "\n".join(["| | |", "|---|---|", *(f"| `{name}` | {rule} |" for name, rule in rules.items())])
    assert table in PAGE.read_text(encoding="utf-8"), f"the page has this table: {table}"
