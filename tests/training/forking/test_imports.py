from __future__ import annotations

import gc
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from oobleck.training.forking.imports import has_cuda_driver, quick_imports

_IMPORT = """if True:
    from oobleck.training.forking.imports import quick_imports
    with quick_imports():
        import oobleck.training.process.worker
    from transformers.utils import import_utils
    assert import_utils.is_sklearn_available()
    assert import_utils.is_scipy_available()
"""


@pytest.mark.slow
def test_a_worker_starts_beside_packages_that_need_others(tmp_path: Path):
    """transformers imports scikit-learn wherever it is installed, which needs scipy."""
    package = tmp_path / "sklearn"
    package.mkdir()
    (package / "__init__.py").write_text("import scipy.sparse\n__version__ = '1.9.0'\n")
    (package / "metrics.py").write_text("def roc_curve(): ...\n")
    distribution = tmp_path / "scikit_learn-1.9.0.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: scikit-learn\nVersion: 1.9.0\n")
    subprocess.run([sys.executable, "-c", _IMPORT], env={**os.environ, "PYTHONPATH": str(tmp_path)}, check=True)


def test_collection_is_on_again_after_an_error():
    with pytest.raises(ModuleNotFoundError), quick_imports():
        importlib.import_module("no_such_module")
    assert gc.isenabled()


def test_torch_asks_no_driver_meanwhile(monkeypatch: pytest.MonkeyPatch):
    """A process that has initialized CUDA's driver cannot fork workers that use a GPU."""
    variable = "PYTORCH_NVML_BASED_CUDA_CHECK"
    monkeypatch.delenv(variable, raising=False)
    with quick_imports():
        assert torch.cuda._nvml_based_avail()
    assert variable not in os.environ
    monkeypatch.setenv(variable, "0")
    with quick_imports():
        assert not torch.cuda._nvml_based_avail()
    assert os.environ[variable] == "0"


def test_a_driver_that_is_initialized_is_noticed(tmp_path: Path):
    assert not has_cuda_driver()
    with (tmp_path / "nvidia-uvm").open("w"):
        assert has_cuda_driver()
    assert not has_cuda_driver()


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
