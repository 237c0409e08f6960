"""Token readout: the interface, what it means, and the choice of back end.

Every back end computes the same function: logits of hidden rows over a vocabulary, the likeliest
token of each row, and how sure the law is of it. Nothing here knows about models, windows or
strategies, nor draws: a kernel that did lost to XLA on an H200 (benchmarks/LOG.md, 45bb582).

Letters: R rows, D model width, V ids.
"""

from typing import Literal

from jaxtyping import Array, Bool, Float, Int

from . import mosaic, reference, triton
from .result import TokenReadout

Implementation = Literal["xla", "triton", "mosaic"]

# Rows up to which the kernel was measured, and won: on an H200, microseconds, kernel / XLA, of a
# head of 151,936 ids: SDAR-1.7B 32 rows 156 / 188, 128 rows 190 / 240, 256 rows 284 / 375, 1,024
# rows 1,098 / 1,310; SDAR-8B 32 rows 316 / 364, 128 rows 368 / 417
# (benchmarks/results/readout_h200.json).
TRITON_ROWS = 1024
# Rows between which the kernel for Hopper was measured, and won: microseconds, Triton / Mosaic, of
# SDAR-1.7B 128 rows 181 / 165, 256 rows 298 / 246, 1,024 rows 1,106 / 904, 4,096 rows 4,357 (in
# quarters) / 3,558; of SDAR-8B 128 rows 334 / 309, 1,024 rows 2,064 / 1,775
# (benchmarks/results/readout_mosaic_h200.json).
FEWEST_MOSAIC_ROWS, MOSAIC_ROWS = 128, 4096


def token_readout(
    hidden: Float[Array, "R D"],
    head: Float[Array, "V D"],
    forbidden: Bool[Array, " V"],
    *,
    scale: float = 1.0,
    cap: float | None = None,
    penalty: tuple[Int[Array, " R"], Float[Array, " R"]] | None = None,
    num_top: int = 0,
    implementation: Implementation | None = None,
) -> TokenReadout:
    """Name each row's likeliest id, ties to the lowest, and say how sure `softmax(logits)` is.

    Logits are `hidden @ head.T`, accumulated in float32, times `scale`, bent by `cap` and then
    restricted.

    Args:
        forbidden: Ids never named.
        cap: Logits become `cap * tanh(logits / cap)`; None leaves them.
        penalty: An id a row and what its logit loses.
        num_top: Likeliest ids to name.
        implementation: "xla" (any device, the truth; writes the logits), "triton" (NVIDIA GPU,
            16-bit), "mosaic" (the same for Hopper, no `num_top`), or None: the one measured to be
            fastest that takes the arguments.

    Returns:
        A row with logits that are no numbers, infinite, or all forbidden has a confidence that is
        not finite.

    Raises:
        NotImplementedError: The named back end cannot do this; a named one never falls back.
    """
    _check(hidden, head, forbidden)
    if implementation is None:
        implementation = choose(hidden, head, num_top)
    if implementation not in ("xla", "triton", "mosaic"):
        raise ValueError(f'{implementation=} is not one of "xla", "triton", "mosaic"')
    back_end = {"triton": triton, "mosaic": mosaic}.get(implementation, reference)
    if back_end is not reference:
        reason = back_end.unsupported(hidden, head, num_top)
        if reason:
            raise NotImplementedError(f'implementation="{implementation}": {reason}; use "xla"')
    return back_end.read(
        hidden,
        head,
        forbidden,
        scale=scale,
        cap=cap,
        penalty=penalty,
        num_top=num_top,
    )


def choose(hidden: Array, head: Array, num_top: int) -> Implementation:
    """What `implementation=None` takes for such arguments on this machine."""
    in_range = FEWEST_MOSAIC_ROWS <= len(hidden) <= MOSAIC_ROWS
    if in_range and not mosaic.unsupported(hidden, head, num_top):
        return "mosaic"
    if len(hidden) > TRITON_ROWS or triton.unsupported(hidden, head, num_top):
        return "xla"
    return "triton"


def _check(hidden: Array, head: Array, forbidden: Array) -> None:
    """Shapes that disagree would broadcast or slice into a wrong answer."""
    if hidden.shape[1] != head.shape[1] or forbidden.shape != head.shape[:1]:
        raise ValueError(
            f"{hidden.shape=}, {head.shape=} and {forbidden.shape=} must be [R D], [V D] and [V]"
        )
