"""Proves which back end a call gets: the first supported and fast one, or the one that it names.

A named back end never falls back: it is refused with its reason, and an unknown name with the
known ones.
"""

import pytest

from dllm_jax.kernels import dispatch
from dllm_jax.kernels.dispatch import BackEnd


def table(**changed):
    rows = {"fast": BackEnd(lambda x: x + 1), "slow": BackEnd(lambda x: x + 2)}
    return rows | changed | {"reference": BackEnd(lambda x: x + 3)}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, "fast"),
        ({"fast": BackEnd(abs, "needs a GPU")}, "slow"),
        ({"fast": BackEnd(abs, is_fast=False)}, "slow"),
        ({"fast": BackEnd(abs, "needs a GPU"), "slow": BackEnd(abs, is_fast=False)}, "reference"),
    ],
)
def test_without_a_name_the_first_supported_and_fast_back_end_runs(changed, expected):
    assert dispatch.choose(None, table(**changed)) == expected


def test_a_named_back_end_runs_though_it_is_slow():
    slow = BackEnd(lambda x: x + 5, is_fast=False)
    assert dispatch.run("slow", table(slow=slow), 1) == 6
    assert dispatch.run(None, table(slow=slow), 1) == 2


def test_a_named_back_end_that_cannot_is_refused_with_its_reason():
    with pytest.raises(NotImplementedError) as refused:
        dispatch.run("fast", table(fast=BackEnd(abs, "needs a GPU")), 1)
    assert str(refused.value) == 'implementation="fast": needs a GPU; use "reference"'


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        dispatch.choose("cudnn", table())
    reported = 'implementation=\'cudnn\' is not one of "reference", "slow", "fast"'
    assert str(refused.value) == reported
