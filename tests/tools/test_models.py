"""The sweep over transformers' classes: each trains equal to the uncut model, cut or whole, or is refused by name."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tools import models
from tools.models import Case, Row

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "models.md"

EQUAL = ("GPT2LMHeadModel", "Gemma3ForCausalLM", "MixtralForCausalLM", "BertForMaskedLM", "ModernBertForMaskedLM",
         "LlamaForSequenceClassification", "DistilBertForTokenClassification",
         "RoCBertForCausalLM", "BlenderbotSmallForCausalLM", "T5ForConditionalGeneration", "BertForQuestionAnswering",
         "LlavaForConditionalGeneration", "ViTForImageClassification", "Wav2Vec2ForCTC")  # fmt: skip
WHOLE: dict[str, str] = {}
REFUSED = {"MobileNetV1ForImageClassification": "MobileNetV1ForImageClassification, .* is a BatchNorm2d"}


def rows_of(*names: str) -> dict[str, Row]:
    wanted = [case for case in models.cases() if case.class_name in names]
    assert {case.class_name for case in wanted} == set(names)
    return {row.case.class_name: row for row in models.run(wanted, jobs=1, limit_s=120)}


@pytest.mark.slow
def test_some_classes_of_each_kind_are_equal_or_whole_or_refused_by_name():
    rows = rows_of(*EQUAL, *WHOLE, *REFUSED)
    assert {name: (rows[name].outcome, rows[name].note) for name in EQUAL if rows[name].outcome != "equal"} == {}
    for name, words in WHOLE.items():
        assert (rows[name].outcome, rows[name].note[: len(words)]) == ("whole", words)
    for name, words in REFUSED.items():
        assert rows[name].outcome == "refused", rows[name]
        assert re.search(words, rows[name].note), rows[name]
        assert rows[name].seconds < 1.0, rows[name]


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_class_is_equal_or_refused_by_name_and_the_page_says_so(tmp_path: Path):
    rows = list(models.run(models.cases(), jobs=2, limit_s=300, kept=tmp_path / "rows"))
    assert [row for row in rows if row.outcome == "fault"] == []
    assert [row for row in rows if row.outcome == "refused" and row.case.class_name not in row.note] == []
    written = PAGE.read_text(encoding="utf-8")
    (date,) = re.findall(r"^with transformers \S+, on (\S+)\.", written, re.MULTILINE)
    assert models.page(rows, date=date) == written


def test_a_class_that_ends_its_process_or_hangs_ends_its_own_row_alone(tmp_path: Path):
    """The child is a script of the test's own: it ends for one class, hangs for another, and answers for the rest."""
    child = tmp_path / "child.py"
    child.write_text(
        "import json, os, sys, time\n"
        "for line in sys.stdin:\n"
        "    case = json.loads(line)\n"
        "    if case['class_name'] == 'Ends': os._exit(9)\n"
        "    if case['class_name'] == 'Hangs': time.sleep(600)\n"
        "    print(json.dumps({'case': case, 'outcome': 'equal', 'note': '', 'seconds': 0.0}), flush=True)\n"
    )
    options: dict[str, Any] = {
        "jobs": 1,
        "starts_s": 20.0,
        "kept": tmp_path / "rows",
        "command": [sys.executable, str(child)],
    }
    wanted = [Case("causal language model", "x", name) for name in ("Good", "Ends", "Fine", "Hangs", "Last")]
    rows = list(models.run(wanted, limit_s=1.0, **options))
    assert [row.outcome for row in rows] == ["equal", "fault", "equal", "fault", "equal"]
    assert "ended with 9" in rows[1].note
    assert "nothing for" in rows[3].note
    assert list(models.run(wanted, limit_s=0.0, **options)) == rows, "nothing is tried twice"


def test_the_page_has_a_row_for_each_reason():
    of = [
        Row(Case("causal language model", "a", "AForCausalLM"), "equal"),
        Row(Case("causal language model", "b", "BForCausalLM"), "refused",
            "model: BForCausalLM (model.type: b) cannot be split into layers: it has | bars"),
        Row(Case("causal language model", "c", "CForCausalLM"), "refused",
            "model: CForCausalLM (model.type: c) cannot be split into layers: it has | bars"),
    ]  # fmt: skip
    text = models.page(of, date="2026-01-02")
    assert ", on 2026-01-02." in text
    assert "| causal language model | 1 | 0 | 2 | 0 |" in text
    assert "Equal: AForCausalLM." in text
    assert "| refused | it has \\| bars | BForCausalLM, CForCausalLM |" in text


def test_the_documentation_has_the_page_of_the_installed_transformers():
    words = frozenset(re.findall(r"\w+", PAGE.read_text(encoding="utf-8")))
    for case in models.cases():
        assert case.class_name in words, f"{case.class_name}: run tools/models.py again"
