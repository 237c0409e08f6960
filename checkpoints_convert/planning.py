"""What a conversion would make and need, told from headers alone."""

import dataclasses
import math

import jax

from dllm_jax.models.architecture import arch_of

from .dtypes import STORED, as_dtype
from .report import Report
from .spec import tensor_shapes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The size of a conversion; `str()` of it is meant to be read.

    Attributes:
        num_tensors: Tensors that are read.
        num_leaves: Arrays that they become.
        peak_bytes: Memory that reading takes at most, apart from the idle process.
    """

    num_tensors: int
    num_leaves: int
    read_bytes: int
    result_bytes: int
    peak_bytes: int
    dtype: str

    def __str__(self) -> str:
        def shown(size: int) -> str:
            return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"

        return (
            f"would read {self.num_tensors} tensors ({shown(self.read_bytes)}) and write "
            f"{self.num_leaves} arrays ({shown(self.result_bytes)}, {self.dtype}), "
            f"with at most {shown(self.peak_bytes)} of memory"
        )


def plan(report: Report, dtype: str = "auto") -> Plan:
    """The size of a conversion.

    Args:
        report: On a Hugging Face folder or a converted one, free of problems.
        dtype: Type of the leaves; "auto" is the checkpoint's own.
    """
    cfg, _ = report.require_ok()
    name = report.dtype or "float32" if dtype == "auto" else dtype
    leaves = jax.tree.leaves(arch_of(cfg).param_shapes(cfg, as_dtype(name)))
    result = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    if report.kind == "hf":
        sizes = [
            math.prod(shape) * STORED[report.stored[tensor].dtype].itemsize
            for tensor, shape in tensor_shapes(report.placements).items()
        ]
    else:
        item = as_dtype(str(report.dtype)).itemsize
        sizes = [math.prod(shape) * item for shape in report.shapes.values()]
    return Plan(
        num_tensors=len(sizes),
        num_leaves=len(leaves),
        read_bytes=sum(sizes),
        result_bytes=result,
        peak_bytes=result + 2 * max(sizes),
        dtype=name,
    )
