from __future__ import annotations

import random
from contextlib import nullcontext

import pytest
import torch

from oobleck.training.model.models import StageModel
from oobleck.training.randomness import MicrobatchKey
from tests.examples import first_of
from tests.training.zoo import (
    KEY,
    OTHER_TIES,
    SPECS,
    gradients_of,
    loss_of,
    random_batch,
    run_pipeline,
    seed_each_layer,
    stages_of,
    state_of,
    structure_of,
    transformers_model,
    whole_stage,
)


@pytest.fixture(autouse=True)
def _deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def _cuts(num_layers: int, seed: int) -> list[list[int]]:
    """Cuts of every kind: one layer alone at either end, each layer alone, and some at random."""
    rng = random.Random(seed)
    some = [sorted(rng.sample(range(1, num_layers), rng.randint(1, num_layers - 1))) for _ in range(2)]
    return [[1], [num_layers - 1], list(range(1, num_layers)), *some]


def _assert_every_cut_equals_the_transformers_model(name: str, *, num_cuts: int) -> None:
    structure = structure_of(name)
    state = state_of(whole_stage(structure))
    batch = random_batch(1, is_causal=structure.task == "causal_lm")
    model = transformers_model(structure, state)
    seed_each_layer(model, structure, KEY)
    loss = loss_of(model, structure, batch)
    loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}

    for cuts in _cuts(structure.num_layers, seed=len(name))[:num_cuts]:
        stages = stages_of(structure, cuts, state, dtype=torch.float32)
        assert torch.equal(run_pipeline(stages, batch), loss.detach()), cuts
        gradients = gradients_of(stages)
        assert gradients.keys() == expected.keys()
        assert [n for n in gradients if not torch.equal(gradients[n], expected[n])] == [], cuts


@pytest.mark.parametrize("name", first_of(8, SPECS))
def test_any_cut_equals_the_transformers_model_bit_for_bit(name: str):
    _assert_every_cut_equals_the_transformers_model(name, num_cuts=5)


@pytest.mark.parametrize("name", OTHER_TIES)
def test_so_it_does_with_the_head_tied_or_not(name: str):
    structure = structure_of(name)
    tied = [n for n in structure.shapes if len(structure.layers_with(n)) > 1]
    assert len(tied) == (0 if name.endswith("untied") else 1)
    _assert_every_cut_equals_the_transformers_model(name, num_cuts=3)


def test_the_loss_of_masked_tokens_is_the_models_own():
    structure = structure_of("bert")
    batch = random_batch(1, is_causal=False)
    whole = whole_stage(structure)
    model = transformers_model(structure, state_of(whole)).eval()
    whole.model.eval()
    loss = whole.forward(batch, None, num_items=batch.num_items, key=KEY)
    torch.testing.assert_close(loss, model(input_ids=batch.input_ids, labels=batch.labels).loss)


@pytest.mark.parametrize("name", ["gpt2-dropout", "llama-tied"])
def test_any_cut_equals_the_whole_stage_in_float64(name: str):
    structure = structure_of(name)
    whole = whole_stage(structure, dtype=torch.float64)
    batch = random_batch(1)
    loss = run_pipeline([whole], batch)
    assert loss.dtype == torch.float64
    expected = gradients_of([whole])
    for cuts in _cuts(structure.num_layers, seed=3):
        stages = stages_of(structure, cuts, state_of(whole), dtype=torch.float64)
        assert torch.equal(run_pipeline(stages, batch), loss)
        gradients = gradients_of(stages)
        assert [n for n in gradients if not torch.equal(gradients[n], expected[n])] == []


def test_gpt2_keeps_all_digits_of_float64():
    structure = structure_of("gpt2")
    whole = whole_stage(structure, dtype=torch.float64)
    batch = random_batch(1)
    name, parameter = "transformer.h.1.mlp.c_fc.weight", whole.parameters["transformer.h.1.mlp.c_fc.weight"]
    run_pipeline([whole], batch)
    assert parameter.grad is not None, name
    direction = torch.randn(parameter.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    slope = float((parameter.grad * direction).sum())

    def loss_at(distance: float) -> float:
        with torch.no_grad():
            parameter.add_(direction, alpha=distance)
            loss = float(whole.forward(batch, None, num_items=batch.num_items, key=KEY))
            parameter.sub_(direction, alpha=distance)
        return loss

    # Any step through float32 would leave an error of about 1e-7 / 1e-5 in the difference quotient.
    assert (loss_at(1e-5) - loss_at(-1e-5)) / 2e-5 == pytest.approx(slope, rel=1e-7)


def test_gradients_of_microbatches_add_up():
    structure = structure_of("gpt2")
    whole = whole_stage(structure, dtype=torch.float64)
    first, second = random_batch(1), random_batch(2)
    items = first.num_items + second.num_items
    losses = run_pipeline([whole], first, num_items=items) + run_pipeline([whole], second, num_items=items)
    both = gradients_of([whole])
    together = whole_stage(structure, dtype=torch.float64)
    joined = type(first)(
        input_ids=torch.cat([first.input_ids, second.input_ids]), labels=torch.cat([first.labels, second.labels])
    )
    torch.testing.assert_close(losses, run_pipeline([together], joined), rtol=1e-13, atol=0)
    for name, gradient in gradients_of([together]).items():
        torch.testing.assert_close(both[name], gradient, rtol=1e-9, atol=1e-15)


def test_dropout_depends_on_every_part_of_the_key_and_on_nothing_else():
    structure = structure_of("gpt2-dropout")
    whole = whole_stage(structure)
    batch = random_batch(1)

    def loss(seed: int, step: int, microbatch: int) -> float:
        key = MicrobatchKey(seed=seed, step=step, microbatch=microbatch)
        return float(whole.forward(batch, None, num_items=batch.num_items, key=key).detach())

    keys = [(0, 1, 0), (1, 1, 0), (0, 2, 0), (0, 1, 1)]
    losses = [loss(*key) for key in keys]
    assert len(set(losses)) == len(keys)
    torch.manual_seed(99)
    assert [loss(*key) for key in reversed(keys)] == losses[::-1]


def test_a_model_without_dropout_leaves_the_generator_alone():
    structure = structure_of("llama")
    assert not structure.draws_at_random
    whole = whole_stage(structure)
    before = torch.get_rng_state()
    run_pipeline([whole], random_batch(1))
    assert torch.equal(torch.get_rng_state(), before)


def test_adopting_keeps_what_is_held_and_takes_the_rest_from_the_state():
    structure = structure_of("llama")
    state = state_of(whole_stage(structure))
    stage = StageModel(structure, dtype=torch.float32, device="cpu")
    stage.adopt(1, 3, state)
    kept = stage.parameters
    stage.adopt(2, 4, state)
    parameters = stage.parameters
    assert tuple(parameters) == structure.layer_parameters(2) + structure.layer_parameters(3)
    for name in structure.layer_parameters(2):
        assert parameters[name] is kept[name]
    for name in structure.layer_parameters(3):
        assert parameters[name].data_ptr() == state[name].data_ptr(), "adopted without a copy"


@pytest.mark.parametrize("name", ["gpt2-dropout", "llama-tied", "gemma3", "opt"])
def test_a_stage_that_wandered_computes_what_a_fresh_one_does(name: str):
    structure = structure_of(name)
    state = state_of(whole_stage(structure))
    batch = random_batch(5)
    last = structure.num_layers
    fresh = stages_of(structure, [2, 4], state, dtype=torch.float32)
    expected = run_pipeline(fresh, batch)

    wandering = stages_of(structure, [2, 4], state, dtype=torch.float32)
    ways = [[(0, last), (1, 3), (0, 2)], [(0, 1), (last - 1, last), (2, 4)], [(1, last), (0, last), (4, last)]]
    for stage, way in zip(wandering, ways, strict=True):
        for first, stop in way:
            stage.adopt(first, stop, state)
    assert torch.equal(run_pipeline(wandering, batch), expected)
    gradients = gradients_of(fresh)
    for parameter, gradient in gradients_of(wandering).items():
        assert torch.equal(gradient, gradients[parameter]), parameter


def test_what_no_layer_needs_any_more_is_let_go():
    structure = structure_of("llama-tied")
    stage = whole_stage(structure)
    embedding = "model.embed_tokens.weight"
    shared = stage.parameters[embedding]
    stage.adopt(3, structure.num_layers, {})
    assert stage.parameters[embedding] is shared, "the head still needs the tied embedding"
    stage.adopt(1, 3, {})
    assert embedding not in stage.parameters
    held = {id(parameter) for parameter in stage.parameters.values()}
    in_modules = {id(p) for p in stage.model.parameters() if p.device.type != "meta"}
    assert in_modules == held


def test_a_parameter_that_nobody_set_poisons_the_loss():
    structure = structure_of("llama")
    stage = StageModel(structure, dtype=torch.float32, device="cpu")
    stage.adopt(0, structure.num_layers, {})
    batch = random_batch(1)
    assert stage.forward(batch, None, num_items=batch.num_items, key=KEY).isnan()


def test_a_stage_returns_hidden_states_and_the_last_one_a_loss():
    structure = structure_of("gpt2")
    batch = random_batch(1, batch_size=3)
    stages = stages_of(structure, [2], state_of(whole_stage(structure)), dtype=torch.float32)
    hidden = stages[0].forward(batch, None, num_items=1, key=KEY)
    assert hidden.shape == (3, structure.sequence_length, structure.hidden_size)
    assert hidden.dtype == stages[0].hidden_dtype
    loss = stages[1].forward(batch, hidden.detach(), num_items=1, key=KEY)
    assert loss.shape == ()


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_chunks_of_one_stage_compute_what_stages_of_their_own_compute(name: str) -> None:
    """In any order, in evaluation too: only one chunk is in place at a time."""
    structure = structure_of(name)
    state = state_of(whole_stage(structure))
    bounds = ((0, 1), (1, 3), (3, structure.num_layers))
    apart = stages_of(structure, [1, 3], state, dtype=torch.float32)
    together = StageModel(structure, dtype=torch.float32, device="cpu")
    together.adopt_chunks([range(*each) for each in bounds], {key: value.clone() for key, value in state.items()})
    assert together.layers == tuple(range(structure.num_layers))
    for is_evaluated in (False, True, False):
        batch, hidden, expected = random_batch(5), None, []
        for stage in apart:
            with stage.evaluating() if is_evaluated else nullcontext():
                expected.append(stage.forward(batch, hidden, num_items=3, key=KEY))
            hidden = expected[-1].detach()
        with together.evaluating() if is_evaluated else nullcontext():
            for chunk in (2, 0, 1):
                received = None if chunk == 0 else expected[chunk - 1].detach()
                found = together.forward(batch, received, num_items=3, key=KEY, chunk=chunk)
                assert torch.equal(found, expected[chunk])
