from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from oobleck.errors import ConfigError
from oobleck.job import CompileMode, JobSpec
from oobleck.training.model.forward_passes import require_compiler
from oobleck.training.model.models import StageModel
from tests.training.zoo import gradients_of, random_batch, run_pipeline, state_of, structure_of, whole_stage


def test_where_there_is_no_compiler_the_job_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CXX", raising=False)
    cpu = torch.device("cpu")
    require_compiler(cpu, find=lambda name: f"/usr/bin/{name}" if name == "clang++" else None)
    with pytest.raises(ConfigError, match=r"compile: .*g\+\+ or clang\+\+"):
        require_compiler(cpu, find=lambda _: None)
    monkeypatch.setenv("CXX", "icpx")
    with pytest.raises(ConfigError, match="icpx"):
        require_compiler(cpu, find=lambda name: f"/usr/bin/{name}" if name == "g++" else None)


def test_on_gpus_a_c_compiler_and_pythons_headers_are_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Triton builds its launcher with them, at the first block, and slim images have neither."""
    monkeypatch.delenv("CC", raising=False)
    gpu = torch.device("cuda", 0)
    with pytest.raises(ConfigError, match=r"compile: there is no gcc or clang here.*on every node"):
        require_compiler(gpu, find=lambda name: f"/usr/bin/{name}" if name == "g++" else None, headers=tmp_path)
    with pytest.raises(ConfigError, match=rf"no Python\.h in {tmp_path}; install Python's headers"):
        require_compiler(gpu, find=lambda name: f"/usr/bin/{name}" if name == "gcc" else None, headers=tmp_path)
    (tmp_path / "Python.h").touch()
    require_compiler(gpu, find=lambda name: f"/usr/bin/{name}" if name == "clang" else None, headers=tmp_path)
    monkeypatch.setenv("CC", "icx")
    with pytest.raises(ConfigError, match="there is no icx"):
        require_compiler(gpu, find=lambda name: f"/usr/bin/{name}" if name == "gcc" else None, headers=tmp_path)


def test_modes_that_make_graphs_of_gpus_are_refused_there():
    assert JobSpec(compile=True, compile_mode="reduce-overhead").compiles == "reduce-overhead"
    with pytest.raises(ConfigError, match=r"compile_mode: .*default or max-autotune-no-cudagraphs on GPUs"):
        JobSpec(compile=True, compile_mode="reduce-overhead", device="cuda")


def test_a_backward_pass_that_is_compiled_whole_is_not_split():
    with pytest.raises(ConfigError, match=r"compile.*false with zero-bubble: .* cannot be split"):
        JobSpec(compile=True, schedule="zero-bubble")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiles with g++")
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_blocks_compute_what_others_do(mode: CompileMode):
    structure = structure_of("llama")
    whole = whole_stage(structure)
    compiled = [StageModel(structure, dtype=torch.float32, device="cpu", compiles=mode) for _ in range(2)]
    for stage, (first, stop) in zip(compiled, [(0, 3), (3, structure.num_layers)], strict=True):
        stage.adopt(first, stop, state_of(whole))
    for seed in (1, 2):
        batch = random_batch(seed)
        torch.testing.assert_close(run_pipeline(compiled, batch), run_pipeline([whole], batch))
    expected = gradients_of([whole])
    for name, gradient in gradients_of(compiled).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-5)
    assert "graph_break" not in torch._dynamo.utils.counters or not torch._dynamo.utils.counters["graph_break"]
