"""What a rank finds: torchrun's environment, and its output shown as torchrun's options say."""

from __future__ import annotations

import pytest

from oobleck.control.node_ranks import OWN_VARIABLES, RankSetup, is_shown, rank_environment, shown_text
from oobleck.control.protocol import StartRanks
from oobleck.job.ranks import RanksSpec, RankStreams, Redirection

ORDER = StartRanks(
    generation=3,
    group_rank=1,
    num_groups=2,
    first_rank=2,
    num_ranks=2,
    world_size=4,
    master_address="10.0.0.1",
    start="20260101-000001",
    master_port=4711,
)


def setup_of(local_rank: int = 1, *, devices: tuple[int, ...] = (0,), **options: object) -> RankSetup:
    run = RanksSpec(tag="t", entry="script", command=("train.py",), directory="/", **options)  # type: ignore[arg-type]
    return RankSetup(run=run, order=ORDER, local_rank=local_rank, devices=devices)


def test_a_rank_finds_what_torchrun_sets():
    environment = rank_environment(setup_of(max_restarts=5, run_id="job7", role="trainer"), {})
    assert environment == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_NAME": "trainer",
        "ROLE_RANK": "3",
        "ROLE_WORLD_SIZE": "4",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "4711",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "5",
        "TORCHELASTIC_RUN_ID": "job7",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "OMP_NUM_THREADS": "1",
    }


def test_what_the_user_gives_counts_but_for_what_the_command_refuses_to_take():
    set_by_run = rank_environment(setup_of(), {})
    given = dict.fromkeys([*set_by_run, "A"], "9")
    environment = rank_environment(setup_of(environment=given), {})
    own = {name for name, value in environment.items() if value != "9"}
    assert own == OWN_VARIABLES.keys() - {"TORCHELASTIC_ERROR_FILE"}


@pytest.mark.parametrize(
    ("devices", "hides", "inherited", "visible"),
    [
        ((0, 1), False, {}, None),
        ((4, 5), False, {}, "4,5"),
        ((4, 5), True, {}, "5"),
        ((0, 1), True, {"CUDA_VISIBLE_DEVICES": "6,7"}, "7"),
        ((0, 1), True, {}, "1"),
    ],
)
def test_a_rank_sees_the_devices_of_its_nodes_line(devices, hides, inherited, visible):
    environment = rank_environment(setup_of(devices=devices, hides_devices=hides), inherited)
    assert environment.get("CUDA_VISIBLE_DEVICES") == visible
    assert environment["LOCAL_RANK"] == ("0" if hides else "1")


OUT = Redirection(stdout=True)
BOTH = Redirection(stdout=True, stderr=True)


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({}, (True, True)),
        ({"redirects": RankStreams(all=OUT)}, (False, True)),
        ({"redirects": RankStreams(all=BOTH), "tee": RankStreams(all=OUT)}, (True, False)),
        ({"redirects": RankStreams(single=((0, BOTH),))}, (True, True)),
        ({"redirects": RankStreams(single=((1, BOTH),))}, (False, False)),
        ({"shown_ranks": (0,)}, (False, False)),
    ],
)
def test_its_output_is_shown_unless_it_is_redirected_alone(options, shown):
    setup = setup_of(**options)
    assert (is_shown(setup, is_error=False), is_shown(setup, is_error=True)) == shown


def test_output_that_is_teed_has_the_ranks_name_before_each_line():
    setup = setup_of(tee=RankStreams(all=OUT))
    assert shown_text(setup, "a\nb\n", is_error=False) == "[default3]:a\n[default3]:b\n"
    assert shown_text(setup, "a\n", is_error=True) == "a\n"
