"""The mutations still fit the code that they mutate; that they are caught is for the program itself to show."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def mutations() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutations", ROOT / "tools" / "mutations.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutations"] = module  # where its dataclasses look for their annotations
    spec.loader.exec_module(module)
    return module


def test_each_mutation_has_one_place_in_the_code(mutations: ModuleType) -> None:
    for mutation in (*mutations.MUTATIONS, *mutations.MISREADINGS):
        assert (ROOT / mutation.file).read_text().count(mutation.old) == 1, mutation.name


def test_each_mutation_names_a_test_that_there_is(mutations: ModuleType) -> None:
    for mutation in (*mutations.MUTATIONS, *mutations.MISREADINGS):
        path, _, name = mutation.caught_by.partition("::")
        assert f"def {name}(" in (ROOT / path).read_text(), mutation.name


def test_the_pages_have_the_tables(mutations: ModuleType) -> None:
    assert mutations.table() in (ROOT / "docs" / "cluster_mode.md").read_text()
    assert mutations.table(mutations.MISREADINGS) in (ROOT / "docs" / "verify.md").read_text()


def test_what_verify_is_given_is_a_kind_of_script_that_trains_alike_without_a_mutation(mutations: ModuleType) -> None:
    tests = (ROOT / "tests" / "e2e" / "test_verify.py").read_text()
    for mutation in mutations.MISREADINGS:
        assert f'"{mutation.verified[-1]}"' in tests, mutation.name
