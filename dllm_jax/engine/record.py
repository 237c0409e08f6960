"""`Record`: what was written to a text, when, and how likely that was; and its file.

The form is that of a trajectory for reinforcement learning: forwards that wrote nothing leave no
trace, and cells after the stop id in its block are part of it, because others were decided by them.
"""

import dataclasses
import json
import math
import os
import stat
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, get_args

import numpy as np

from dllm_jax.engine.checks import MOST_LISTED, short_repr, whole_number

VERSION = 1
Align = Literal["grid", "prompt", "causal", "window"]
WRITES = {
    "position": np.int32,
    "step": np.int32,
    "token": np.int32,
    "log_prob": np.float32,
    "is_edit": np.bool_,
}


class Write(NamedTuple):
    """What an engine keeps of the last write to a position; log-probabilities in nats.

    Attributes:
        law: Of the token under the law that it was drawn from.
        raw: Of the token under the raw logits.
        top: Of the likeliest ids under the raw logits, the likeliest first.
        step: As of `Record`.
    """

    law: float
    raw: float
    top: Mapping[int, float]
    step: int


NOTHING_WRITTEN = Write(math.nan, math.nan, {}, -2)  # a token that was given


class Tail(NamedTuple):
    """The cells after the output of a text: first position, ids (None for a hole), writes."""

    first: int
    ids: Sequence[int | None]
    written: Sequence[Write]


@dataclasses.dataclass(frozen=True, eq=False)
class Record:
    """The writes of one text, by (step, position).

    Attributes:
        prompt_ids: Of the prompt [P].
        length: Tokens of the text.
        last: Last position that bears on the text; writes after it are left out.
        position, step, token: Of each write [E]. A step counts forwards from 0, prefill apart; -1
            is the end of the prompt, which predicts the first token of `ar`.
        log_prob: Of the token under the law that it was drawn from, after temperature (0 counts as
            1), top-k and top-p, in nats [E]; NaN where the strategy did not ask the model.
        is_edit: The write replaced another token [E].
        law: What the law is of: model, strategy and its fields, sampling, `finish_reason`.
        kept: What `dj.record` was asked to keep. Of each cell that was asked for, in each forward:
            `position`, `step`, and what `keep` names. Of positions in `logits_at`:
            `logits_position`, `logits_step`, `logits`.
    """

    prompt_ids: np.ndarray
    length: int
    last: int
    position: np.ndarray
    step: np.ndarray
    token: np.ndarray
    log_prob: np.ndarray
    is_edit: np.ndarray
    law: Mapping[str, Any]
    kept: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.law["block_size"]

    @property
    def align(self) -> Align:
        """Where blocks begin.

        "grid": at multiples of their size; "prompt": at the prompt's end; "causal": each token is a
        block; "window": the whole text is one.
        """
        return self.law["align"]

    @property
    def steps(self) -> np.ndarray:
        """The step that wrote each token of the text [length]; -2 for one that was given."""
        return self._of_text(self.step, -2)

    @property
    def log_probs(self) -> np.ndarray:
        """`log_prob` of the write that each token of the text is of [length]."""
        return self._of_text(self.log_prob, np.nan)

    def _of_text(self, values: np.ndarray, missing: float) -> np.ndarray:
        place = self.position - len(self.prompt_ids)
        inside = place < self.length
        found = np.full(self.length, missing, values.dtype)
        found[place[inside]] = values[inside]  # of several writes the last
        return found


def record_of(
    prompt: Sequence[int],
    length: int,
    ends_with: str | None,
    limit: int,
    writes: Mapping[str, Any],
    law: Mapping[str, Any],
    kept: Mapping[str, np.ndarray] | None = None,
) -> Record:
    """A record of writes in any order.

    Args:
        ends_with: The finish reason.
        limit: First position that may not be emitted.
        writes: `position`, `step`, `token`, `log_prob` and `is_edit`, as far as there are any.
    """
    align, block_size = law["align"], law["block_size"]
    final = len(prompt) + length - (ends_with != "stop")  # the last token, or the stop id
    last = final
    if align == "window":
        last = limit - 1
    elif align != "causal":
        origin = len(prompt) if align == "prompt" else 0
        last = origin + ((final - origin) // block_size + 1) * block_size - 1
    arrays = {name: np.asarray(writes.get(name, ()), kind) for name, kind in WRITES.items()}
    chosen = np.flatnonzero(arrays["position"] <= last)
    order = np.lexsort((arrays["position"][chosen], arrays["step"][chosen]))
    return Record(
        prompt_ids=np.asarray(prompt, np.int32),
        length=length,
        last=last,
        **{name: array[chosen[order]] for name, array in arrays.items()},
        law={**law, "finish_reason": ends_with},
        kept=dict(kept or {}),
    )


def record_of_last(
    prompt: Sequence[int],
    tokens: Sequence[int],
    written: Sequence[Write],
    tail: Tail | None,
    ends_with: str | None,
    limit: int,
    law: Mapping[str, Any],
) -> Record:
    """A record of the last writes to a text and to the cells after it; as `record_of`."""
    positions = [*range(len(prompt), len(prompt) + len(tokens))]
    ids: list[int | None] = [*tokens]
    writes = [*written[: len(tokens)]]
    if tail is not None:
        positions += range(tail.first, tail.first + len(tail.ids))
        ids += tail.ids
        writes += tail.written
    chosen = [i for i, one in enumerate(writes) if ids[i] is not None and one.step > -2]
    columns = {
        "position": [positions[i] for i in chosen],
        "step": [writes[i].step for i in chosen],
        "token": [ids[i] for i in chosen],
        "log_prob": [writes[i].law for i in chosen],
        "is_edit": [False] * len(chosen),
    }
    return record_of(prompt, len(tokens), ends_with, limit, columns, law)


_FACTS = ("length", "last", "law")
_ARRAYS = ("prompt_ids", *WRITES)


def save_records(records: Record | Sequence[Record], path: str | os.PathLike[str]) -> None:
    """Write records to an `.npz` file, which is whole or not there.

    It holds `facts`, a JSON object a record, and each array of all records in one, with the lengths
    of its parts in `NAME.lengths`. Nothing in it is pickled.
    """
    many = [records] if isinstance(records, Record) else list(records)
    facts = [{name: getattr(one, name) for name in _FACTS} for one in many]
    names = dict.fromkeys(name for one in many for name in one.kept)
    columns = {name: [np.asarray(getattr(one, name)) for one in many] for name in _ARRAYS}
    for name in names:
        like = next(one.kept[name] for one in many if name in one.kept)
        columns[f"kept.{name}"] = [one.kept.get(name, like[:0]) for one in many]
    held: dict[str, Any] = {"version": np.int32(VERSION), "facts": json.dumps(facts)}
    for name, parts in columns.items():
        held[name] = np.concatenate(parts) if parts else np.zeros(0)
        held[f"{name}.lengths"] = np.array([len(part) for part in parts], np.int64)
    target = Path(path)
    with tempfile.NamedTemporaryFile(dir=target.parent, suffix=".npz", delete=False) as file:
        try:
            np.savez(file, **held)
            file.close()
            os.replace(file.name, target)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def load_records(path: str | os.PathLike[str]) -> list[Record]:
    """Read what `save_records` wrote.

    Raises:
        OSError: There is no such file.
        ValueError: It holds no records, or those of another version.
    """
    path = os.fspath(path)
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ValueError("it is no regular file")
        file = open(path, "rb")  # noqa: SIM115  (its own errors pass)
    except ValueError as error:  # of a name too
        raise ValueError(f"{short_repr(path)} holds no records: {error}; give a file") from error
    try:
        with file:
            return _records_of(stored_arrays(file))
    except Exception as error:  # a damaged file may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ValueError(
            f"{short_repr(path)} holds no records ({reason}); give what save_records wrote"
        ) from error


def stored_arrays(file: IO[bytes]) -> dict[str, np.ndarray]:
    """The arrays of an `.npz` file by name; none is larger than the bytes that it takes there.

    Raises:
        ValueError: One is.
    """
    found, size = {}, os.fstat(file.fileno()).st_size
    with zipfile.ZipFile(file) as packed:
        for info in packed.infolist():
            if info.compress_type != zipfile.ZIP_STORED or info.file_size > size:
                raise ValueError(f"{info.filename} in {Path(file.name).name} is compressed")
            with packed.open(info) as member:
                version = np.lib.format.read_magic(member)
                if version != (1, 0):
                    raise ValueError(f"{info.filename} has {version=}")
                shape, _, dtype = np.lib.format.read_array_header_1_0(member)
                if math.prod(shape) * dtype.itemsize != info.file_size - member.tell():
                    raise ValueError(f"{info.filename} has {shape=}, which its bytes are not")
            with packed.open(info) as member:
                array = np.lib.format.read_array(member, allow_pickle=False)
                found[info.filename.removesuffix(".npy")] = array
    return found


def _records_of(held: Mapping[str, np.ndarray]) -> list[Record]:
    """Records of a file's arrays, each of its kind."""
    if (version := held["version"].item()) != VERSION:
        raise ValueError(f"{version=}, and this program reads {VERSION}")
    facts = json.loads(str(held["facts"]))
    if not isinstance(facts, list):
        raise ValueError("facts are no list")
    kinds = {"prompt_ids": np.int32, **WRITES}
    columns = {}
    for name in dict.fromkeys([*_ARRAYS, *(name for name in held if name.startswith("kept."))]):
        if name.endswith(".lengths"):
            continue
        values, lengths = held[name], held[f"{name}.lengths"]
        if facts and name in kinds and (values.ndim != 1 or values.dtype != kinds[name]):
            raise ValueError(f"{name} is {values.dtype}{values.shape}")
        counts = list(map(int, lengths.tolist())) if lengths.dtype == np.int64 else []
        is_whole = values.ndim > 0 and sum(counts) == len(values) and min(counts, default=0) >= 0
        if len(counts) != len(facts) or not is_whole:
            raise ValueError(f"{name}.lengths are not those of {len(facts)} records")
        columns[name] = np.split(values, np.cumsum(counts)[:-1])
    found = []
    for i, one in enumerate(facts):
        _check_facts(f"facts[{i}]", one)
        arrays = {name: columns[name][i] for name in _ARRAYS}
        if len({len(arrays[name]) for name in WRITES}) > 1:
            raise ValueError(f"the writes of record {i} differ in their number")
        place = arrays["position"]
        if len(place) and place.min() < len(arrays["prompt_ids"]):
            raise ValueError(f"a write of record {i} is in its prompt")
        kept = {name.removeprefix("kept."): c[i] for name, c in columns.items() if "kept." in name}
        found.append(Record(**arrays, **{name: one[name] for name in _FACTS}, kept=kept))
    return found


def _check_facts(name: str, one: Any) -> None:
    """Refuse facts that `save_records` does not write."""
    if not isinstance(one, dict) or not isinstance(one["law"], dict):
        raise ValueError(f"{name}={short_repr(one)} is no record's")
    whole_number(f"{name}.length", one["length"], 0, MOST_LISTED)
    whole_number(f"{name}.last", one["last"], -1)
    whole_number(f"{name}.law.block_size", one["law"]["block_size"])
    if one["law"]["align"] not in get_args(Align):
        raise ValueError(f"{name}.law.align={short_repr(one['law']['align'])} is not known")
