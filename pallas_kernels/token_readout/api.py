"""Token readout: the interface and its back ends.

Every back end computes the same function: logits of hidden rows over a vocabulary, the likeliest
token of each row, and statistics of the row's distribution. Sampled rows use XLA: a kernel that
also drew tokens was slower on an H200 (benchmarks/LOG.md). `law_readout` also writes the law, for
callers that draw from it and multiply it with the embedding.

Letters: R rows, D model width, V ids.
"""

from typing import Literal

from jaxtyping import Array, Bool, Float, Int

from .. import dispatch
from ..dispatch import BackEnd
from ..layer import quantize_rows
from . import mosaic, reference
from .head import Fp8Head
from .result import ID_STEP as ID_STEP
from .result import SHARE as SHARE
from .result import IdClasses as IdClasses
from .result import IdReadout as IdReadout
from .result import LawReadout, TokenReadout
from .result import packed_codes as packed_codes

Implementation = Literal["xla", "mosaic"]

# The most rows at which the kernel for Hopper was measured. us on an H200, XLA / Mosaic: SDAR-1.7B
# 128 rows 240 / 165, 256 rows 375 / 246, 1,024 rows 1,310 / 904; SDAR-8B 128 rows 417 / 309
# (benchmarks/results/readout_h200.json, readout_mosaic_h200.json).
MOSAIC_ROWS, MOSAIC_ROWS_8_BIT = 4096, 1024


def token_readout(
    hidden: Float[Array, "R D"],
    head: Float[Array, "V D"] | Fp8Head,
    forbidden: Bool[Array, " V"],
    *,
    scale: float = 1.0,
    cap: float | None = None,
    penalty: tuple[Int[Array, " R"], Float[Array, " R"]] | None = None,
    num_top: int = 0,
    implementation: Implementation | None = None,
) -> TokenReadout:
    """The likeliest id of each row (the lowest of equals), and statistics of `softmax(logits)`.

    Logits are `hidden @ head.T`, accumulated in float32, times `scale`, capped by `cap`, and then
    restricted to the ids that are not forbidden.

    Args:
        head: Rows of the head. An 8-bit head is multiplied unscaled; its scales apply to the sums.
        forbidden: Ids that are never chosen.
        cap: Logits become `cap * tanh(logits / cap)`; None leaves them.
        penalty: One id per row, and the number to subtract from its logit.
        num_top: Number of the likeliest ids to return.
        implementation: "xla" (any device, the reference; writes the logits), "mosaic" (Hopper,
            16-bit), or None for the fastest that supports the arguments.

    Returns:
        The confidence of a row is not finite if a logit is NaN or infinite, or if all ids are
        forbidden.

    Raises:
        NotImplementedError: The named back end cannot do this; a named one never falls back.
    """
    _check(hidden, head, forbidden)
    how = {"scale": scale, "cap": cap, "penalty": penalty, "num_top": num_top}
    back_ends = _back_ends(hidden, head, num_top)
    return dispatch.run(implementation, back_ends, hidden, head, forbidden, **how)


def class_readout(
    hidden: Float[Array, "R D"],
    head: Float[Array, "V D"] | Fp8Head,
    forbidden: Bool[Array, " V"],
    classes: IdClasses,
    *,
    scale: float = 1.0,
    cap: float | None = None,
    penalty: tuple[Int[Array, " R"], Float[Array, " R"]] | None = None,
    num_top: int = 0,
    implementation: Implementation | None = None,
) -> tuple[TokenReadout, IdReadout]:
    """`token_readout` that also reads classes of ids, given slot by slot, in the same pass.

    The token readout of a row does not depend on any classes.

    Raises:
        NotImplementedError: The named back end cannot do this; a named one never falls back.
    """
    _check(hidden, head, forbidden)
    if len(hidden) % len(classes.codes):
        raise ValueError(f"{hidden.shape=} must be rows of {len(classes.codes)} slots, each alike")
    how = {"scale": scale, "cap": cap, "penalty": penalty, "num_top": num_top}
    back_ends = _with_classes(hidden, head, num_top, len(hidden) // len(classes.codes))
    return dispatch.run(implementation, back_ends, hidden, head, forbidden, classes, **how)


def law_readout(
    hidden: Float[Array, "R D"],
    head: Float[Array, "V D"] | Fp8Head,
    forbidden: Bool[Array, " V"],
    temperature: Float[Array, " R"],
    *,
    scale: float = 1.0,
    cap: float | None = None,
    is_warm: bool = False,
    implementation: Literal["xla", "mosaic"] | None = None,
) -> LawReadout:
    """The law `softmax(logits / temperature)` of each row, with logits as in `token_readout`.

    Args:
        head: Rows of the head; with an 8-bit head, hidden rows are rounded to 8 bits as well.
        temperature: Positive temperature of each row.
        is_warm: Promises that all rows are `mosaic.is_warm_row`. It saves a pass over all weights
            without changing them.
        implementation: "xla" (any device; also writes the logits), "mosaic" (Hopper, bfloat16
            rows, a bfloat16 or 8-bit head, ids in a multiple of `SHARE`), or None for the fastest
            that supports the arguments.

    Raises:
        NotImplementedError: The named back end cannot do this; a named one never falls back.
    """
    _check(hidden, head, forbidden)
    if temperature.shape != hidden.shape[:1]:
        raise ValueError(f"{temperature.shape=} and {hidden.shape=} must be [R] and [R D]")
    rows, dtype = hidden, hidden.dtype
    if isinstance(head, Fp8Head):
        rows = quantize_rows(hidden)
    else:
        dtype = head.dtype
    arguments, how = (rows, head, forbidden, temperature), {"scale": scale, "cap": cap}
    how |= {"dtype": dtype, "is_warm": is_warm}
    return dispatch.run(implementation, _law_back_ends(hidden, head), *arguments, **how)


def choose_law(hidden: Array, head: Array | Fp8Head) -> Literal["mosaic", "xla"]:
    """The name of the back end that `law_readout` runs for such arguments."""
    if dispatch.is_plain(None):
        return "xla"
    return dispatch.choose(None, _law_back_ends(hidden, head))


def _law_back_ends(hidden: Array, head: Array | Fp8Head) -> dict[Literal["mosaic", "xla"], BackEnd]:
    # ms on an H200, DiffusionGemma, including draws and expectation, XLA / Mosaic: 256 rows 1.54 /
    # 1.18, 1,024 rows 5.71 / 4.30 (canvas_parts_h200.json and law_h200.json).
    return {
        "mosaic": BackEnd(mosaic.read_law, mosaic.unsupported_law(hidden, head)),
        "xla": BackEnd(reference.read_law),
    }


def choose(hidden: Array, head: Array | Fp8Head, num_top: int) -> Implementation:
    """The name of the back end that `implementation=None` runs for such arguments."""
    if dispatch.is_plain(None):
        return "xla"
    return dispatch.choose(None, _back_ends(hidden, head, num_top))


def choose_with_classes(
    hidden: Array, head: Array | Fp8Head, num_top: int, of_slot: int
) -> Implementation:
    """The back end that `class_readout` runs, for slots of `of_slot` rows."""
    if dispatch.is_plain(None):
        return "xla"
    return dispatch.choose(None, _with_classes(hidden, head, num_top, of_slot))


def _with_classes(
    hidden: Array, head: Array | Fp8Head, num_top: int, of_slot: int
) -> dict[Implementation, BackEnd]:
    rows = len(hidden)
    on_mosaic = mosaic.unsupported_classes(rows, of_slot, len(head))
    on_mosaic = on_mosaic or mosaic.unsupported(hidden, head, num_top)
    return {
        "mosaic": BackEnd(mosaic.read_classes, on_mosaic, rows <= most_rows(head)),
        "xla": BackEnd(reference.read_classes),
    }


def _back_ends(hidden: Array, head: Array | Fp8Head, num_top: int) -> dict[Implementation, BackEnd]:
    rows = len(hidden)
    on_mosaic = mosaic.unsupported(hidden, head, num_top)
    return {
        "mosaic": BackEnd(mosaic.read, on_mosaic, rows <= most_rows(head)),
        "xla": BackEnd(reference.read),
    }


def most_rows(head: Array | Fp8Head) -> int:
    """The most rows of one call of a kernel."""
    return MOSAIC_ROWS_8_BIT if isinstance(head, Fp8Head) else MOSAIC_ROWS


def _check(hidden: Array, head: Array | Fp8Head, forbidden: Array) -> None:
    """Refuse shapes that would broadcast or slice into a wrong result."""
    if hidden.shape[1] != head.shape[1] or forbidden.shape != head.shape[:1]:
        raise ValueError(
            f"{hidden.shape=}, {head.shape=} and {forbidden.shape=} must be [R D], [V D] and [V]"
        )
