"""Programs that another process compiles (docs/adr/0030).

Data flow: a call -> its program as exported text -> a folder, or a helper that compiles the text
and writes the folder -> the compiled program, loaded here.
"""

import contextlib
import dataclasses
import hashlib
import os
import zlib
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import serialize_executable
from jax.sharding import SingleDeviceSharding

from dllm_jax.kernels.helpers import Helper
from dllm_jax.runner import programs
from dllm_jax.runner.programs import Call

MOST_BYTES = 2**30  # of the folder, some hundred programs; the least recently used go first
_DIGEST = 32  # bytes, in front of a stored program
_TARGETS = ("mosaic_gpu_v2", "__gpu$xla.gpu.triton")  # what kernels call; `export` asks to be told
_TREES = ("in_tree", "out_tree", "_get_vjp")  # what of an export is no data


class Asked(NamedTuple):
    """What a helper compiles a program from.

    Attributes:
        fields: Of `jax.export.Exported`.
        donated: Which arguments, flat.
        options: Of the compiler.
    """

    fields: dict[str, Any]
    donated: range
    options: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Exported:
    """A program that is not compiled, with the trees of its arguments and results."""

    asked: Asked
    in_tree: Any
    out_tree: Any

    def compile(self, helper: Helper) -> jax.stages.Compiled | None:
        """The program, from the folder or the helper; None where neither has it."""
        place = _place(self.asked)
        kept = None if place is None else _read(place)
        if kept is None:
            kept = helper.ask(compiled, self.asked, place)
        if kept is None:
            return None
        with contextlib.suppress(Exception):  # of another device, say
            return serialize_executable.deserialize_and_load(
                kept, self.in_tree, self.out_tree, execution_devices=jax.devices()[:1]
            )
        return None


def export(call: Call, state: Any) -> Exported | None:
    """A call's program, traced and lowered; None where it is not one that can be exported."""
    args, static = call.given(state)
    allowed = [jax.export.DisabledSafetyCheck.custom_call(name) for name in _TARGETS]
    platform = "cuda" if jax.default_backend() == "gpu" else jax.default_backend()
    exporting = jax.export.export(call.program, platforms=(platform,), disabled_checks=allowed)
    try:
        made = exporting(*args, **static)
    except ValueError:  # it calls what may change between versions, and may not be kept
        return None
    fields = {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}
    first = len(args[0])
    options = programs.OPTIONS.get(call.program, {}) | untuned()
    asked = Asked(
        {name: value for name, value in fields.items() if name not in _TREES},
        range(first, first + len(args[1])),
        options,
    )
    return Exported(asked, made.in_tree, made.out_tree)


def untuned() -> dict[str, Any]:
    """Options of XLA, which would try products out between programs of a device that is at work."""
    return {"xla_gpu_autotune_level": 0} if jax.default_backend() == "gpu" else {}


def compiled(asked: Asked, place: Path | None) -> bytes:
    """The compiled program, which is also written to its place."""
    inputs, outputs = asked.fields["in_avals"], asked.fields["out_avals"]
    made = jax.export.Exported(
        **asked.fields,
        in_tree=jax.tree.structure(((0,) * len(inputs), {})),
        out_tree=jax.tree.structure((0,) * len(outputs)),
        _get_vjp=None,
    )
    home = SingleDeviceSharding(jax.devices()[0])
    given = [jax.ShapeDtypeStruct(of.shape, of.dtype, sharding=home) for of in inputs]
    program = jax.jit(made.call, donate_argnums=tuple(asked.donated)).lower(*given)
    kept, _, _ = serialize_executable.serialize(program.compile(asked.options))
    if place is not None:
        _write(place, kept)
    return kept


def has_none() -> bool:
    """Whether no program was kept yet."""
    folder = _folder()
    return folder is None or not folder.is_dir()


def _folder() -> Path | None:
    # By name: the stubs of jax 0.10 do not list it.
    folder = getattr(jax.config, "jax_compilation_cache_dir", None)
    return Path(folder) / "programs" if folder and Path(folder).is_dir() else None


def _place(asked: Asked) -> Path | None:
    """The file of a program; its name tells apart all that it depends on."""
    if (folder := _folder()) is None:
        return None
    versions = jax.__version__, version("jaxlib"), jax.devices()[0].client.platform_version
    facts = {name: str(value) for name, value in asked.fields.items() if "serialized" not in name}
    facts = versions, os.environ.get("XLA_FLAGS"), facts, *asked[1:]
    text = asked.fields["mlir_module_serialized"]
    return folder / hashlib.sha256(repr(facts).encode() + text).hexdigest()


def _read(place: Path) -> bytes | None:
    """A program, unless there is none, or it was damaged."""
    try:
        kept = place.read_bytes()
        os.utime(place)
    except OSError:
        return None
    packed = kept[_DIGEST:]
    if hashlib.sha256(packed).digest() != kept[:_DIGEST]:
        return None
    return zlib.decompress(packed)


def _write(place: Path, kept: bytes) -> None:
    packed = zlib.compress(kept, 1)
    with contextlib.suppress(OSError):  # a full disk, say: the next process compiles it again
        place.parent.mkdir(exist_ok=True)
        half = place.with_name(f"{place.name}.{os.getpid()}")
        half.write_bytes(hashlib.sha256(packed).digest() + packed)
        half.replace(place)
        files = sorted(place.parent.iterdir(), key=lambda file: -file.stat().st_mtime)
        left = MOST_BYTES
        for file in files:
            left -= file.stat().st_size
            if left < 0:
                file.unlink(missing_ok=True)
