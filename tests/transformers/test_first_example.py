"""The first example of docs/trainer.md, as it stands but for its two paths."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

PAGE = Path(__file__).parents[2] / "docs" / "trainer.md"
LINES = ["nodes fail", "training continues", "no step is lost", "and none repeated"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_trains_and_saves_a_model(tmp_path: Path) -> None:
    trained = Tokenizer(models.BPE(unk_token="<end>"))
    trained.pre_tokenizer = pre_tokenizers.ByteLevel()  # type: ignore[assignment]  # tokenizers declares no setter
    trained.train_from_iterator(LINES, trainers.BpeTrainer(vocab_size=60, special_tokens=["<end>"]))
    PreTrainedTokenizerFast(tokenizer_object=trained, eos_token="<end>").save_pretrained(tmp_path / "gpt2")
    GPT2LMHeadModel(GPT2Config(vocab_size=60, n_embd=16, n_layer=2, n_head=2)).save_pretrained(tmp_path / "gpt2")
    (tmp_path / "corpus.txt").write_text("\n\n".join(LINES))
    found = re.search(r"```python\n(# train\.py\n.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    script = found[1].replace("/models/gpt2", str(tmp_path / "gpt2")).replace("/data", str(tmp_path))
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "out" / "model.safetensors").is_file()
