"""The view of a layer: its restriction of the mask that all layers share."""

from typing import NamedTuple


class View(NamedTuple):
    """The settings of attention that differ by layer.

    Attributes:
        window: Keys are seen only at a distance below this number of positions; None: any.
        in_order: Rows see only earlier keys.
        by_block: Rows that are not in token order count the window from the first cell of their
            block, and see all of the block.
        scale: Factor of the scores; None: one over the root of the head size.
    """

    window: int | None = None
    in_order: bool = False
    by_block: bool = False
    scale: float | None = None
