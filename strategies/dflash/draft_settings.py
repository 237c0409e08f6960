"""Checks of the sizes of a strategy that drafts.

The window holds the cells that the drafter runs and one more, so a width is in [1, S - 1]. The
sizes of the draft model are unknown before `bind`, so the checks run there and again in the step.
"""

from typing import Any

from ..core.checks import check_one_of, is_whole, short_repr


def check_width(strategy: Any, num_blocks: int) -> None:
    """Check the width, the sizes and the rule of acceptance.

    Raises:
        ValueError: One is out of range, or the drafter's size does not allow it.
    """
    for name in ("draft_block_size", "width"):
        value = getattr(strategy, name)
        if value is not None and not is_whole(value):
            raise ValueError(f"{name}={short_repr(value)} must be a whole number; give one")
    size = strategy.block_size - 1
    if num_blocks != 1:
        raise ValueError(f"buffer_size={num_blocks}: DFlash drafts one block at a time; use 1")
    if size < 2:
        raise ValueError(f"draft_block_size={size} leaves no cell to draft; use 2 or more")
    check_one_of("acceptance", strategy.acceptance, ("match", "rejection"))
    if strategy.width is not None and not 1 <= strategy.width <= size:
        raise ValueError(
            f"width={strategy.width} must be in [1, {size}], the anchor and drafts of a block; "
            "choose it there"
        )


def bound(strategy: Any, draft_config: Any) -> Any:
    """The strategy with what the draft model was trained for (`Strategy.bind`).

    Args:
        draft_config: Has `block_size` and `target_layer_ids`.

    Raises:
        ValueError: The strategy names other layers, or a size or width is out of range.
    """
    layers, given = tuple(draft_config.target_layer_ids), strategy.target_layer_ids
    if given is not None and tuple(given) != layers:
        raise ValueError(
            f"target_layer_ids={given} are not {layers}, which the draft was "
            "trained with; leave target_layer_ids out"
        )
    size = strategy.draft_block_size
    strategy = strategy.replace(
        draft_block_size=draft_config.block_size if size is None else size,
        target_layer_ids=layers,
    )
    check_width(strategy, strategy.buffer_size)
    return strategy
