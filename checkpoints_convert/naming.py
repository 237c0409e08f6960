"""Which table a family's files follow."""

from . import dflash, hf_dense, hf_moe, llada, llada2
from .table import Table

TABLES = {
    "sdar": hf_dense.TABLE,
    "qwen3": hf_dense.TABLE,
    "dream": hf_dense.TABLE,
    "dream_reasoner": hf_dense.TABLE,
    "stable_diffcoder": hf_dense.TABLE,
    "fast_dllm_v2": hf_dense.TABLE,
    "llama": hf_dense.TABLE,
    "sdar_moe": hf_moe.TABLE,
    "qwen3_moe": hf_moe.TABLE,
    "llada": llada.TABLE,
    "llada2": llada2.TABLE,
    "dflash": dflash.TABLE,
}


def table_of(family: str) -> Table:
    """The table of a family.

    Raises:
        ValueError: For a family without one.
    """
    if family not in TABLES:
        raise ValueError(f"{family=} has no table of weights; known are {', '.join(TABLES)}")
    return TABLES[family]
