from __future__ import annotations

import torch

from oobleck.training.randomness import derive_seed, drawing_from, seed_device


def test_different_parts_give_different_seeds():
    parts = [("a", "bc"), ("ab", "c"), ("abc",), (1, 2), (12,), ("1", 2), (1, "2"), (-1, 2), ()]
    seeds = {derive_seed(*each) for each in parts}
    assert len(seeds) == len(parts)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_seed_is_the_same_in_every_process_and_version():
    assert derive_seed("x", 3) == 693219219648965610


def test_seeding_the_device_decides_what_is_drawn():
    seed_device(torch.device("cpu"), 5)
    first = torch.rand(4)
    seed_device(torch.device("cpu"), 5)
    assert torch.equal(torch.rand(4), first)


def test_drawing_apart_leaves_no_trace():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    with drawing_from(9):
        torch.rand(7)
    assert torch.equal(torch.rand(3), expected)
