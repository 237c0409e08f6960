"""What is known of a checkpoint without its weights: the value `inspect` and `describe` return."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dllm_jax.models.dense import DenseConfig
from dllm_jax.models.families import FamilyDefaults

from .lora import AdapterFacts, Factors
from .shards import Stored
from .spec import ConversionError, Placement

META = "meta.json"
FORMAT = "dllm-jax"  # what the file says it belongs to
_SHOWN_SHAPES = 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What `inspect` found. `str()` of it is meant to be read.

    Attributes:
        kind: "hf" for a Hugging Face folder, "converted" for one of ours.
        dtype: Type of most of the weights' bytes, None if there are none.
        shapes: Stored tensors (or leaves) and their shapes.
        problems: Every reason why the checkpoint cannot be loaded; empty if it can.
        notes: What a user should know although it loads.
        placements: Where each tensor goes; empty unless kind is "hf".
        stored: The headers' entries; empty unless kind is "hf".
        adapter: The LoRA adapter that is merged into the weights, or will be.
        factors: What it adds, by tensor; empty unless kind is "hf".
    """

    source: str
    folder: Path
    kind: str
    family: str | None = None
    config: DenseConfig | None = None
    defaults: FamilyDefaults | None = None
    dtype: str | None = None
    num_tensors: int = 0
    num_params: int = 0
    num_bytes: int = 0
    shapes: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict[str, Any])
    files: tuple[str, ...] = ()
    tokenizer_files: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    placements: tuple[Placement, ...] = ()
    stored: Mapping[str, Stored] = dataclasses.field(default_factory=dict[str, Stored])
    adapter: AdapterFacts | None = None
    factors: Mapping[str, Factors] = dataclasses.field(default_factory=dict[str, Factors])

    @property
    def is_ok(self) -> bool:
        """Whether nothing speaks against loading."""
        return not self.problems

    def require_ok(self) -> tuple[DenseConfig, FamilyDefaults]:
        """The config and the defaults, which a checkpoint without problems has.

        Raises:
            ConversionError: With all problems, if there are any.
        """
        if self.problems or self.config is None or self.defaults is None:
            raise ConversionError(self.source, self.problems)
        return self.config, self.defaults

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
