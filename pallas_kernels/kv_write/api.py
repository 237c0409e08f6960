"""The write of new keys and values into pages: the interface and its back ends.

Letters: M rows, G KV heads, H head size, P pages in the pool, Z page size.
"""

from typing import Literal

from jaxtyping import Array, Float, Int

from .. import dispatch
from ..dispatch import BackEnd
from . import mosaic, reference, triton

Implementation = Literal["xla", "triton", "mosaic"]


def write_rows(
    pages: tuple[Float[Array, "P G Z H"], ...],
    rows: tuple[Float[Array, "*M G H"], ...],
    page: Int[Array, " M"],
    offset: Int[Array, " M"],
    *,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "P G Z H"], ...]:
    """Write each row to its page; a donated array of pages is updated in place.

    Args:
        pages, rows: The keys and the values of every layer. Layers may differ in shape: those of
            one shape are written together.
        page, offset: Where each row goes, the same in all arrays. Places are distinct and pages
            not negative: back ends differ there. A row whose page is P or more is dropped.
        implementation: "xla" (any device), "triton" (NVIDIA GPU), "mosaic" (Hopper, jax 0.11), or
            None for the fastest.

    Returns:
        The arrays of pages.

    Raises:
        NotImplementedError: The named back end cannot do this; a named one never falls back.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, mine in enumerate(pages):
        groups.setdefault(mine.shape, []).append(i)
    written: dict[int, Array] = {}
    for group in groups.values():
        mine, new = (tuple(leaves[i] for i in group) for leaves in (pages, rows))
        out = _write_alike(mine, new, page, offset, implementation)
        written.update(zip(group, out, strict=True))
    return tuple(written[i] for i in range(len(pages)))


def _write_alike(
    pages: tuple[Array, ...],
    rows: tuple[Array, ...],
    page: Array,
    offset: Array,
    implementation: Implementation | None,
) -> tuple[Array, ...]:
    """The same for pages of one shape."""
    # Triton was faster at every size measured: 32 to 1024 rows of 16 bits
    # (benchmarks/results/layer_h200.json); 8 bits take the same launch. Mosaic's form is right on
    # an H200, 35 us where Triton's takes 44 (LLaDA2-mini, 32 rows; kv_write_h200.json), but it ran
    # in no whole program, each of which takes 0.4 to 1.2 s longer to lower.
    is_short = pages[0].dtype.itemsize <= 2
    back_ends = {
        "mosaic": BackEnd(mosaic.write_rows, mosaic.unsupported(pages, page), False),
        "triton": BackEnd(triton.write_rows, triton.unsupported(pages, page), is_short),
        "xla": BackEnd(reference.write_rows),
    }
    return dispatch.run(implementation, back_ends, pages, rows, page, offset)
