"""From hidden rows to a token and its statistics as one operation: no logits in memory."""

from .api import MOSAIC_ROWS, TRITON_ROWS, TokenReadout, choose, token_readout

__all__ = ["MOSAIC_ROWS", "TRITON_ROWS", "TokenReadout", "choose", "token_readout"]
