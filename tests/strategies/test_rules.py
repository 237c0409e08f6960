"""The rules that strategies share, each against plain loops.

Proves, function by function, that `sampling`, `blocks`, `block_rewrite`, `token_merge` and `random`
do what the loops of oracles/rule_checks.py do on random windows.
"""

import numpy as np
import pytest

from dllm_jax import strategies
from tests.oracles.rule_checks import CHECKS

SLOW = ("blocks", "merge", "random")  # what they check shows in every decoded text as well


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in CHECKS]
)
def test_the_rules_do_what_the_loops_do(name: str) -> None:
    for seed in range(3):
        CHECKS[name](strategies, np.random.default_rng(seed))
