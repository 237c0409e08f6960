"""Checks of the widths and costs of a strategy that drafts.

The window holds the cells that the drafter runs and one more, so a width is in [1, S - 1]. The
sizes of the draft model are unknown before `bind`, so the checks run there and again in the step.
"""

import math
from numbers import Real
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..core.checks import check_one_of, is_whole, short_repr


def check_widths(strategy: Any, num_blocks: int) -> tuple[int, ...]:
    """The widths that a step may have.

    Raises:
        ValueError: The drafter's size does not allow them.
    """
    for name in ("draft_block_size", "width"):
        value = getattr(strategy, name)
        if value is not None and not is_whole(value):
            raise ValueError(f"{name}={short_repr(value)} must be a whole number; give one")
    if strategy.widths is not None:
        if strategy.width is not None:
            raise ValueError(
                f"width={strategy.width} and widths={strategy.widths} say it twice; give one of "
                "them"
            )
        if not isinstance(strategy.widths, tuple) or not all(map(is_whole, strategy.widths)):
            raise ValueError(
                f"widths={short_repr(strategy.widths)} must be several whole numbers; give a tuple"
            )
    size, widths = strategy.block_size - 1, strategy.choices
    if num_blocks != 1:
        raise ValueError(f"buffer_size={num_blocks}: DFlash drafts one block at a time; use 1")
    if size < 2:
        raise ValueError(f"draft_block_size={size} leaves no cell to draft; use 2 or more")
    check_one_of("acceptance", strategy.acceptance, ("match", "rejection"))
    if strategy.acceptance == "rejection" and len(widths) > 1:
        raise ValueError(
            f"widths={widths} by rejection: what is drawn would depend on the other requests; "
            "use one width"
        )
    inside = f"[1, {size}], the anchor and drafts of a block"
    if strategy.width is not None and not 1 <= strategy.width <= size:
        raise ValueError(f"width={strategy.width} must be in {inside}; choose it there")
    ascend = len(widths) > 0 and list(widths) == sorted({*widths})
    if not ascend or not all(1 <= width <= size for width in widths):
        raise ValueError(f"widths={widths} must ascend within {inside}; choose one or more")
    return widths


def bound(strategy: Any, draft_config: Any) -> Any:
    """The strategy with what the draft model was trained for (`Strategy.bind`).

    Args:
        draft_config: Has `block_size` and `target_layer_ids`.

    Raises:
        ValueError: The strategy names other layers, or a size, width or cost is out of range.
    """
    layers, given = tuple(draft_config.target_layer_ids), strategy.target_layer_ids
    if given is not None and tuple(given) != layers:
        raise ValueError(
            f"target_layer_ids={given} are not {layers}, which the draft was "
            "trained with; leave target_layer_ids out"
        )
    size, widths = strategy.draft_block_size, strategy.widths
    strategy = strategy.replace(
        draft_block_size=draft_config.block_size if size is None else size,
        target_layer_ids=layers,
        widths=tuple(widths) if isinstance(widths, list) else widths,
    )
    widths = check_widths(strategy, strategy.buffer_size)
    return strategy.replace(costs=check_costs(strategy.costs, widths))


def costs_of(given: Any, widths: tuple[int, ...]) -> Float[Array, " X"]:
    """Costs of a round of each width as an array; None: each costs the same.

    Raises:
        ValueError: They are not one for each width.
    """
    costs = jnp.asarray((1.0,) * len(widths) if given is None else given, jnp.float32)
    if costs.shape != (len(widths),):
        raise ValueError(
            f"costs have shape {costs.shape}; give one for each of the widths {widths}"
        )
    return costs


def check_costs(given: Any, widths: tuple[int, ...]) -> Any:
    """Costs of a round of each width, as a tuple of floats; JAX arrays and None as they are.

    Raises:
        ValueError: They are not positive numbers, one for each width, or all are infinite.
    """
    costs = given.tolist() if isinstance(given, np.ndarray) else given
    several = costs if isinstance(costs, tuple | list) else (costs,)
    if costs is None or any(isinstance(cost, Array) for cost in several):
        return given
    are_costs = len(several) == len(widths) and all(
        isinstance(cost, Real) and not isinstance(cost, bool) and float(cost) > 0
        for cost in several
    )
    if several is not costs or not are_costs or math.isinf(min(costs)):
        raise ValueError(
            f"costs={short_repr(costs)} must be numbers above 0, one for each of the widths "
            f"{widths}, not "
            f"all infinite; give {len(widths)}"
        )
    return tuple(map(float, costs))
