"""What passes take by arithmetic, and that loops which time nothing choose widths by it.

Proves that ratios are those measured on an H200 and a CPU, within a third, and so is what is chosen
for drafts of which nothing is known yet and for such as are right; that a step costs more with more
slots, cells and context; and that `dj.generate` and an engine that times nothing hand the figures
in, unless the user has given some.
"""

import itertools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.api import generate
from dllm_jax.api.drafts import with_target
from dllm_jax.loading.model import Model
from dllm_jax.models.architecture import arch_of
from dllm_jax.models.families import parse_config
from dllm_jax.models.published import PUBLISHED
from dllm_jax.runner import buckets, estimate
from dllm_jax.runner.runner import ModelRunner
from dllm_jax.strategies import DFlash
from tests.contract import models
from tests.oracles import draft_widths
from tests.strategies.test_dflash_widths import chosen

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
WIDTHS = (1, 8, 16)


def published(name: str) -> Model:
    """A published model whose weights are but their shapes."""
    parsed = parse_config(PUBLISHED[name], name=name)
    arch = arch_of(parsed.config)
    shapes = arch.param_shapes(parsed.config, jnp.bfloat16)
    return Model(params=shapes, config=parsed.config, arch=arch, defaults=parsed.defaults)


def built_in(kind: str) -> tuple[Model, Model]:
    def shapes(model: Model) -> Model:
        def one(leaf: Any) -> Any:
            return jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(kind))

        return model.replace(params=jax.tree.map(one, model.params))

    return shapes(dj.load("builtin:tiny-qwen3")), shapes(dj.load("builtin:tiny-qwen3-dflash"))


@pytest.fixture(scope="module")
def pairs() -> dict[str, Any]:
    """Costs of rounds of `WIDTHS` by slots, for each pair that was measured."""
    large = published("Qwen/Qwen3-8B"), published("z-lab/Qwen3-8B-DFlash-b16")
    reported: dict[str, tuple[Any, int, str]] = {
        "8b": (large, 1024, "gpu"),
        "small": (built_in("bfloat16"), 352, "gpu"),
        "small on a cpu": (built_in("float32"), 352, "cpu"),
    }

    def costs_of(pair: tuple[Model, Model], context: int, platform: str) -> Any:
        target, draft = pair
        joined = jax.eval_shape(with_target, target, draft)
        strategy = DFlash().bind(draft.config)
        assert strategy.choices == WIDTHS
        return lambda slots: estimate.estimate_choices(
            strategy, target, {"draft": joined}, slots, context, platform
        )

    return {name: costs_of(*one) for name, one in reported.items()}


def measured(name: str, slots: int) -> float:
    """A whole round in steps of `ar`, of the files of results."""
    file = {"8b": "8b_h200", "small": "pair_h200", "small on a cpu": "pair_cpu"}[name]
    rows = json.loads((RESULTS / f"dflash_{file}.json").read_text())["rows"]
    whole, plain = ("round", "ar step") if name == "8b" else ("dflash, width 16", "ar")
    found = {
        row["name"]: row["step_ms"]
        for row in rows
        if row.get("slots") == slots
        and row.get("through", "loop") == "loop"
        and not row.get("temperature")
        and "step_ms" in row
    }
    return found[whole] / found[plain]


@pytest.mark.parametrize(
    ("name", "slots"),
    [
        *(("8b", 1), ("8b", 8), ("8b", 32)),
        *(("small on a cpu", 1), ("small on a cpu", 8), ("small on a cpu", 32)),
    ],
)
def test_rounds_cost_what_was_measured(pairs, name, slots):
    """The built-in pair's on a GPU hold what a call of five rounds costs besides them."""
    plain, _, whole = pairs[name](slots)
    assert whole / plain == pytest.approx(measured(name, slots), rel=1 / 3)


@pytest.mark.parametrize(
    ("name", "slots", "first", "right"),
    [
        *(("8b", 1, 16, 16), ("8b", 8, 16, 16), ("8b", 32, 8, 16)),
        *(("small", slots, 16, 16) for slots in (1, 8, 32, 256)),
        *(("small on a cpu", 1, 16, 16), ("small on a cpu", 8, 8, 16)),
        ("small on a cpu", 32, 8, 16),
    ],
)
def test_widths_that_are_chosen_by_it(pairs, name, slots, first, right):
    """For fresh requests; where all drafts are right; where none is."""
    costs = pairs[name](slots)

    def width(**how: Any) -> int:
        return WIDTHS[chosen([draft_widths.Row(15, **how)] * slots, costs, WIDTHS)]

    assert (width(), width(chance=[0.98] * 15), width(chance=[0.01] * 15)) == (first, right, 1)


def test_more_costs_more(pairs):
    for costs_of in pairs.values():
        costs = [costs_of(slots) for slots in (1, 8, 64, 512)]
        assert all(list(one) == sorted({*one}) for one in costs)
        for less, more in itertools.pairwise(costs):
            assert all(a < b for a, b in zip(less, more, strict=True))
    target = models.causal()
    strategy, aux = DFlash(4, (0, 1)), {"draft": models.drafter(target)}
    some, others = (
        estimate.estimate_choices(strategy, target, aux, 4, context, "gpu")
        for context in (64, 4096)
    )
    assert all(a < b for a, b in zip(some, others, strict=True))


def test_experts_are_read_as_they_are_hit():
    model = models.experts()
    params, cfg = model.params, model.config
    one, many = (estimate.weights(params, cfg, cells) for cells in (1, 10_000))
    leaves = jax.tree_util.tree_leaves_with_path(params)
    whole = sum(leaf.size for path, leaf in leaves if path[-1].key != "embed")
    assert one[0] == pytest.approx(one[1]), "a cell reads what it is multiplied with"
    assert many == (pytest.approx(whole), one[1])


@pytest.mark.slow
def test_a_loop_that_times_nothing_is_told_them():
    target = models.causal()
    draft = models.drafter(target)
    prompts = [[1, 2, 3], [4, 5]]

    def costs_of(strategy: Any) -> Any:
        return generate.start(target, prompts, strategy, max_tokens=8, draft=draft).strategy.costs

    strategy = DFlash(4, (0, 1))
    platform = jax.default_backend()
    wanted = estimate.estimate_choices(strategy, target, {"draft": draft}, 2, 64 + 8, platform)
    np.testing.assert_allclose(costs_of(strategy), wanted, rtol=1e-6)
    assert costs_of(strategy.replace(costs=(1.0, 2.0, 3.0))) == (1.0, 2.0, 3.0)
    assert costs_of(strategy.replace(width=4)) is None


def test_an_engine_goes_by_them_until_it_has_timed_its_own():
    target = models.causal()
    draft = models.drafter(target)
    strategy, config = DFlash(4, (0, 1)), dj.EngineConfig(max_num_seqs=2, max_model_len=64)
    aux = {"draft": draft}
    layout = buckets.make_layout(target, strategy, aux, config)
    costs = ModelRunner(target, strategy, aux, layout, allocate=False).choice_costs
    assert costs == {
        slots: estimate.estimate_choices(strategy, target, aux, slots, 64, jax.default_backend())
        for slots in layout.slot_buckets
    }
