"""From hidden rows to a token and its statistics as one operation: no logits in memory."""

from pallas_kernels.token_readout.api import TRITON_ROWS, TokenReadout, choose, token_readout

__all__ = ["TRITON_ROWS", "TokenReadout", "choose", "token_readout"]
