"""The report on a checkpoint, made without reading its weights, and the size of its conversion."""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from .copying import KeyPath
from .dtypes import STORED, as_dtype
from .lora import AdapterFacts, Factors
from .packed import Packed
from .rules import ConversionError, Placement, Tensor, listed, tensor_shapes
from .schemes import Scheme
from .shards import Stored
from .tensor_names import Table

META = "meta.json"
FORMAT = "dllm-jax"  # the value of its "format"
_SHOWN_SHAPES = 40
_LONGEST = 1000  # characters of a problem or note
# Memory to round a leaf, measured on a CPU: a multiple of the leaf, plus a constant.
_ROUNDED_LEAVES, _ROUNDING_BYTES = 3, 150_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The result of `inspect`; `str()` formats it for people.

    Attributes:
        kind: "hf" for a Hugging Face folder, "converted" for a folder that dllm_jax wrote.
        table: Names of the family's tensors; None unless kind is "hf".
        config: The network's config, as the family's parser returns it.
        defaults: The family's decoding defaults.
        dtype: The weights' type, by most elements; None if there are no weights.
        shapes: Stored tensors (or leaves) and their shapes.
        problems: Every reason why the checkpoint cannot be loaded; empty if it can.
        notes: Warnings about a checkpoint that can be loaded.
        param_shapes: Function from a dtype to the parameter tree's shapes; None if the config was
            refused.
        placements: Where each tensor goes; empty unless kind is "hf".
        stored: The headers' entries; empty unless kind is "hf".
        adapter: The LoRA adapter that is or will be merged into the weights.
        factors: The adapter's update of each tensor; empty unless kind is "hf".
        scheme: Storage scheme of the matrices of a quantised folder, or None.
        packed: The matrices in this scheme, by their 16-bit names.
        loads_small: Called with a leaf of `small` and whether it is in `by_output`; returns whether
            loading holds the leaf in 8 bits.
    """

    source: str
    folder: Path
    kind: str
    family: str | None = None
    table: Table | None = dataclasses.field(default=None, repr=False)
    config: Any = None
    defaults: Any = None
    dtype: str | None = None
    num_tensors: int = 0
    num_params: int = 0
    num_bytes: int = 0
    shapes: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict[str, Any])
    files: tuple[str, ...] = ()
    tokenizer_files: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    param_shapes: Callable[[Any], Any] | None = dataclasses.field(
        default=None, repr=False, compare=False
    )
    placements: tuple[Placement, ...] = ()
    stored: Mapping[str, Stored] = dataclasses.field(default_factory=dict[str, Stored])
    adapter: AdapterFacts | None = None
    factors: Mapping[str, Factors] = dataclasses.field(default_factory=dict[str, Factors])
    scheme: Scheme | None = None
    packed: Mapping[str, Packed] = dataclasses.field(default_factory=dict[str, Packed])
    loads_small: Callable[[KeyPath, bool], bool] | None = dataclasses.field(
        default=None, repr=False, compare=False
    )

    def __post_init__(self):
        for name in ("problems", "notes"):
            object.__setattr__(self, name, tuple(map(_cut, getattr(self, name))))

    @property
    def small(self) -> set[KeyPath]:
        """Leaves of which all tensors are stored in few bits."""
        return self._all_of(self.packed)

    @property
    def by_output(self) -> set[KeyPath]:
        """Leaves of which all tensors are stored in e4m3 with a scale for each output."""
        held = {name for name, packed in self.packed.items() if packed.is_by_output}
        return self._all_of(held - set(self.factors))

    def _all_of(self, names: Container[str]) -> set[KeyPath]:
        """Leaves of which all tensors are in `names`."""
        others = {place.path for place in self.placements if place.name not in names}
        return {place.path for place in self.placements} - others

    def _taken(self) -> str:
        """Text on the form in which loading holds the packed matrices; starts with a comma."""
        small, by_output, found = self.small, self.by_output, dict[str, str]()
        for place in self.placements:
            path, how = place.path, "held in 16 bits when loaded"
            if (
                path in small
                and self.loads_small is not None
                and self.loads_small(path, path in by_output)
            ):
                how = "rounded to fp8 by output when loaded"
                how = "taken as stored" if path in by_output else how
            if place.name in self.packed:
                found[place.name] = how
        counts = Counter(found.values())
        if len(counts) == 1 and len(found) == len(self.packed):
            return f", {next(iter(counts))}"
        return "".join(f", {count} {how}" for how, count in counts.items())

    @property
    def is_ok(self) -> bool:
        """Whether the checkpoint can be loaded."""
        return not self.problems

    def require_ok(self) -> tuple[Any, Any]:
        """The config and the defaults of a checkpoint without problems.

        Raises:
            ConversionError: The checkpoint has problems; lists all of them.
        """
        if self.problems or self.config is None or self.defaults is None:
            raise ConversionError(self.source, self.problems)
        return self.config, self.defaults

    def tensors(self) -> Table:
        """The names of the tensors of a Hugging Face folder.

        Raises:
            ConversionError: As `require_ok`.
        """
        self.require_ok()
        assert self.table is not None
        return self.table

    def shapes_in(self, dtype: Any) -> Any:
        """The shapes of the parameter tree with leaves of `dtype`; some stay float32.

        Raises:
            ConversionError: As `require_ok`.
        """
        self.require_ok()
        assert self.param_shapes is not None
        return self.param_shapes(dtype)

    def __str__(self) -> str:
        kind = "Hugging Face folder" if self.kind == "hf" else "converted folder"
        millions, megabytes = self.num_params / 1e6, self.num_bytes / 1e6
        lines = [
            f"source      {self.source} ({kind})",
            f"family      {self.family or 'unknown'}",
            f"tensors     {self.num_tensors} in {len(self.files)} file(s)",
            f"parameters  {self.num_params:,} ({millions:.1f} M)",
            f"bytes       {self.num_bytes:,} ({megabytes:.1f} MB, {self.dtype or 'no weights'})",
            f"tokenizer   {', '.join(self.tokenizer_files) or 'none'}",
        ]
        if self.scheme is not None:
            kept = f"; in 16 bits: {listed(self.scheme.ignored)}" if self.scheme.ignored else ""
            count = f"{len(self.packed)} matrices of {self.scheme.bits} bits"
            lines.append(f"quantised   {self.scheme.name}, {count}{self._taken()}{kept}")
        if self.adapter is not None:
            law = "rsLoRA, " if self.adapter.is_rslora else ""
            facts = f"{law}r={self.adapter.rank}, alpha={self.adapter.alpha}"
            lines.append(f"adapter     {self.adapter.source} ({facts})")
        for title, value in (("config", self.config), ("defaults", self.defaults)):
            if value is not None:
                fields = dataclasses.asdict(value).items()
                lines.append(f"{title:<12}" + " ".join(f"{k}={v}" for k, v in fields))
        lines += ["shapes"] if self.shapes else []
        for name, shape in list(self.shapes.items())[:_SHOWN_SHAPES]:
            lines.append(f"  {name} {list(shape)}")
        if len(self.shapes) > _SHOWN_SHAPES:
            lines.append(f"  and {len(self.shapes) - _SHOWN_SHAPES} more")
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"problem: {problem}" for problem in self.problems]
        lines.append("no problems" if self.is_ok else f"{len(self.problems)} problem(s)")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The size of a conversion; `str()` formats it for people.

    Attributes:
        num_tensors: Tensors to read.
        num_leaves: Arrays to write.
        peak_bytes: Most memory that reading takes, beyond that of the idle process.
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


def plan(report: Report, dtype: str = "auto", tensors: Sequence[Tensor] | None = None) -> Plan:
    """The size of a conversion.

    Args:
        report: Report without problems on a Hugging Face folder or a converted one.
        dtype: Type of the leaves; "auto" is that of the checkpoint.
        tensors: Name, shape and type of the tensors of an 8-bit folder to write; None: leaves are
            written.
    """
    report.require_ok()
    name = report.dtype or "float32" if dtype == "auto" else dtype
    leaves = [_num_bytes(leaf) for leaf in jax.tree.leaves(report.shapes_in(as_dtype(name)))]
    if report.kind == "hf":
        sizes = {
            tensor: math.prod(shape) * STORED[report.stored[tensor].dtype].itemsize
            for tensor, shape in tensor_shapes(report.placements).items()
        }
        largest = max(sizes.values())
        sizes |= {one: report.packed[one].num_bytes for one in sizes if one in report.packed}
        read = list(sizes.values())
    else:
        stored = report.shapes_in(as_dtype(str(report.dtype)))
        read = [_num_bytes(leaf) for leaf in jax.tree.leaves(stored)]
        largest = max(read)
    written, peak = leaves, sum(leaves) + 2 * largest
    if tensors is not None:  # a leaf at a time
        written = [math.prod(shape) * kind.itemsize for _, shape, kind in tensors]
        name = f"fp8 and {name}"
        peak = _ROUNDED_LEAVES * max(leaves) + _ROUNDING_BYTES
    return Plan(
        num_tensors=len(read),
        num_leaves=len(written),
        read_bytes=sum(read),
        result_bytes=sum(written),
        peak_bytes=peak,
        dtype=name,
    )


def _cut(line: str) -> str:
    """A problem as one line, without the middle of a long value."""
    line = " ".join(line.splitlines())
    return line if len(line) <= _LONGEST else f"{line[:500]} ... {line[505 - _LONGEST :]}"


def _num_bytes(leaf: Any) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize
