"""The token of each hidden row and its statistics in one operation, without logits in memory."""

from .api import (
    ID_STEP,
    SHARE,
    IdClasses,
    IdReadout,
    LawReadout,
    TokenReadout,
    choose,
    choose_law,
    choose_with_classes,
    class_readout,
    law_readout,
    most_rows,
    packed_codes,
    token_readout,
)
from .mosaic import is_warm_row
from .reference import of_law

__all__ = [
    "ID_STEP",
    "SHARE",
    "IdClasses",
    "IdReadout",
    "LawReadout",
    "TokenReadout",
    "choose",
    "choose_law",
    "choose_with_classes",
    "class_readout",
    "is_warm_row",
    "law_readout",
    "most_rows",
    "of_law",
    "packed_codes",
    "token_readout",
]
