"""Shows that the promises can fail: each mutation of the decision code is caught by the property named with it.

    python tools/mutations.py                  all of them, about ten minutes on two cores
    python tools/mutations.py stale_answers    some of them
    python tools/mutations.py --end-to-end     those of what workers do that real workers are tried with, too
    python tools/mutations.py --verify         those of how scripts are read, each shown to `oobleck verify`
    python tools/mutations.py --table          the tables of docs/cluster_mode.md and docs/verify.md

Every mutation is applied to a copy of the package, and the property is run there: unchanged code passes it (the tests
see to that), so a failure is the mutation's. Exits with 1 if one is not caught.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 280
END_TO_END_TIMEOUT_S = 900

COMMIT = "tests/control/test_commit.py::test_faults_of_all_kinds_break_no_promise"
KILLS = "tests/control/test_commit.py::test_killed_nodes_break_no_promise"
F_LOSSES = "tests/control/test_commit.py::test_losing_f_nodes_never_ends_a_run"
IN_COMMITS = "tests/control/test_commit.py::test_workers_that_die_in_the_middle_of_a_commit_break_no_promise"
RESTARTS = "tests/control/test_commit.py::test_workers_that_end_and_come_back_break_no_promise"
FORGOTTEN = (
    "tests/control/training/test_coordinator.py"
    "::test_a_step_that_a_whole_pipeline_failed_in_is_forgotten_and_never_finished"
)
ANSWERS = "tests/control/steps/test_follower.py::test_an_answer_stays_true_wherever_the_worker_is_interrupted"
CLAIMS = "tests/control/steps/test_follower.py::test_who_has_not_applied_a_step_that_others_have_catches_up_first"
SECTIONS = "tests/control/test_commit.py::test_sections_of_a_step_break_no_promise"
EXPERTS = "tests/training/step/test_experts.py::test_a_device_to_whose_experts_no_token_goes_takes_part_all_the_same"
OF_EXPERTS = "tests/training/step/test_experts.py::test_tokens_that_are_sent_to_experts_give_what_one_device_computes"
IN_PARTS = "tests/training/step/test_contexts.py::test_devices_that_share_samples_compute_what_one_device_computes"
PARTS_COUNTED = "tests/training/step/test_contexts.py::test_one_of_the_devices_that_share_a_microbatch_counts_it"
SHARED_OUT = "tests/control/test_commit.py::test_devices_that_share_out_a_stage_break_no_promise"
SHARED_WEIGHTS = "tests/training/step/test_node_sums.py::test_whole_weights_are_those_of_all_shares_to_the_last_bit"
POSTED = "tests/training/step/test_node_sums.py::test_what_a_device_posts_does_not_depend_on_where_it_was_interrupted"
COMPUTED_BY_DEVICES = (
    "tests/training/step/test_node_sums.py::test_devices_compute_what_one_does_with_all_of_their_microbatches"
)
PASSED_THROUGH = (
    "tests/training/step/test_node_sums.py::test_a_pass_goes_through_the_layers_that_autograd_does_not_come_to"
)
STACK = "tests/sim/test_promises.py::test_faults_of_all_kinds_break_no_promise"
CONSENT = "tests/control/test_commit.py::test_a_script_stops_at_the_step_where_it_says_so"
SAVES = "tests/control/test_commit.py::test_no_run_waits_for_a_save_that_nobody_makes"
RELAYED = "tests/sim/cluster/test_relays.py::test_what_a_frozen_relay_did_not_pass_on_is_said_again"
NAMED_TENSORS = "tests/training/model/test_named_tensors.py::test_masks_and_types_are_the_models_own_on_every_stage"
MEANS = "tests/training/step/test_step.py::test_a_steps_loss_and_gradients_are_means_over_the_tokens_that_count"
TUNING = "tests/e2e/test_finetuning.py::test_losses_are_those_of_transformers_whatever_fails"
TRAINED = "tests/e2e/test_trainer.py::test_losses_and_weights_are_those_of_transformers_trainer[padded-gpt2]"
ADAPTED = "tests/training/model/test_adapters.py::test_adapters_leave_a_model_as_it_is_until_they_are_trained"
NOT_FULL = "tests/training/data/test_script_stream.py::test_a_step_that_is_not_full_is_filled_with_what_does_not_count"
REDUCED = "tests/training/model/test_frozen.py::test_only_what_is_trained_is_reduced"
PATIENT = "tests/sim/test_patience.py::test_workers_that_are_slow_for_an_hour_are_not_taken_for_stuck"
OUTAGES = "tests/sim/test_patience.py::test_a_network_that_is_down_for_up_to_a_minute_ends_no_run"
SCRIPTS = "tests/sim/test_scripts.py::test_no_storm_leaves_a_rank_behind_or_ends_in_a_false_exit_status"
UNHEARD = "tests/sim/test_promises.py::test_what_a_killed_master_had_not_heard_is_told_to_the_next"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """A mistake that somebody could make: one place in the code that reads otherwise."""

    name: str
    what: str
    file: str
    old: str
    new: str
    caught_by: str
    end_to_end: str = ""
    """A test with real workers that catches it as well, where one was tried."""
    verified: tuple[str, ...] = ()
    """What `oobleck verify` is given to find it: options, and a kind of `tests/e2e/verified_script.py`."""


FOLLOWER = "oobleck/control/steps/follower.py"
AGREEMENT = "oobleck/control/steps/agreement.py"
ALL_HAVE_TOLD = (
    "        if known.neighbours is None or known.own is None or known.missing:\n"
    "            return ()\n"
    "        part = known.own\n"
    "        for child in known.neighbours.children:"
)

MUTATIONS = (
    Mutation(
        name="stale_answers",
        what="answers to an older fence are not dropped",
        file="oobleck/control/recovery/fencing.py",
        old="            if given.status.generation != state.recovery.generation:\n                return None\n",
        new="",
        caught_by="tests/control/training/test_coordinator.py::test_answers_to_an_older_fence_are_ignored",
    ),
    Mutation(
        name="slow_is_stuck",
        what="a step that takes longer than its limit is a hang, whatever its workers do",
        file="oobleck/control/training/hang_watch.py",
        old="        if not comes_on or stuck_workers(answers, busy):\n",
        new="        if running_s >= 0:\n",
        caught_by=PATIENT,
    ),
    Mutation(
        name="cut_off_is_lost",
        what="nodes that do not reach each other are given up, however many they are and whatever they hold",
        file="oobleck/control/recovery/fencing.py",
        old="        or is_network_down(statuses, cut_off, recovery.fault_threshold),\n",
        new="        or False,\n",
        caught_by=OUTAGES,
    ),
    Mutation(
        name="dead_holders",
        what="lost nodes stay in the plan, and layers are read from them",
        file="oobleck/control/training/decision.py",
        old="lost=frozenset(self._members.without_part(in_force)),",
        new="lost=frozenset(),",
        caught_by=KILLS,
    ),
    Mutation(
        name="unfenced_commit",
        what="a worker applies a step after a fence",
        file="oobleck/control/steps/commit_state.py",
        old="        with self._lock:\n            self._check_fence()\n            self._move_to(record)",
        new="        with self._lock:\n            self._move_to(record)",
        caught_by="tests/control/steps/test_commit_state.py::test_a_step_is_applied_before_the_fence_or_not_at_all",
    ),
    Mutation(
        name="commit_without_agreement",
        what="a step is committed without the parts of all workers",
        file="oobleck/sim/cluster/step.py",
        old=(
            "        total = yield from"
            " self._agreements.total(committee, effect.subject, part, takes_s=self._committing_s)\n"
        ),
        new=(
            "        partial = Tally.of(self._programs.partial_commit.microbatches)\n"
            "        total = Totals(part.numbers, Tally.of(range(self._job.num_microbatches)) - partial)\n"
        ),
        caught_by=KILLS,
    ),
    Mutation(
        name="up_before_a_child",
        what="a worker sends its part up before those of all its children are here",
        file=AGREEMENT,
        old=ALL_HAVE_TOLD,
        new=(
            "        if known.neighbours is None or known.own is None:\n"
            "            return ()\n"
            "        part = known.own\n"
            "        for child in sorted(known.parts):"
        ),
        caught_by=IN_COMMITS,
    ),
    Mutation(
        name="down_before_all",
        what="the root sends a total down before the parts of all its children are here",
        file=AGREEMENT,
        old=ALL_HAVE_TOLD,
        new=(
            "        if known.neighbours is None or known.own is None or (known.missing and known.neighbours.parent):\n"
            "            return ()\n"
            "        part = known.own\n"
            "        for child in sorted(known.parts):"
        ),
        caught_by=IN_COMMITS,
    ),
    Mutation(
        name="own_part_suffices",
        what="a worker applies a step once it has sent its own part",
        file=AGREEMENT,
        old="            known.neighbours, known.own = neighbours, part\n",
        new="            known.neighbours, known.own, known.total = neighbours, part, part\n",
        caught_by=IN_COMMITS,
    ),
    Mutation(
        name="stale_parts",
        what="a part or a total of an older generation is taken for one of the newest",
        file=AGREEMENT,
        old="            if message.generation < self._generation:\n                return ()\n",
        new=(
            "            from dataclasses import replace\n"
            "            message = replace(message, generation=max(message.generation, self._generation))\n"
        ),
        caught_by=IN_COMMITS,
    ),
    Mutation(
        name="unfenced_section",
        what="a section is committed after the worker has answered that it is not",
        file="oobleck/control/steps/commit_state.py",
        old="            self._check_fence()\n            self._commit_section(record)",
        new="            self._commit_section(record)",
        caught_by=ANSWERS,
    ),
    Mutation(
        name="section_left_behind",
        what="a worker with the sums of a section that others have committed is not ordered to commit it",
        file="oobleck/control/steps/plan_history.py",
        old="_record(verdict, partial) if verdict.is_section_behind else None",
        new="None",
        caught_by=SECTIONS,
    ),
    Mutation(
        name="committed_twice",
        what="microbatches of committed sections are assigned again by a plan in the middle of the step",
        file="oobleck/control/plans/sections.py",
        old="    gone = frozenset(partial)\n",
        new="    gone = frozenset(())\n",
        caught_by=SECTIONS,
    ),
    Mutation(
        name="behind_but_trusted",
        what="layers are read from workers that missed a section which others have committed",
        file="oobleck/control/steps/judgement.py",
        old="    missed = {key for key in alike if sections[key] != section and key not in behind_section}\n",
        new="    missed = set()\n",
        caught_by="tests/control/steps/test_judgement.py::test_who_missed_a_section_holds_nothing",
    ),
    Mutation(
        name="unfenced_reduction",
        what="a worker joins a commit although its answer said that it has no reduced gradients",
        file="oobleck/control/steps/commit_state.py",
        old="            self._check_fence()\n            self._reduced = step",
        new="            self._reduced = step",
        caught_by="tests/control/steps/test_commit_state.py::test_gradients_are_reduced_before_the_fence_or_not_at_all",
    ),
    Mutation(
        name="unnamed_loss",
        what="workers whose pipeline lost a node after the fence wait for it, for their order does not stop them",
        file="oobleck/control/steps/commit_state.py",
        old="                    self._note_lost(update.lost)",
        new="                    pass",
        caught_by="tests/control/steps/test_commit_state.py"
        "::test_an_order_stops_a_pipeline_that_lost_a_node_after_the_fence",
    ),
    Mutation(
        name="unchecked_base",
        what="a worker takes what changes from another plan for a change of its own",
        file="oobleck/control/plans/plan_delta.py",
        old="    if rebuilt.id.digest != delta.digest:",
        new="    if False:",
        caught_by="tests/control/plans/test_orders.py::test_another_base_than_the_one_that_was_changed_is_found_out",
    ),
    Mutation(
        name="finished_too_early",
        what="a run of a script has finished once the ranks of any node have",
        file="oobleck/control/scripts/machine.py",
        old="if finished.issuperset(state.names):",
        new="if finished:",
        caught_by=SCRIPTS,
    ),
    Mutation(
        name="failure_unseen",
        what="a rank of a script that fails counts as one that has finished",
        file="oobleck/roles/rank_keeper.py",
        old="has_failed = end != protocol.Exited(exit_code=0) and not generation.is_ending",
        new="has_failed = False",
        caught_by=SCRIPTS,
    ),
    Mutation(
        name="ignored_threshold",
        what="f is ignored: plans may have a single copy of a layer",
        file="oobleck/planner/catalog.py",
        old="return min(self.settings.fault_threshold + 1, most), most",
        new="return 1, 1",
        caught_by=F_LOSSES,
    ),
    Mutation(
        name="forgotten_step",
        what="a step that workers were ordered to forget is finished after all",
        file="oobleck/control/steps/plan_history.py",
        old="verdict.adopted is None or verdict.adopted < self._forgot or",
        new="verdict.adopted is None or",
        caught_by=FORGOTTEN,
    ),
    Mutation(
        name="broken_segments",
        what="segments stay with a pipeline that has broken since they were assigned",
        file="oobleck/control/steps/judgement.py",
        old="kept = tuple(segment for segment in segments if segment.pipeline in whole)",
        new="kept = tuple(segments)",
        caught_by="tests/control/steps/test_judgement.py"
        "::test_segments_of_a_pipeline_that_broke_since_are_dealt_again_and_others_are_kept",
    ),
    Mutation(
        name="dealt_twice",
        what="microbatches that were assigned before are assigned again",
        file="oobleck/control/steps/judgement.py",
        old="done = {microbatch for segment in kept for microbatch in segment.microbatches}",
        new="done: set[int] = set()",
        caught_by=KILLS,
    ),
    Mutation(
        name="half_a_program",
        what="a pipeline that failed in the middle of a step is ordered to finish it",
        file="oobleck/control/steps/plan_history.py",
        old="if not failed <= {None, *broken}:",
        new="if not failed <= {None, *broken, *failed}:",
        caught_by=FORGOTTEN,
    ),
    Mutation(
        name="nobody_catches_up",
        what="workers that have not applied a step that others have are not ordered to",
        file="oobleck/control/steps/judgement.py",
        old="catch_up=newest if behind else None,",
        new="catch_up=None,",
        caught_by=COMMIT,
    ),
    Mutation(
        name="reused_groups",
        what="the group of a pipeline that was stopped in the middle of a step is kept",
        file="oobleck/control/steps/plan_history.py",
        old="                if lost.isdisjoint(pipeline.nodes)\n            }",
        new="            }",
        caught_by=RESTARTS,
    ),
    Mutation(
        name="open_sums_kept",
        what="a group is kept although one of its members has sent its part in a sum that others never asked for",
        file="oobleck/control/steps/groups.py",
        old="is None or status.has_open_groups or status.adopted",
        new="is None or status.adopted",
        caught_by=SECTIONS,
    ),
    Mutation(
        name="unformed_kept",
        what="a group is kept although one of its members has not formed it yet",
        file="oobleck/control/steps/commit_state.py",
        old="has_open_groups=self._open_sums or self.is_forming,",
        new="has_open_groups=self._open_sums,",
        caught_by=KILLS,
    ),
    Mutation(
        name="unformed_summed",
        what="a worker posts a step's sums before it has formed their groups",
        file=FOLLOWER,
        old="        yield from self.partial_commit.await_groups()\n",
        new="",
        caught_by=KILLS,
    ),
    Mutation(
        name="unformed_section",
        what="a worker posts a section's sums before it has formed their groups",
        file="oobleck/control/steps/partial_commit.py",
        old="            yield from self.await_groups()\n",
        new="            pass\n",
        caught_by=SECTIONS,
    ),
    Mutation(
        name="unknown_groups_kept",
        what="groups are kept with a worker that has not adopted the newest plan",
        file="oobleck/control/steps/groups.py",
        old=" or status.has_open_groups or status.adopted != newest\n",
        new=" or status.has_open_groups\n",
        caught_by="tests/control/steps/test_groups.py::test_whose_groups_cannot_be_kept",
    ),
    Mutation(
        name="lost_evaluation",
        what="a step is finished before an interrupted evaluation that comes first",
        file="oobleck/control/training/replanning.py",
        old="return has_records and may_begin and not evaluates_first and",
        new="return has_records and may_begin and",
        caught_by="tests/control/test_evaluation.py::test_a_plan_takes_effect_where_an_evaluation_was_broken_off",
    ),
    Mutation(
        name="unheard_step",
        what="a step begins before the script's callbacks have heard of the one before",
        file="oobleck/control/steps/step_board.py",
        old="return generation == self._generation_of() and step <= through",
        new="return True",
        caught_by=CONSENT,
    ),
    Mutation(
        name="saves_left_out",
        what="a step to save begins while the save before it is under way, and is not saved",
        file="oobleck/control/checkpoints/requests.py",
        old="through = due + every - 1 if is_asked or not self.is_enabled else due - 1",
        new="through = due + every - 1",
        caught_by="tests/control/test_commit.py::"
        "test_a_step_to_save_waits_for_the_save_before_it_and_no_run_for_nothing",
    ),
    Mutation(
        name="sharding_forgotten",
        what="a new master does not know what the planner has had devices share out",
        file="oobleck/control/training/replanning.py",
        old="self._plan, self.sharding = replayed.generations.plan, replayed.sharding",
        new="self._plan = replayed.generations.plan",
        caught_by="tests/control/training/test_planning.py"
        "::test_what_is_shared_out_is_in_each_order_until_the_run_ends",
    ),
    Mutation(
        name="needless_repetition",
        what="a step is run again although finishing it is faster",
        file="oobleck/control/training/replanning.py",
        old="if finish_s <= again_s + _WORTH_FORGETTING_S:",
        new="if finish_s <= 0:",
        caught_by=(
            "tests/control/training/test_coordinator.py::test_a_step_is_finished_unless_all_survivors_run_it_again_in_less_time"
        ),
    ),
    Mutation(
        name="unheard_words",
        what="an agent does not repeat to a new master what the previous one may not have received",
        file="oobleck/roles/agent.py",
        old="            self._resend_queue.repeat_unheard(also=reported)\n",
        new="",
        caught_by=UNHEARD,
    ),
    Mutation(
        name="lost_mail",
        what="what was sent through a relay that was lost is not sent again",
        file="oobleck/control/relays/mail.py",
        old="            if kept.number <= heard:\n",
        new="            if True:\n",
        caught_by="tests/control/relays/test_desk.py::test_every_message_arrives_once_and_in_order",
    ),
    Mutation(
        name="lost_words",
        what="an agent does not repeat what it sent through a relay that was lost",
        file="oobleck/roles/way.py",
        old="        self._queue.repeat_unheard()\n",
        new="",
        caught_by=RELAYED,
    ),
    Mutation(
        name="silent_relay",
        what="the master waits for a relay that is silent, and for all that speak through it",
        file="oobleck/control/relays/tree.py",
        old="            elif now_s - agent.heard_s >= PATIENCE * self._lease_s:\n",
        new="            elif False:\n",
        caught_by="tests/control/relays/test_desk.py::test_a_silent_relay_is_left_before_a_lease_lapses",
    ),
    Mutation(
        name="relay_speaks_for_any",
        what="a relay is heard for nodes that do not speak through it",
        file="oobleck/control/relays/tree.py",
        old=" and node != through and self.root_of(node) == through else",
        new=" else",
        caught_by="tests/control/relays/test_desk.py::test_nobody_speaks_for_a_node_that_is_elsewhere",
    ),
    Mutation(
        name="relay_behind_a_wall",
        what="agents that nobody may be able to connect to have relays, or are some",
        file="oobleck/control/relays/desk.py",
        old="self._tree.add(node, now_s) if takes_calls else",
        new="self._tree.add(node, now_s) if True else",
        caught_by="tests/control/relays/test_desk.py::test_agents_that_take_no_calls_speak_directly_and_are_no_relays",
    ),
    Mutation(
        name="endless_save",
        what="a save is waited for although a worker missed the step after which all saved",
        file="oobleck/control/checkpoints/saving.py",
        old="            self._broken.missed(update.catch_up.generation)\n",
        new="            pass\n",
        caught_by=SAVES,
    ),
    Mutation(
        name="save_of_a_loss",
        what="a save is waited for although a worker was lost before any share of it was reported",
        file="oobleck/control/checkpoints/saving.py",
        old="            if self._broken.has(state.generation, state.step):\n",
        new="            if False:\n",
        caught_by="tests/control/test_checkpoints.py::test_a_save_is_given_up_whose_first_share_is_heard_of_after_a_loss",
    ),
    Mutation(
        name="endless_lease",
        what="a silent node is never given up",
        file="oobleck/control/nodes/silence.py",
        old="        lapses_s = max(last_s + self._control.lease_s, self._spared_until_s)\n",
        new="        lapses_s = max(last_s + 1e9, self._spared_until_s)\n",
        caught_by=STACK,
    ),
    Mutation(
        name="unsettled_takeover",
        what="a master takes over without a fence although orders may not have arrived",
        file="oobleck/control/training/takeover.py",
        old="    if not replayed.is_settled:\n",
        new="    if False:\n",
        caught_by="tests/control/training/test_coordinator.py::test_orders_that_nobody_may_have_received_are_given_again",
    ),
    Mutation(
        name="no_restart",
        what="a worker that ended is not restarted",
        file="oobleck/control/nodes/worker_lifecycle.py",
        old="        self._start(turn, worker_id)\n        self._program.drop_worker(turn, worker_id)\n",
        new="        self._program.drop_worker(turn, worker_id)\n",
        caught_by="tests/sim/cluster/test_run.py::test_a_crashed_worker_is_started_again_in_its_place",
    ),
    Mutation(
        name="seven_idle",
        what="a node is lost as a whole, although the same device of it failed each time",
        file="oobleck/control/nodes/worker_lifecycle.py",
        old="            if is_worth_it and all(each.device == message.device for each in restarts):\n",
        new="            if False:\n",
        caught_by="tests/sim/test_promises.py::test_a_device_that_fails_for_good_idles_no_other",
    ),
    Mutation(
        name="slow_for_ever",
        what="a slow node that was left out is never tried again",
        file="oobleck/control/training/replanning.py",
        old="        return self._slow_retry.due_s\n",
        new='        return float("inf")\n',
        caught_by="tests/sim/test_slow_nodes.py::test_a_slow_node_rests_and_is_taken_back_once_it_is_well",
    ),
    Mutation(
        name="tries_forgotten",
        what="a slow node that was tried too early waits no longer the next time",
        file="oobleck/control/speed/slow_node_retry.py",
        old="min(2 * before.wait_s, _LONGEST_WAIT * found_out_s)",
        new="before.wait_s",
        caught_by="tests/sim/test_slow_nodes.py::test_a_slow_node_that_is_tried_too_early_rests_twice_as_long",
    ),
    Mutation(
        name="own_program",
        what="a device that begins a step when a node is lost cuts it into other sections than its stage",
        file=FOLLOWER,
        old="        sections = self.partial_commit.num_sections\n",
        new="        sections = self.partial_commit.num_sections if ends_under_plan else 1\n",
        caught_by=SHARED_OUT,
    ),
    Mutation(
        name="applied_first",
        what="a worker applies a step before it passes the commit's point of no return",
        file=FOLLOWER,
        old=("        self._commit_state.begin_apply(agreed.record)\n        yield from self._apply(agreed.record)\n"),
        new=("        yield from self._apply(agreed.record)\n        self._commit_state.begin_apply(agreed.record)\n"),
        caught_by=KILLS,
    ),
    Mutation(
        name="unclaimed_reduction",
        what="a worker joins a commit without recording that it has the reduced gradients",
        file=FOLLOWER,
        old="        self._commit_state.note_reduced(step)\n",
        new="",
        caught_by=CLAIMS,
    ),
    Mutation(
        name="adopted_first",
        what="a plan is adopted before its layers have arrived",
        file=FOLLOWER,
        old="        yield worker_effects.Exchange(update)\n",
        new="        self._commit_state.adopt(update, tuple(layers))\n        yield worker_effects.Exchange(update)\n",
        caught_by=KILLS,
    ),
    Mutation(
        name="fenced_reduction",
        what="after a fence a worker posts a step's sums while others still wait for those of a section",
        file=FOLLOWER,
        old="        self._commit_state.begin_sums()\n",
        new="",
        caught_by="tests/control/test_commit.py::test_no_sum_is_posted_after_a_fence_that_left_out_a_section",
    ),
    Mutation(
        name="section_kept_back",
        what="a section that was not committed is not returned to the gradients",
        file="oobleck/control/steps/partial_commit.py",
        old="            yield worker_effects.GiveBack(section.number)\n",
        new="",
        caught_by=SECTIONS,
        end_to_end="tests/e2e/test_sections.py::test_what_is_committed_is_not_run_again_by_a_plan_within_the_step",
    ),
    Mutation(
        name="no_catching_up",
        what="a worker does not apply a step that it is ordered to catch up with",
        file=FOLLOWER,
        old="        if update.catch_up is not None and self._commit_state.catch_up(update.catch_up):\n",
        new="        if False and update.catch_up is not None:\n",
        caught_by=KILLS,
    ),
    Mutation(
        name="share_done_twice",
        what="a pipeline that finishes a step computes its own share again",
        file=FOLLOWER,
        old="        if self._share_done:\n",
        new="        if self._share_done and ends_under_plan:\n",
        caught_by=KILLS,
        end_to_end="tests/e2e/test_losses.py::test_killed_nodes_cost_no_step_and_change_no_loss",
    ),
    Mutation(
        name="segments_done_twice",
        what="a pipeline that is ordered a second time to finish a step computes its segments again",
        file=FOLLOWER,
        old=" and segment.segment not in self._segments_done:\n",
        new=":\n",
        caught_by=COMMIT,
    ),
    Mutation(
        name="never_finished",
        what="a step that workers are ordered to finish is skipped",
        file=FOLLOWER,
        old="        elif self._commit_state.applied == update.finish - 1:\n",
        new="        elif self._commit_state.applied == update.finish:\n",
        caught_by=KILLS,
        end_to_end="tests/e2e/test_losses.py::test_killed_nodes_cost_no_step_and_change_no_loss",
    ),
    Mutation(
        name="dropped_mask",
        what="stages but the last do not give their blocks the masks and positions of a batch",
        file="oobleck/training/model/models.py",
        old="use_cache=False, **others)\n        hidden:",
        new="use_cache=False)\n        hidden:",
        caught_by=NAMED_TENSORS,
        end_to_end=TUNING,
    ),
    Mutation(
        name="dropped_mask_of_the_head",
        what="the last stage does not give its blocks the masks and positions of a batch",
        file="oobleck/training/model/models.py",
        old=', "use_cache": False, **self._others(batch)}',
        new=', "use_cache": False}',
        caught_by=NAMED_TENSORS,
        end_to_end=TUNING,
    ),
    Mutation(
        name="seen_padding",
        what="padding is not hidden from the other tokens",
        file="oobleck/training/data/samples.py",
        old="    return {_MASK}\n",
        new="    return set()\n",
        caught_by="tests/training/data/test_samples.py::test_padding_is_hidden_and_predicts_nothing",
    ),
    Mutation(
        name="all_tokens_count",
        what="ignored labels count where a step's loss is averaged",
        file="oobleck/training/data/batches.py",
        old="int((labels != IGNORED_LABEL).sum())",
        new="labels.numel()",
        caught_by=MEANS,
        end_to_end=TUNING,
    ),
    Mutation(
        name="first_tokens_count",
        what="the first token of each sample counts, though nothing predicts it",
        file="oobleck/training/data/batches.py",
        old="self.labels[:, 1:] if self.is_causal else",
        new="self.labels if self.is_causal else",
        caught_by="tests/training/data/test_data.py::test_batches_are_the_samples_asked_for",
        end_to_end="tests/e2e/test_losses.py::test_four_nodes_compute_what_one_process_computes",
    ),
    Mutation(
        name="frozen_in_buckets",
        what="frozen parameters are reduced with those that are trained",
        file="oobleck/training/step/reduction.py",
        old="for name in structure.trained_parameters(layer)",
        new="for name in structure.layer_parameters(layer)",
        caught_by=REDUCED,
    ),
    Mutation(
        name="adapters_like_weights",
        what="adapters start as other weights do, and change the model before they are trained",
        file="oobleck/training/model/initialization.py",
        old="            initialize_adapter(model, module)\n",
        new="            pass\n",
        caught_by=ADAPTED,
    ),
    Mutation(
        name="filler_that_counts",
        what="in a stream's last step, what stands for samples that are not there counts",
        file="oobleck/training/data/script_stream.py",
        old="return ignored(self.sample(self.records.first, inputs), inputs)",
        new="return self.sample(self.records.first, inputs)",
        caught_by=NOT_FULL,
    ),
    Mutation(
        name="rows_to_fill_up_that_count",
        what="in the last step of a Trainer's epoch, what stands for samples that are not there counts",
        file="oobleck/training/data/script_data.py",
        old="ignored(rows[0], inputs)",
        new="rows[0]",
        caught_by="tests/training/data/test_collated.py::test_nothing_counts_of_samples_that_are_none",
        end_to_end=TRAINED,
    ),
    Mutation(
        name="every_epoch_the_first",
        what="a Trainer's samples come in the order of its first epoch, in each of them",
        file="oobleck/transformers/epochs.py",
        old="self._loader.set_epoch(epoch)",
        new="self._loader.set_epoch(0)",
        caught_by="tests/transformers/test_epochs.py::test_each_step_takes_the_samples_that_transformers_takes",
    ),
    Mutation(
        name="means_of_microbatches",
        what="a step's loss and gradients are divided by the tokens that could count, not by those that do",
        file="oobleck/training/step/step_work.py",
        old="    return num_items / divisor if num_items else 1.0\n",
        new="    return 1.0\n",
        caught_by=MEANS,
        end_to_end=TUNING,
    ),
    Mutation(
        name="uncorrected_gradients",
        what="only the loss is corrected to a mean over the tokens that count, not the gradients",
        file="oobleck/training/step/layer_store.py",
        old="record.loss_scale * record.item_share",
        new="record.loss_scale",
        caught_by=("tests/training/step/test_step.py::test_gradients_are_applied_as_means_over_the_tokens_that_count"),
        end_to_end=TUNING,
    ),
    Mutation(
        name="tokens_of_sections_forgotten",
        what="the tokens of a section that is given back do not count any more",
        file="oobleck/training/step/sections.py",
        old="        work.num_items += section.num_items\n",
        new="",
        caught_by="tests/training/step/test_sections.py::"
        "test_a_section_that_is_given_up_leaves_all_gradients_losses_and_counts",
    ),
    Mutation(
        name="tokens_of_committed_sections_forgotten",
        what="a plan in the middle of a step does not say how many tokens count in what is committed",
        file="oobleck/control/steps/plan_history.py",
        old="            num_items=verdict.partial.num_items,\n",
        new="",
        caught_by="tests/control/test_partial_commits.py::test_what_is_committed_of_a_step_is_not_run_again",
    ),
    Mutation(
        name="evaluated_within_a_step",
        what="a plan in the middle of a step begins with an evaluation",
        file=FOLLOWER,
        old="        if not self.partial_commit.before:  # In",
        new="        if True:  # In",
        caught_by=SECTIONS,
    ),
    Mutation(
        name="lost_rows",
        what="the devices of a sharded stage leave out the rows that do not divide by their number",
        file="oobleck/training/model/tensor_parallel.py",
        old="    each = -(-count // degree)\n",
        new="    each = count // degree\n",
        caught_by=SHARED_WEIGHTS,
    ),
    Mutation(
        name="gather_in_apply",
        what="a device of a sharded stage waits for the others before a committed step is applied",
        file="oobleck/sim/cluster/step.py",
        old="        self._layers.apply(self.reduced, record)\n",
        new=(
            "        self._layers.apply(self.reduced, record)\n"
            "        if self.seat is not None:\n"
            "            yield from self._node_sums.begin(self.seat.stage_key, record.step)\n"
        ),
        caught_by=SHARED_OUT,
    ),
    Mutation(
        name="idle_experts",
        what="a device to whose experts no token goes takes no part in the backward pass's exchanges",
        file="oobleck/training/model/experts.py",
        old="        taken = exchanged(rows, counts, collectives)\n",
        new=(
            "        taken = exchanged(rows, counts, collectives)\n"
            "        taken = taken if len(taken) else taken.detach()\n"
        ),
        caught_by=EXPERTS,
    ),
    Mutation(
        name="experts_of_others",
        what="tokens come back from experts in the order in which they have come there",
        file="oobleck/training/model/experts.py",
        old="        placed = torch.empty_like(back).index_copy(0, order, back)",
        new="        placed = back",
        caught_by=OF_EXPERTS,
    ),
    Mutation(
        name="label_between_parts",
        what="the last token of a part of a sample predicts nothing",
        file="oobleck/training/data/batches.py",
        old="            labels=labels[:, part.start : part.stop + 1],\n",
        new="            labels=functional.pad(labels[:, part], (0, 1), value=IGNORED_LABEL),\n",
        caught_by=IN_PARTS,
    ),
    Mutation(
        name="positions_of_parts",
        what="each part of a sample has the positions of the first",
        file="oobleck/training/data/batches.py",
        old="torch.arange(part.start, part.stop)",
        new="torch.arange(length)",
        caught_by=IN_PARTS,
    ),
    Mutation(
        name="heads_of_others",
        what="devices that share a sample keep the order of heads in which these come back",
        file="oobleck/training/model/contexts.py",
        old="return taken.permute(1, 2, 0, 3, 4).flatten(2, 3)",
        new="return taken.permute(1, 2, 3, 0, 4).flatten(2, 3)",
        caught_by=IN_PARTS,
    ),
    Mutation(
        name="counted_by_each",
        what="each of the devices that share a microbatch counts it",
        file="oobleck/training/step/step_work.py",
        old="return self.reports and self.part[0] == 0",
        new="return self.reports",
        caught_by=PARTS_COUNTED,
    ),
    Mutation(
        name="full_cache",
        what="a device begins a program with the weights that it has left whole",
        file="oobleck/training/step/node_sums.py",
        old="            self._drop(self._whole)\n            return\n",
        new="            return\n",
        caught_by=POSTED,
    ),
    Mutation(
        name="unfinished_sums",
        what="sums of an interrupted program count in the next",
        file="oobleck/training/step/node_sums.py",
        old="        self._posted, self._pass = deque(), None\n        if",
        new="        if",
        caught_by=POSTED,
    ),
    Mutation(
        name="late_gradients",
        what="autocast casts weights once for passes that each end with sums of gradients",
        file="oobleck/training/step/node_sums.py",
        old="        return nullcontext() if self._sums_in_passes else self._state.model.casting_once()\n",
        new="        return self._state.model.casting_once()\n",
        caught_by="tests/training/step/test_node_sums.py::test_gradients_of_short_types_are_summed_in_float32",
    ),
    Mutation(
        name="skipped_layers",
        what="passes of a sharded stage go through those layers alone that autograd reports",
        file="oobleck/training/step/node_sums.py",
        old="        self._reach(len(layers) - 1)\n        self._leave",
        new="        self._leave",
        caught_by=PASSED_THROUGH,
    ),
    Mutation(
        name="weights_for_one_layer",
        what="a tied weight is dropped after the first layer that uses it",
        file="oobleck/training/step/node_sums.py",
        old="                ends[own[-1]].add(name)\n",
        new="                ends[own[0]].add(name)\n",
        caught_by=COMPUTED_BY_DEVICES,
    ),
    Mutation(
        name="kept_stage_group",
        what="the group of a stage's devices outlives a step that was interrupted",
        file="oobleck/control/steps/groups.py",
        old='stage_key=GroupKey("stage", generation,',
        new='stage_key=GroupKey("stage", 0,',
        caught_by=SHARED_OUT,
    ),
    Mutation(
        name="fenced_node_sum",
        what="a fence ends the sums within a node of a whole pipeline",
        file="oobleck/sim/cluster/groups.py",
        old="commit_state.is_pipeline_stopped\n",
        new="commit_state.is_fenced\n",
        caught_by=SHARED_OUT,
    ),
    Mutation(
        name="unlike_ranks",
        what="shares of parameters are summed with those of other ranks",
        file="oobleck/training/step/reduction.py",
        old="(name in share.summed or owner.device % share.degree == share.rank)",
        new="True",
        caught_by="tests/training/step/test_node_sums.py::test_shares_are_summed_with_those_of_the_same_rank_alone",
    ),
    Mutation(
        name="whole_parameter_optimizer",
        what="optimizers that go by all of a parameter train rows of it",
        file="oobleck/training/optim/optimizer.py",
        old="                if self._is_sharded:\n",
        new="                if False:\n",
        caught_by="tests/training/optim/test_optimizer.py"
        "::test_an_optimizer_that_goes_by_all_of_a_parameter_is_refused_where_devices_have_some_rows",
    ),
    Mutation(
        name="parity_beside_a_part",
        what="the parity of a group may lie in a failure domain that has one of its parts",
        file="oobleck/control/scripts/parity.py",
        old="(domains.get(node, node) in near, load[node], node)",
        new="(load[node], node)",
        caught_by="tests/control/scripts/test_parity.py"
        "::test_every_rank_is_in_one_group_and_no_two_are_of_a_node_or_of_a_domain_where_that_can_be",
    ),
    Mutation(
        name="lone_part",
        what="a part on one node counts as protected by a parity whose other parts are lost with that node",
        file="oobleck/control/scripts/spread.py",
        old="            and all(each == rank or _without(holders.get(each, ()), gone) for each in group)\n",
        new="",
        caught_by="tests/control/scripts/test_parity.py::test_a_parity_beside_a_part_of_its_group_covers_nothing_of_it",
    ),
    Mutation(
        name="unproven_part",
        what="a lost part that follows from a parity is not compared with its checksums",
        file="oobleck/runtime/agent/parity.py",
        old="            if zlib.crc32(slot.data[start : start + CHUNK_BYTES]) != expected:\n",
        new="            if False:\n",
        caught_by="tests/runtime/agent/test_parity.py::test_what_is_damaged_makes_no_part",
    ),
    Mutation(
        name="unserved_store",
        what="a rank connects to its store whether rank 0 serves it or not",
        file="oobleck/training/attempts/stores.py",
        old="            time.sleep(pause_s)\n",
        new="            return\n",
        caught_by="tests/training/attempts/test_stores.py::test_a_rank_waits_until_its_store_is_served",
    ),
)


BROUGHT = "oobleck/training/model/brought.py"
OF_BROUGHT = "tests/training/model/test_brought.py"
MISREADINGS = (
    Mutation(
        name="declared_ties",
        what="parameters are tied as the model's class declares, whatever the script has made of them",
        file="oobleck/training/model/adapters.py",
        old="    shared = shared_tensors(model, dict(model.all_tied_weights_keys or {}))\n",
        new="    shared = dict(model.all_tied_weights_keys or {})\n",
        caught_by=f"{OF_BROUGHT}::test_a_head_is_tied_if_it_is_the_same_tensor_whatever_the_configuration_says",
        verified=("untied",),
    ),
    Mutation(
        name="buffers_left_out",
        what="buffers that are saved with a model are no state of its layers",
        file="oobleck/training/flow/units.py",
        old="        if buffer is not None and attribute not in module._non_persistent_buffers_set:\n",
        new="        if False:\n",
        caught_by="tests/training/model/test_saved_buffers.py"
        "::test_buffers_that_are_saved_belong_to_their_layer_and_start_as_the_script_has_them",
        verified=("buffered",),
    ),
    Mutation(
        name="order_of_the_process",
        what="a sampler's order is drawn from what the process was seeded with last",
        file="oobleck/transformers/epochs.py",
        old='derive_seed(self._seed, "order", epoch)',
        new="torch.initial_seed()",
        caught_by="tests/transformers/test_epochs.py::test_a_sampler_that_draws_gives_all_workers_one_order_for_each_epoch",
        verified=("weighted",),
    ),
    Mutation(
        name="means_as_sums",
        what="the mean that a model's own loss is counts as a sum, divided by the items of the step",
        file="oobleck/training/model/models.py",
        old="self._share_of_mean(outputs, batch, num_items) if self.structure.loss_rule.is_mean else outputs.loss\n",
        new="outputs.loss\n",
        caught_by="tests/training/model/test_loss_trial.py"
        "::test_microbatches_add_up_to_what_the_model_returns_for_all_samples",
        verified=("mean",),
    ),
    Mutation(
        name="hooks_left_out",
        what="gradients do not go through the hooks that a script has put on parameters",
        file="oobleck/training/model/stage_tensors.py",
        old="        for hook in self._structure.hooks.get(name, ()):\n",
        new="        for hook in ():\n",
        caught_by=f"{OF_BROUGHT}::test_gradients_go_through_the_hooks_of_their_parameters",
        verified=("hooked",),
    ),
)
"""Mistakes in how a script's model, loss and samples are read: a run with them ends well, and trains something else."""


@contextmanager
def applied(mutation: Mutation, copy: Path) -> Iterator[dict[str, str]]:
    """Within the block a mutation is made in the copy; yields the environment in which the copy is run."""
    path = copy / mutation.file
    text = path.read_text()
    if text.count(mutation.old) != 1:
        raise SystemExit(f"{mutation.name}: {mutation.file} has its text {text.count(mutation.old)} times, not once")
    path.write_text(text.replace(mutation.old, mutation.new))
    try:
        # Workers of an end-to-end test are processes in other directories.
        yield os.environ | {"HYPOTHESIS_PROFILE": "hasty", "PYTHONPATH": str(copy)}
    finally:
        path.write_text(text)


def is_caught(mutation: Mutation, copy: Path, test: str, timeout_s: float = TIMEOUT_S) -> bool:
    """Apply a mutation, run a test, and undo it."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--no-header", test]
    with applied(mutation, copy) as environment:
        try:
            done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return False
    if done.returncode not in (0, 1):
        raise SystemExit(f"{mutation.name}: the test could not be run:\n{done.stdout[-2000:]}")
    return done.returncode == 1


def is_found_by_verify(mutation: Mutation, copy: Path) -> bool:
    """Apply a mutation, and ask `oobleck verify` whether a script trains as it does by itself; says what it found."""
    *options, kind = mutation.verified
    script = str(copy / "tests" / "e2e" / "verified_script.py")
    with applied(mutation, copy) as environment, tempfile.TemporaryDirectory() as output:
        command = [sys.executable, "-m", "oobleck", "verify", script, "--steps=4", "--local=3", "--json"]
        command += [*options, "--", kind, output]
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=END_TO_END_TIMEOUT_S
        )
    failed: Any = {"verdict": "failed", "problem": done.stderr[-500:]}
    answer = json.loads(done.stdout) if done.stdout else failed
    found = [each["text"] for each in answer.get("differences", ())][:1]
    print(f"           {answer['verdict']}: {'; '.join([*found, answer.get('problem', '')]).strip('; ')}")
    return answer["verdict"] in ("different", "refused")  # and not where the comparison itself failed


def table(mutations: Sequence[Mutation] = MUTATIONS) -> str:
    """Mutations as a table in Markdown."""
    rows = [f"| {mutation.what} | `{mutation.caught_by.rpartition('::')[2]}` |" for mutation in mutations]
    return "\n".join(["| mutation | property that catches it |", "|---|---|", *rows])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutations; by default, all of them")
    parser.add_argument("--end-to-end", action="store_true", help="run real workers with them")
    parser.add_argument(
        "--verify", action="store_true", help="have `oobleck verify` find those of how scripts are read"
    )
    parser.add_argument("--table", action="store_true", help="print the table of the page")
    asked = parser.parse_args()
    if asked.table:
        print(table(), table(MISREADINGS), sep="\n\n")
        return 0
    is_real, chosen = asked.end_to_end, [*MUTATIONS, *MISREADINGS]
    if asked.verify:
        chosen = [*MISREADINGS]
    elif is_real:
        chosen = [each for each in chosen if each.end_to_end]
    if unknown := set(asked.names) - {each.name for each in chosen}:
        parser.error(f"no such mutation{' for real workers' if is_real else ''}: {', '.join(sorted(unknown))}")
    chosen = [each for each in chosen if each.name in asked.names or not asked.names]
    missed = 0
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory)
        for part in ("oobleck", "tests"):
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        for mutation in chosen:
            began_s = time.monotonic()
            if asked.verify:
                caught = is_found_by_verify(mutation, copy)
            elif is_real:
                caught = is_caught(mutation, copy, mutation.end_to_end, END_TO_END_TIMEOUT_S)
            else:
                caught = is_caught(mutation, copy, mutation.caught_by)
            missed += not caught
            verdict = "caught" if caught else "NOT CAUGHT"
            print(f"{verdict:10s} {mutation.name:26s} {time.monotonic() - began_s:5.0f} s", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} mutations are caught")
    return missed and 1


if __name__ == "__main__":
    sys.exit(main())
