from __future__ import annotations

import json
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from oobleck.cli.main import main
from oobleck.errors import ExitCode
from oobleck.planner import Profile, profile_to_json
from oobleck.planner.profiles.estimate import ASSUMED_SHARE_OF_PEAK
from oobleck.ui.formatting import bytes_text
from tests.planner.simple_profiles import make_profile


@pytest.fixture
def profile_file(tmp_path: Path) -> Path:
    return write(tmp_path, make_profile([1.0, 2.0, 2.0, 1.0, 1.0, 1.0], memory_bytes=2 * 10**9))


def write(folder: Path, profile: Profile) -> Path:
    path = folder / "profile.json"
    path.write_text(profile_to_json(profile))
    return path


def run(*arguments: object) -> int:
    return main(["plan", *map(str, arguments)])


def test_a_plan_is_shown_with_its_failures_and_its_timeline(profile_file, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert run("--profile", profile_file, "--nodes", 6, "--global-batch", 48) == ExitCode.DONE
    shown = capsys.readouterr().out
    assert all(len(line) <= 100 for line in shown.splitlines())
    for part in (
        "test on 6 nodes of 1 × device",
        "batch 48 in microbatches of 2, 8 tokens each, f = 1",
        "tokens/s",
        "6 nodes form 2 pipelines (3, 3 nodes).",
        "2 pipelines: 1 would take 29.8 % longer a step, and f = 1 asks for at least 2; 3 would take 3.5 %",
        "templates",
        "stages of a pipeline of 3 nodes",
        "after losing any one node",
        "after losing any 2 nodes at once",
        "timeline of the slowest pipeline",
        "█ forward",
    ):
        assert part in shown


@pytest.mark.parametrize("width", [40, 80, 160])
def test_the_report_fits_the_terminal(profile_file, capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    run("--profile", profile_file, "--nodes", 7, "--global-batch", 48, "--after-losing", "node3,node4")
    assert all(len(line) <= width for line in capsys.readouterr().out.splitlines())


def test_json_has_the_plan_what_it_takes_and_what_losses_lead_to(profile_file, capsys):
    arguments = ("--nodes", 7, "--global-batch", 48, "-f", 1, "--after-losing", "node0, node5", "--json")
    assert run("--profile", profile_file, *arguments) == ExitCode.DONE
    answer = json.loads(capsys.readouterr().out)
    assert answer["model"] == "test"
    plan = answer["plan"]
    assert sum(pipeline["microbatches"] for pipeline in plan["pipelines"]) == 24
    nodes = [node for pipeline in plan["pipelines"] for node in pipeline["nodes"]] + plan["spares"]
    assert sorted(nodes) == [f"node{number}" for number in range(7)]
    assert answer["tokens_per_s"] == pytest.approx(48 * 8 / plan["step_s"])
    for pipeline in plan["pipelines"]:
        assert pipeline["stages"][0]["first_layer"] == 0
        assert pipeline["stages"][-1]["stop_layer"] == 6
        for stage in pipeline["stages"]:
            assert stage["headroom_bytes"] == stage["available_bytes"] - stage["peak_memory_bytes"] > 0
    assert [sum(case["alike"] for case in losses["cases"]) for losses in answer["losses"]] == [7, 21]
    after = answer["after_losing"]
    assert after["lost"] == ["node0", "node5"]
    survivors = [node for pipeline in after["pipelines"] for node in pipeline["nodes"]] + after["spares"]
    assert sorted(survivors) == ["node1", "node2", "node3", "node4", "node6"]
    assert len(answer["templates"]) == 5


def test_a_loss_that_ends_training_is_named(tmp_path, capsys):
    path = write(tmp_path, make_profile([1.0], memory_bytes=10**9))
    run("--profile", path, "--nodes", 2, "--global-batch", 4, "--json")
    alone, both = json.loads(capsys.readouterr().out)["losses"]
    assert [case["redundant"] for case in alone["cases"]] == [False]
    (case,) = both["cases"]
    assert (case["lost"], case["alike"], case["action"]) == (["node0", "node1"], 1, None)
    assert "layer 0" in case["reason"]
    run("--profile", path, "--nodes", 2, "--global-batch", 4)
    assert "cannot continue" in capsys.readouterr().out


def test_one_node_has_nothing_to_lose_in_pairs(tmp_path, capsys):
    path = write(tmp_path, make_profile([1.0, 1.0]))
    assert run("--profile", path, "--nodes", 1, "--global-batch", 4) == ExitCode.DONE
    shown = capsys.readouterr().out
    assert "below f" in shown
    assert "2 nodes" not in shown


def test_several_devices_a_node_may_share_a_stage(tmp_path, capsys):
    path = write(tmp_path, make_profile([1.0] * 4, device_counts=(1, 2, 4)))
    run("--profile", path, "--nodes", 2, "--gpus-per-node", 4, "--global-batch", 16, "--json")
    plan = json.loads(capsys.readouterr().out)["plan"]
    for pipeline in plan["pipelines"]:
        devices = sum(stage["devices"] for stage in pipeline["stages"])
        assert devices == 4 * len(pipeline["nodes"])


def test_pictures_and_traces_show_the_plan_after_the_loss(profile_file, tmp_path, capsys):
    picture, trace = tmp_path / "plan.svg", tmp_path / "plan.json"
    arguments = (
        "--nodes",
        4,
        "--global-batch",
        48,
        "--after-losing",
        "node1",
        "--plot",
        picture,
        "--chrome-trace",
        trace,
    )
    assert run("--profile", profile_file, *arguments) == ExitCode.DONE
    ElementTree.fromstring(picture.read_text())
    stages = {e["args"]["name"] for e in json.loads(trace.read_text())["traceEvents"] if e["name"] == "thread_name"}
    assert any(name.startswith("2: ") for name in stages), "three nodes make a pipeline of three stages"
    capsys.readouterr()


def test_a_png_is_drawn_or_the_extra_for_it_is_named(profile_file, tmp_path, capsys):
    picture = tmp_path / "plan.png"
    code = run("--profile", profile_file, "--nodes", 2, "--global-batch", 4, "--plot", picture)
    try:
        import cairosvg  # noqa: F401 - only whether it is there matters
    except ImportError:
        assert code == ExitCode.USAGE
        assert "pip install cairosvg, or name an .svg file" in capsys.readouterr().err
    else:
        assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            ("--nodes", 2, "--global-batch", 4),
            ExitCode.USAGE,
            "nothing to plan with: pass --profile FILE, or --model NAME and --device",
        ),
        (
            ("--profile", "-", "--nodes", 0, "--global-batch", 4),
            ExitCode.USAGE,
            "Invalid value for '--nodes'",
        ),
        (("--profile", "-", "--nodes", 2, "--global-batch", 5), ExitCode.USAGE, "--global-batch is 5; it must be a"),
        (("--profile", "-", "--nodes", 2), ExitCode.USAGE, "Missing option '--global-batch'"),
        (
            ("--profile", "-", "--nodes", 2, "--global-batch", 4, "--microbatch", 4),
            ExitCode.USAGE,
            "--microbatch is 4, and",
        ),
        (
            ("--profile", "-", "--nodes", 2, "--global-batch", 4, "--schedule", "dualpipe"),
            ExitCode.USAGE,
            "--schedule is 'dualpipe'; it must be one of 1f1b, gpipe, interleaved, zero-bubble",
        ),
        (
            ("--profile", "-", "--nodes", 2, "--global-batch", 4, "--chunks", 4),
            ExitCode.USAGE,
            "--chunks is 4, and --schedule is 1f1b; leave --chunks out, or choose interleaved or auto",
        ),
        (
            ("--profile", "-", "--nodes", 2, "--global-batch", 4, "--schedule", "zero-bubble", "--chunks", 2),
            ExitCode.USAGE,
            "--chunks is 2, and --schedule is zero-bubble",
        ),
        (
            ("--profile", "-", "--nodes", 4, "--global-batch", 8, "--after-losing", "node1,node9"),
            ExitCode.USAGE,
            "--after-losing names 'node9'; the nodes are node0 to node3",
        ),
        (
            ("--profile", "-", "--nodes", 2, "--global-batch", 4, "--plot", "plan.gif"),
            ExitCode.USAGE,
            "--plot is plan.gif; its ending must be .svg or .png",
        ),
        (
            ("--profile", "/nowhere/profile.json", "--nodes", 2, "--global-batch", 4),
            ExitCode.USAGE,
            "No such file or directory",
        ),
        (
            ("--profile", "-", "--nodes", 2, "--global-batch", 4, "--plot", "/nowhere/plan.svg"),
            ExitCode.USAGE,
            "/nowhere/plan.svg: No such file or directory",
        ),
        (
            ("--profile", "-", "--nodes", 2, "--global-batch", 4, "-f", -1),
            ExitCode.USAGE,
            "-1 is not possible; it must be a whole number from 0 to 16,384",
        ),
    ],
)
def test_wrong_usage_says_what_to_change(profile_file, capsys, arguments, code, message):
    assert run(*(profile_file if argument == "-" else argument for argument in arguments)) == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("schedule", ["interleaved", "auto"])
def test_schedules_with_chunks_have_two_in_each_stage_unless_asked_for_others(profile_file, capsys, schedule):
    arguments = ("--profile", profile_file, "--nodes", 2, "--global-batch", 8, "--schedule", schedule, "--json")
    assert run(*arguments, "--chunks", 2) == ExitCode.DONE
    given = capsys.readouterr().out
    assert run(*arguments) == ExitCode.DONE
    assert capsys.readouterr().out == given


def test_hardware_that_one_does_not_have_can_be_planned_for(capsys):
    arguments = ("--model", "gpt2", "--device", "a40", "--nodes", 4, "--global-batch", 64, "--microbatch", 4)
    assert run(*arguments) == ExitCode.DONE
    shown = capsys.readouterr().out
    assert "gpt2 on 4 nodes of 1 × A40" in shown
    assert "estimated" in shown
    assert "1,024 tokens each" in shown
    run(*arguments, "--sequence-length", 512, "--json")
    answer = json.loads(capsys.readouterr().out)
    assert (answer["estimated"], answer["sequence_length"]) == (True, 512)
    # Work is done at an assumed share of the peak, and the rest is bubbles and bytes.
    assert 0.05 < answer["mfu"] < ASSUMED_SHARE_OF_PEAK


def test_single_precision_is_slower_and_needs_no_less_memory(capsys):
    arguments = ("--model", "gpt2", "--device", "A40", "--nodes", 2, "--global-batch", 64, "--microbatch", 4, "--json")
    steps = {}
    for precision in ("float32", "bfloat16"):
        run(*arguments, "--precision", precision)
        steps[precision] = json.loads(capsys.readouterr().out)["plan"]["step_s"]
    assert steps["float32"] > 2 * steps["bfloat16"]


def test_recomputing_activations_takes_longer_and_leaves_more_memory(capsys):
    arguments = ("--model", "gpt3-2.7b", "--device", "A100", "--nodes", 4, "--global-batch", 64, "--microbatch", 1)
    plans = []
    for options in ((), ("--activation-checkpointing",)):
        run(*arguments, *options, "--json")
        plans.append(json.loads(capsys.readouterr().out)["plan"])
    kept, recomputed = plans
    assert recomputed["step_s"] > 1.2 * kept["step_s"]
    assert (
        recomputed["pipelines"][0]["stages"][0]["headroom_bytes"] > kept["pipelines"][0]["stages"][0]["headroom_bytes"]
    )


def test_models_and_devices_are_read_from_files_as_well(tmp_path, capsys):
    config, sheet = tmp_path / "config.json", tmp_path / "sheet.json"
    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 1000}
    config.write_text(json.dumps({"model_type": "llama", "name_or_path": "mine", **sizes}))
    rates = {"memory_bytes_per_s": 1e12, "float32_flops": 1e13, "bfloat16_flops": 1e14, "intra_node_bytes_per_s": 1e11}
    sheet.write_text(json.dumps({"name": "X1", "memory_bytes": 10**10, **rates}))
    arguments = ("--nodes", 2, "--global-batch", 8, "--microbatch", 1)
    assert run("--model", config, "--device", sheet, *arguments) == ExitCode.DONE
    shown = capsys.readouterr().out
    assert "mine on 2 nodes of 1 × X1" in shown
    assert "2,048 tokens each" in shown
    assert "MFU" in shown
    for text, message in (("{", "not JSON"), ("[]", "must be an object, not list"), ("{}", "hidden_size is missing")):
        config.write_text(text)
        assert run("--model", config, "--device", sheet, *arguments) == ExitCode.CONFIG
        error = capsys.readouterr().err
        assert str(config) in error
        assert message in error


GPT2 = ("--model", "gpt2", "--device", "A40", "--microbatch", 2)


def test_a_measured_profile_of_known_names_has_a_share_of_the_peak(tmp_path, capsys):
    profile = make_profile([0.1, 0.1])
    known = replace(profile, model="gpt2", device=replace(profile.device, name="A40"))
    for measured, is_known in ((profile, False), (known, True)):
        run("--profile", write(tmp_path, measured), "--nodes", 1, "--global-batch", 4, "--json")
        assert (json.loads(capsys.readouterr().out)["mfu"] is not None) is is_known


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--model", "gpt3-6.7", "--device", "A40", "--microbatch", 2), ExitCode.CONFIG, "did you mean 'gpt3-6.7b'?"),
        (("--model", "gpt2", "--device", "A41", "--microbatch", 2), ExitCode.CONFIG, "did you mean 'A40'?"),
        (("--model", "gpt2", "--device", "A40"), ExitCode.USAGE, "--microbatch is missing"),
        (("--model", "gpt2", "--microbatch", 2), ExitCode.USAGE, "nothing to plan with"),
        (("--profile", "-", "--model", "gpt2"), ExitCode.USAGE, "--model and --profile were both given"),
        (("--profile", "-", "--device", "A40"), ExitCode.USAGE, "--device and --profile were both given"),
        (("--profile", "-", "--sequence-length", 9), ExitCode.USAGE, "--sequence-length is 9, and"),
        (("--profile", "-", "--precision", "int8"), ExitCode.USAGE, "--precision is 'int8'; it must be float32 or"),
        (
            (*GPT2, "--sequence-length", 2048),
            ExitCode.CONFIG,
            "exceeds the 1024 positions of gpt2",
        ),
        (
            (*GPT2, "--recompute", "selective", "--activation-checkpointing"),
            ExitCode.USAGE,
            "--recompute is 'selective', and --activation-checkpointing is short for all; leave one out",
        ),
        ((*GPT2, "--activation-checkpointing", "--recompute", "some"), ExitCode.USAGE, "--recompute is 'some', and"),
        ((*GPT2, "--activation-checkpointing", "--recompute", "none"), ExitCode.USAGE, "--recompute is 'none', and"),
        (("--profile", "-", "--recompute", "all"), ExitCode.USAGE, "--recompute and --profile were both given"),
        (("--profile", "-", "--recompute", "none"), ExitCode.USAGE, "--recompute and --profile were both given"),
        (("--profile", "-", "--recompute", "some"), ExitCode.USAGE, "--recompute and --profile were both given"),
        (
            ("--profile", "-", "--activation-checkpointing"),
            ExitCode.USAGE,
            "--activation-checkpointing and --profile were both given; a profile has been measured with its own level",
        ),
    ],
)
def test_sources_that_do_not_go_together_are_refused(profile_file, capsys, arguments, code, message):
    given = (profile_file if argument == "-" else argument for argument in arguments)
    assert run(*given, "--nodes", 2, "--global-batch", 8) == code
    assert message in capsys.readouterr().err


def test_the_papers_largest_model_is_planned_in_seconds(capsys):
    arguments = ("--model", "gpt3-6.7b", "--device", "A40", "--nodes", 30, "-f", 1, "--microbatch", 2)
    ratios = []
    # 2 s are promised where the counting takes 0.06 s. The first try imports; others may use the machine's caches.
    while not ratios or min(ratios) > 2.0 / 0.06:
        assert len(ratios) < 4, f"it takes {min(ratios):.1f} times as long as counting to a million"
        counting_s = seconds_of_counting()
        start_s = time.process_time()
        assert run(*arguments, "--global-batch", 1024) == ExitCode.DONE
        ratios.append((time.process_time() - start_s) / counting_s)
        assert "MFU" in capsys.readouterr().out


def seconds_of_counting() -> float:
    """Processor time of a million additions in a dictionary: how fast this machine is now, whatever else it does."""
    counts = dict.fromkeys(range(1024), 0)
    start_s = time.process_time()
    for number in range(1_000_000):
        counts[number & 1023] += number
    return time.process_time() - start_s


def test_a_bad_profile_is_refused_by_layer_and_field(tmp_path, capsys):
    profile = json.loads(profile_to_json(make_profile([1.0, 1.0])))
    path = tmp_path / "profile.json"
    for change, message in (
        ({"forward_s": {"1": -1.0}}, "layer 'layer1': forward_s[1] is -1.0; it must be from 0 to"),
        ({"backward_s": {"2": 1.0}}, "layer 'layer1': backward_s has no time for 1 device"),
        ({"param_bites": 3}, "layer 1 (layer1): unknown key 'param_bites'; did you mean 'param_bytes'?"),
    ):
        layers = [profile["layers"][0], profile["layers"][1] | change]
        path.write_text(json.dumps(profile | {"layers": layers}))
        assert run("--profile", path, "--nodes", 2, "--global-batch", 4) == ExitCode.CONFIG
        assert message in capsys.readouterr().err
    huge = replace(make_profile([1.0, 1.0]), device=replace(make_profile([1.0]).device, memory_bytes=10**6))
    path.write_text(profile_to_json(huge))
    assert run("--profile", path, "--nodes", 2, "--global-batch", 4) == ExitCode.CONFIG
    assert "layer 0 (layer0) " in capsys.readouterr().err


def test_schedules_that_plans_choose_are_shown(capsys):
    options = ["--model", "gpt3-2.7b", "--device", "A40", "--nodes", "10", "--global-batch", "64", "--microbatch", "1"]
    assert main(["plan", *options, "--schedule", "auto"]) == 0
    shown = capsys.readouterr().out
    assert main(["plan", *options, "--schedule", "auto", "--json"]) == 0
    chosen = json.loads(capsys.readouterr().out)["plan"]
    assert main(["plan", *options, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)["plan"]
    kinds = {pipeline["schedule"] for pipeline in chosen["pipelines"]}
    assert kinds == {"zero-bubble"}
    assert "zero-bubble" in shown
    assert chosen["step_s"] < plain["step_s"]


# GPT-3 6.7B in one microbatch of 2,048 tokens: 32 blocks, hidden size 4,096, feed-forward 16,384, 32 heads, 50,257
# words, 2,048 positions. All of this is arithmetic on these sizes, and owes nothing to the code.
#
# Parameters. A block has 12 · 4096² in matrices and 13 · 4096 in biases and norms: 201,379,840. The embedding has
# (50257 + 2048) · 4096 = 214,241,280, the head (50257 + 2) · 4096 = 205,860,864.
#   0: embedding and 8 blocks: 1,825,280,000; 1 and 2: 8 blocks: 1,611,038,720;
#   3: 8 blocks and the head: 1,816,899,584
# Weights and gradients: 4 bytes for each; the optimizer's two moments: 8.
#
# Copies: 4 bytes for each gradient that is summed, and 2 for each weight in bfloat16; none of those of the embedding.
#
# Activations, of one microbatch: for each token and hidden unit a block keeps the inputs of two norms in float32, two
# masks of bytes, and in bfloat16 the norms' outputs, queries, keys, values, what attention returns, and five tensors
# of the feed-forward width: 2 · 4 + 2 + 2 · (2 + 4 + 5 · 4) = 62 bytes, 62 · 2048 · 4096 = 520,093,696 in all. The
# embedding keeps 2048 · (8 + 4096) = 8,404,992, the head 4 · 2048 · 50257 + 6 · 2048 · 4096 = 462,036,992. All stages
# but the last hold an output in float32 until its gradient is there: 4 · 2048 · 4096 = 33,554,432. In flight are 4, 3,
# 2 and 1. In a pass, on top of that, gradients of the widest tensor and of the largest matrix are held: in a block of
# the feed-forward part, 6 bytes each, in float32 and bfloat16, 6 · (2048 + 4096) · 16384 = 603,979,776; in the
# embedding of the table and the tokens, in float32, 4 · (50257 + 2048) · 4096 = 856,965,120; in the head of the words,
# and two in float32 of the logits, 6 · 50257 · 4096 + 8 · 2048 · 50257 = 2,058,526,720.
#
# Communication: at each end that has a neighbour 3 messages of 33,554,432, and of NCCL 2 communicators · 2 neighbours ·
# 16 channels · 9,633,792 (4 MiB, 512 KiB and 4,800 KiB for its three protocols) = 616,562,688 for sums, and between
# stages 2 directions · 2 neighbours · 2 channels · 9,633,792 = 77,070,336.
KINDS = ("weights", "gradients", "optimizer", "copies", "activations", "communication")
BY_HAND = {
    # 4 · (8,404,992 + 8 · 520,093,696 + 33,554,432) + 856,965,120
    (0, 9): (7_301_120_000, 7_301_120_000, 14_602_240_000, 10_523_197_440, 17_667_801_088, 794_296_320),
    # 3 · (8 · 520,093,696 + 33,554,432) + 603,979,776
    (9, 17): (6_444_154_880, 6_444_154_880, 12_888_309_760, 9_666_232_320, 13_186_891_776, 894_959_616),
    # 2 · (8 · 520,093,696 + 33,554,432) + 603,979,776
    (17, 25): (6_444_154_880, 6_444_154_880, 12_888_309_760, 9_666_232_320, 8_992_587_776, 894_959_616),
    # 8 · 520,093,696 + 462,036,992 + 2,058,526,720
    (25, 34): (7_267_598_336, 7_267_598_336, 14_535_196_672, 10_901_397_504, 6_681_313_280, 794_296_320),
}


def test_the_memory_of_a_large_model_is_as_worked_out_by_hand(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    arguments = ("--model", "gpt3-6.7b", "--device", "A100", "--nodes", 16, "--global-batch", 512, "--microbatch", 1)
    assert run(*arguments, "--precision", "bfloat16", "--json") == ExitCode.DONE
    pipelines = json.loads(capsys.readouterr().out)["plan"]["pipelines"]
    (stages,) = (pipeline["stages"] for pipeline in pipelines if len(pipeline["nodes"]) == len(BY_HAND))
    by_kind = {(each["first_layer"], each["stop_layer"]): each["memory_bytes"] for each in stages}
    assert by_kind == {layers: dict(zip(KINDS, amounts, strict=True)) for layers, amounts in BY_HAND.items()}
    assert [stage["peak_memory_bytes"] for stage in stages] == [sum(amounts) for amounts in BY_HAND.values()]
    assert sum(stage["peak_memory_bytes"] for stage in stages) == 200_492_277_760
    assert run(*arguments) == ExitCode.DONE
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["stage", *KINDS] in shown
    assert ["0", *(word for amount in BY_HAND[0, 9] for word in bytes_text(amount).split())] in shown


MIXED = ("--model", "gpt3-2.7b", "--microbatch", 1, "--global-batch", 64, "--nodes", "A100:2,A40:3x2")


def test_nodes_of_several_kinds_are_planned_together(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert run(*MIXED, "--prices", "A100:3.2,A40:0.9", "--after-losing", "A40-0") == ExitCode.DONE
    shown = capsys.readouterr().out
    assert all(len(line) <= 100 for line in shown.splitlines())
    for part in (
        "gpt3-2.7b on 2 nodes of 1 × A100 and 3 nodes of 2 × A40",
        "pipelines with nodes of one kind each",
        "stages of a pipeline of",
        "samples a $",
        "2 A100 + 3 A40",
        "after losing A40-0",
        "after losing any 2 nodes at once",
    ):
        assert part in shown
    run(*MIXED, "--prices", "A100:3.2,A40:0.9", "--json")
    answer = json.loads(capsys.readouterr().out)
    assert answer["kinds"][1] == {"name": "A40", "nodes": 3, "devices_per_node": 2}
    nodes = [node for pipeline in answer["plan"]["pipelines"] for node in pipeline["nodes"]]
    assert sorted([*nodes, *answer["plan"]["spares"]]) == ["A100-0", "A100-1", "A40-0", "A40-1", "A40-2"]
    for pipeline in answer["plan"]["pipelines"]:
        kinds = [node.split("-")[0] for node in pipeline["nodes"]]
        for stage in pipeline["stages"]:
            assert stage["available_bytes"] == {"A100": 80 * 10**9, "A40": 48 * 10**9}[kinds[stage["node"]]]
            assert stage["headroom_bytes"] >= 0
    everything = answer["prices"][0]
    assert everything["dollars_per_h"] == pytest.approx(2 * 3.2 + 3 * 0.9)
    assert everything["samples_per_dollar"] == pytest.approx(64 / (answer["plan"]["step_s"] * 9.1 / 3600))


def test_one_kind_by_its_name_is_planned_as_without(capsys):
    common = ("--model", "gpt3-2.7b", "--microbatch", 1, "--global-batch", 64, "--schedule", "interleaved", "--json")
    assert run(*common, "--nodes", "A100:4x2") == ExitCode.DONE
    named = json.loads(capsys.readouterr().out.replace("A100-", "node"))
    assert run(*common, "--nodes", 4, "--gpus-per-node", 2, "--device", "A100") == ExitCode.DONE
    plain = json.loads(capsys.readouterr().out)
    assert named.pop("mfu") is None
    assert plain.pop("mfu") > 0
    assert named == plain


def test_kinds_may_have_profiles_of_their_own(tmp_path, capsys):
    fast, slow = tmp_path / "fast.json", tmp_path / "slow.json"
    fast.write_text(profile_to_json(make_profile([1.0] * 6, memory_bytes=2 * 10**10)))
    slow.write_text(profile_to_json(make_profile([3.0] * 6, memory_bytes=2 * 10**10)))
    arguments = ("--nodes", "new:2,old:2", "--global-batch", 96, "--profiles", f"new:{fast},old:{slow}", "--json")
    assert run(*arguments) == ExitCode.DONE
    plan = json.loads(capsys.readouterr().out)["plan"]
    shares = {pipeline["nodes"][0].split("-")[0]: pipeline["microbatches"] for pipeline in plan["pipelines"]}
    assert shares["new"] == 3 * shares["old"]
    assert run(*arguments, "--recompute", "auto") == ExitCode.USAGE
    assert "--recompute and --profiles were both given" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*MIXED, "--device", "A40"), "--device and kinds of nodes were both given"),
        ((*MIXED, "--prices", "A100:1"), "--prices leaves A40 out"),
        ((*MIXED, "--after-losing", "node1"), "--after-losing names 'node1'; the nodes are A100-0 to A40-2"),
        ((*MIXED[:-1], "A100:2,A41:2"), "A41"),
        ((*MIXED[:-1], 4, "--device", "A40", "--prices", "A40:1"), "--prices is for nodes of several kinds"),
        ((*MIXED[:-1], "A100:2", "--profile", "x.json"), "--profile and kinds of nodes were both given"),
    ],
)
def test_wrong_words_about_kinds_say_what_to_change(capsys, arguments, message):
    assert run(*arguments) in (ExitCode.USAGE, ExitCode.CONFIG)
    assert message in capsys.readouterr().err


def test_devices_that_share_a_stage_out_take_a_microbatch_each(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    file = write(tmp_path, make_profile([1.0, 2.0, 1.0]))
    common = ("--profile", file, "--nodes", 2, "--gpus-per-node", 4, "--sharding", "optimizer")
    assert run(*common, "--global-batch", 48) == ExitCode.DONE
    shown = capsys.readouterr().out
    assert "4 devices of a node hold each stage, and take a microbatch each" in shown
    assert run(*common, "--global-batch", 48, "--json") == ExitCode.DONE
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert sum(each["microbatches"] for each in plan["pipelines"]) == 48 // 2 // 4
    assert run(*common, "--global-batch", 12) == ExitCode.USAGE
    assert "multiple of 8" in capsys.readouterr().err
    for wrong in (("--sharding-devices", 3), ("--sharding", "weights")):
        assert run(*common, "--global-batch", 48, *wrong) == ExitCode.USAGE
        assert wrong[0] in capsys.readouterr().err


def test_what_devices_share_out_is_chosen_by_the_step_that_it_takes(capsys):
    """The choice is the fastest of all that can be asked for one by one."""
    given = ("--model", "gpt3-6.7b", "--device", "A100", "--nodes", 4, "--gpus-per-node", 4, "--global-batch", 128)
    given = (*given, "--microbatch", 2, "--recompute", "all", "--json")
    assert run(*given, "--sharding", "auto") == 0
    chosen = json.loads(capsys.readouterr().out)
    choices = {each["sharding"]: each["step_s"] for each in chosen["sharding"]}
    assert len(choices) == 1 + 3 * 2
    assert chosen["plan"]["step_s"] == min(step_s for step_s in choices.values() if step_s is not None)
    for level in ("none", "optimizer", "gradients", "all"):
        ours = run(*given, "--sharding", level)
        alone = json.loads(capsys.readouterr().out)["plan"]["step_s"] if ours == 0 else None
        assert alone == choices["none" if level == "none" else f"{level} over 4 devices"]


def test_of_what_devices_share_out_the_choices_with_all_copies_come_first(tmp_path, capsys):
    # Two nodes together hold less of the gradients, and wait less for a slow network, than each on its own.
    file = write(tmp_path, make_profile([1.0] * 9, memory_bytes=9 * 10**8, bytes_per_s=5e7))
    given = ("--profile", file, "--nodes", 2, "--gpus-per-node", 8, "--global-batch", 64, "--json")
    plans = {}
    for level in ("auto", "all", "gradients"):
        assert run(*given, "--sharding", level) == 0
        plans[level] = json.loads(capsys.readouterr().out)["plan"]
    assert plans["gradients"]["step_s"] < plans["all"]["step_s"]
    assert plans["auto"] == plans["all"]
    assert plans["auto"]["redundant"]
    assert not plans["gradients"]["redundant"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--context-parallel", "2"], "--context-parallel was given without --sharding"),
        (["--sharding", "all", "--context-parallel", "3"], "--context-parallel is 3; it must divide the 8 devices"),
        (["--sharding", "all", "--context-parallel", "8", "--sequence-length", "100"], "samples of 100 tokens and 32"),
    ],
)
def test_what_cannot_be_shared_is_refused_before_planning(capsys, options, words):
    given = ["--model", "gpt3-6.7b", "--device", "H100", "--gpus-per-node", "8", "--microbatch", "1"]
    assert run(*given, "--nodes", 4, "--global-batch", 128, *options) != ExitCode.DONE
    assert words in capsys.readouterr().err.replace("\n", " ")
