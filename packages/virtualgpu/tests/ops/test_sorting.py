"""Sorts, selections and scans allocate the same sizes as on a real GPU."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from virtualgpu.ops import cub
from virtualgpu.ops.sorting import shares_slices, sort_plan, topk_plan

from .recorded import check

NAMES = (
    "shared/sort", "shared/sort_flat", "shared/topk", "shared/cumsum_flat", "shared/randperm",
    "shared/multinomial", "more/sort_desc", "more/sort_0", "more/topk_flat", "more/topk_big",
    "more/cumsum0", "more/median_dim", "more/kthvalue", "more/cummax", "more/argsort",
    "more/multinomial_rep", "more/multinomial_1", "more/new_randperm_small",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_allocations_are_those_of_an_h200(name, machine):
    check(name)


@given(st.integers(1, 2000), st.integers(1, 100_000), st.sampled_from([1, 2, 4, 8]), st.booleans())
def test_a_sort_gives_back_what_it_takes(rows, n, itemsize, contiguous):
    assert sum(sort_plan(rows, n, itemsize, contiguous, False)) == 0


@given(st.integers(1, 5000), st.integers(1, 1 << 20), st.sampled_from([2, 4, 8]))
def test_topk_gives_back_what_it_takes(rows, n, itemsize):
    plan = topk_plan(rows, n, itemsize, 132)
    assert sum(plan) == 0 and bool(plan) == shares_slices(rows, n)


# Allocations of an H200 (PyTorch 2.11, CUDA 13.0) on 2026-11-21.
@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (cub.radix_sort(1_000_000, 4, 8, floating=True), 12_200_191),
        (cub.radix_sort(1_000_000, 8, 8), 16_240_127),
        (cub.radix_sort(1_000_000, 2, 8), 10_187_007),
        (cub.radix_sort(1_000_000, 1, 8), 299_519),
        (cub.radix_sort(1_000_000, 8, 0), 8_195_071),
        (cub.scan(10_000_000, 4), 42_495),
        (cub.scan(10_000_000, 8), 179_711),
        (cub.scan(300_000, 2), 1_535),
        (cub.select(10_000_000, 8), 19_711),
        (cub.run_lengths(10_000_000), 209_151),
        (cub.count(5000), 21_503),
    ],
)
def test_temporary_storage(size, expected):
    assert size == expected


def test_draws_without_replacement_are_distinct(machine):
    drawn = torch.rand(5, 50, device="cuda").multinomial(50).sort(1)[0].cpu()
    assert torch.equal(drawn, torch.arange(50).expand(5, 50))


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (lambda x: x.histc(2), "\"histc\" not implemented for 'ComplexFloat'"),
        (lambda x: torch.isin(x, x), "Unsupported input type encountered for isin(): ComplexFloat"),
    ],
)
def test_types_that_cuda_does_not_order(machine, work, words):
    with pytest.raises((RuntimeError, TypeError)) as raised:
        work(torch.ones(3, dtype=torch.complex64, device="cuda"))
    assert str(raised.value) == words
