"""What a layer sees of the mask that all layers share."""

from typing import NamedTuple


class View(NamedTuple):
    """How one layer's attention differs from that of the others.

    Attributes:
        window: Keys are seen only where they are fewer than so many positions away; None: any.
        in_order: Rows see earlier keys only.
        by_block: Rows that are not in token order count the window from the first cell of their
            block, and see all of the block.
        scale: Factor of the scores; None: one over the root of the head size.
    """

    window: int | None = None
    in_order: bool = False
    by_block: bool = False
    scale: float | None = None
