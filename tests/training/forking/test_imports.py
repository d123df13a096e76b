from __future__ import annotations

import gc
import importlib
import subprocess
import sys

import pytest

from oobleck.training.forking.imports import quick_imports


def test_a_worker_imports_no_scipy_and_can_use_it_later():
    code = """if True:
        import sys
        from oobleck.training.forking.imports import quick_imports
        with quick_imports():
            import oobleck.training.model.models
        assert not any(name.partition(".")[0] == "scipy" for name in sys.modules)
        from scipy.optimize import linear_sum_assignment
        assert linear_sum_assignment([[1.0]])[0].tolist() == [0]
    """
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_was_hidden_or_paused_is_as_before_even_after_an_error():
    before = {name for name in sys.modules if name.partition(".")[0] == "scipy"}
    with pytest.raises(ModuleNotFoundError), quick_imports():
        importlib.import_module("no_such_module")
    assert gc.isenabled()
    assert {name for name in sys.modules if name.partition(".")[0] == "scipy"} == before
    importlib.import_module("scipy")


def test_nothing_is_collected_meanwhile():
    with quick_imports():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_collection_that_was_off_stays_off():
    gc.disable()
    try:
        with quick_imports():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
