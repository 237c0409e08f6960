"""The write of new keys and values into pages: the interface and the choice of back end.

Nothing here knows who asks for a page, or what a strategy is.

Letters: M rows, G KV heads, H head size, P pages in the pool, Z page size.
"""

from typing import Literal

from jaxtyping import Array, Float, Int

from . import reference, triton

Implementation = Literal["xla", "triton"]


def write_rows(
    pages: tuple[Float[Array, "P G Z H"], ...],
    rows: tuple[Float[Array, "*M G H"], ...],
    page: Int[Array, " M"],
    offset: Int[Array, " M"],
    *,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "P G Z H"], ...]:
    """Every array of pages with the rows that belong to it, in place where it is donated.

    Args:
        pages, rows: Of every layer its keys' and its values'.
        page, offset: Where each row goes, the same in all arrays; no two rows to one place, and
            none to a negative page, which back ends take differently. A row on a page from P on is
            dropped.
        implementation: "xla" (any device), "triton" (NVIDIA GPU), or None: the faster one.

    Raises:
        NotImplementedError: The named back end cannot do this; a named one never falls back.
    """
    if implementation not in (None, "xla", "triton"):
        raise ValueError(f'{implementation=} is not one of "xla", "triton"')
    reason = triton.unsupported(pages, page)
    if implementation == "triton" and reason:
        raise NotImplementedError(f'implementation="triton": {reason}; use "xla"')
    # Faster at every size measured, 32 to 1024 rows, all of 16 bits
    # (benchmarks/results/layer_h200.json).
    fast = implementation is None and pages[0].dtype.itemsize == 2 and not reason
    if implementation == "triton" or fast:
        return triton.write_rows(pages, rows, page, offset)
    return reference.write_rows(pages, rows, page, offset)
