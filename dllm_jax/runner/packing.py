"""The words that cross between host and device: one layout of names, and slots as 32-bit words.

Each transfer to an H200 takes 50 us, so what a call needs goes as one array of rows. `Fields` names
the parts of a row; the host packs by it and the programs slice by it. A fetched row ends with what
decoding changes of a slot, but for what stays on the device until the host needs it (`is_far`).
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from dllm_jax.engine.layout import GREEDY, DeviceFailure, Placement
from dllm_jax.engine.record import NOTHING_WRITTEN, Tail, Write
from dllm_jax.engine.requests import DraftMetrics
from dllm_jax.engine.rules import STOP_WIDTH
from dllm_jax.strategies.core.recording import LAW, RAW, STEP, TOP, TOP_IDS
from dllm_jax.strategies.core.state import BlockBuffer, DecodeState
from dllm_jax.strategies.dflash import drafting

ADMIT_ROWS = 8  # requests that one program puts into their slots
REALS = [name for name, one in GREEDY._asdict().items() if isinstance(one, float)]


class Fields:
    """The named parts of a row of words, in order.

    Args:
        widths: Words of each part; None for the last one: all that follow.

    Attributes:
        at: The first word of each part.
        span: All its words.
        size: Words, without a last part of any width.
    """

    def __init__(self, **widths: int | None):
        self.size = 0
        self.at: dict[str, int] = {}
        self.span: dict[str, slice] = {}
        for name, width in widths.items():
            self.at[name] = self.size
            self.span[name] = slice(self.size, None if width is None else self.size + width)
            self.size += width or 0

    def pack(self, count: int, **values: Any) -> np.ndarray:
        """Rows on the host, zero where nothing is given.

        Args:
            count: Rows.
            values: A number, or an array whose last axis runs along the part from its first word.
        """
        shapes = [getattr(value, "shape", ()) for value in values.values()]
        firsts = [self.at[name] for name in values]
        ends = [at + (shape[-1] if shape else 1) for at, shape in zip(firsts, shapes, strict=True)]
        rows = np.zeros((count, max(self.size, *ends)), np.int32)
        for at, end, value in zip(firsts, ends, values.values(), strict=True):
            rows[:, at:end] = value
        return rows


# What a fetched row begins with: `length` tokens were emitted, `before` of them before the chunk.
# Room for the most tokens of a chunk follows, then the words of the slot.
HEAD = Fields(start=1, finish=1, nfe=1, length=1, before=1, steps=1)
PIECE = {"slot": 1, "first": 1, "end": 1, "live_end": 1, "last": 1}
DECODE = Fields(slot=1, num_active=1, num_steps=1, early=1, pages=None)


@functools.cache
def piece_fields(size: int) -> Fields:
    """A piece of a prompt: positions, ids, its row of the page table."""
    return Fields(**PIECE, tokens=size, pages=None)


@functools.cache
def request_fields(window: int, num_knobs: int) -> Fields:
    """A request on its way to a slot; `REALS` and knobs go by their bits."""
    numbers = ("slot", "decodes", "prompt_len", "limit", "max_nfe", "max_run", "seed", "fold")
    numbers = dict.fromkeys((*numbers, *GREEDY._fields), 1)
    return Fields(**numbers, knobs=num_knobs, stop_ids=STOP_WIDTH, tail=window, given=window)


def pack_request(
    slot: int, placement: Placement, window: int, knobs: tuple[str, ...]
) -> np.ndarray:
    """A placement as `request_fields`; it does not decode at once."""
    tail, seed, numbers = placement.tail, placement.seed, placement.sampling._asdict()
    sampling = {
        name: np.float32(number).view(np.int32) if name in REALS else number
        for name, number in numbers.items()
    }
    nothing = (-1,) * max(window, STOP_WIDTH)  # no stop id, nothing given
    given = nothing[: len(tail)] + placement.given  # after the part of the prompt in the window
    fields = request_fields(window, len(knobs))
    row = fields.pack(
        1,
        slot=slot,
        prompt_len=placement.prompt_len,
        limit=placement.limit,
        max_nfe=placement.max_nfe,
        max_run=placement.max_run,
        seed=seed - 2**32 if seed >= 2**31 else seed,  # its bits
        fold=placement.fold,
        **sampling,
        knobs=np.array([placement.knobs[name] for name in knobs], np.float32).view(np.int32),
        stop_ids=np.array((placement.stop_ids + nothing)[:STOP_WIDTH]),
        tail=np.array(tail, np.int32),
        given=np.array((given + nothing)[:window]),
    )
    return row[0]


# --- slots --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class SlotLayout:
    """Where each leaf of a slot stands among its words: the first `near` of them are fetched."""

    tree: Any
    leaves: tuple[tuple[int, int, tuple[int, ...], str], ...]  # offset, words, shape, dtype
    size: int
    near: int


def kept_part(state: DecodeState) -> dict[str, Any]:
    """The leaves of a slot that decoding changes, without its output and its constants."""
    return {
        "buffer": state.buffer,
        "finish": state.finish,
        "carry": state.carry.replace(lasting={}),  # stays in the slot
        "boundary": state.boundary,
        "output_len": state.output_len,
        "written": state.written,
    }


def is_far(part: Any) -> list[bool]:
    """Whether a fetch leaves a leaf of `kept_part` on the device: it does for a strategy's floats.

    Only a request that loses its slot needs them on the host. A canvas of DiffusionGemma has 2.9 MB
    of expectations, for which the device would wait 1.4 ms a slot after each chunk (H200).
    """
    far = jax.tree.map(lambda leaf: jnp.issubdtype(leaf.dtype, jnp.floating), part["carry"])
    return jax.tree.leaves({**jax.tree.map(lambda leaf: False, part), "carry": far})


def layout_of(part: Any) -> SlotLayout:
    """The layout of a `kept_part` with a leading slot axis."""
    leaves, tree = jax.tree.flatten(part)
    far = is_far(part)
    placed: dict[int, tuple[int, int, tuple[int, ...], str]] = {}
    offset = near = 0
    for i in sorted(range(len(leaves)), key=far.__getitem__):
        shape = tuple(leaves[i].shape[1:])
        size = math.prod(shape)
        placed[i] = (offset, size, shape, str(leaves[i].dtype))
        offset += size
        near += 0 if far[i] else size
    return SlotLayout(tree, tuple(placed[i] for i in range(len(leaves))), offset, near)


def pack(part: Any) -> tuple[Int[Array, "R N"], Int[Array, "R X"] | None]:
    """Slots as words: those that are fetched, and the others, None if there are none."""
    words: dict[bool, list[Array]] = {False: [], True: []}
    for leaf, far in zip(jax.tree.leaves(part), is_far(part), strict=True):
        flat = leaf.reshape(leaf.shape[0], math.prod(leaf.shape[1:]))
        if jnp.issubdtype(flat.dtype, jnp.floating):
            flat = jax.lax.bitcast_convert_type(flat.astype(jnp.float32), jnp.int32)
        words[far].append(flat.astype(jnp.int32))
    near, others = (jnp.concatenate(some, axis=1) if some else None for some in words.values())
    assert near is not None
    return near, others


def unpack(words: Any, layout: SlotLayout) -> Any:
    """Slots from their words [..., X], of the host or the device; None where words lack."""
    leaves = []
    for offset, size, shape, dtype in layout.leaves:
        flat = words[..., offset : offset + size]
        if jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
            flat = flat.view(jnp.float32)
        is_there = flat.shape[-1] == size
        shape = (*words.shape[:-1], *shape)
        leaves.append(flat.astype(dtype, copy=False).reshape(shape) if is_there else None)
    return jax.tree.unflatten(layout.tree, leaves)


# --- results -------------------------------------------------------------------------------------


class Fetched:
    """The rows of a decode chunk, on the host.

    Args:
        packed: [R X]: `HEAD`, tokens, slots.
        runner: The `ModelRunner` that made the chunk.
        far: The words of the slots that are still on the device.

    Attributes:
        start: First position of each window = tokens in the cache.
        finish: Codes of `dllm_jax.strategies.core.state`.
        nfe: Forwards after prefill.
        length: Tokens emitted so far, and before this chunk (`before`).
        emitted: Tokens of the output from `before` on, valid up to `length`.
        steps: Decode steps the chunk ran.
    """

    def __init__(self, packed: np.ndarray, runner: Any, far: jax.Array | np.ndarray | None = None):
        self._packed, self._runner, self._far = packed, runner, far
        columns = packed[:, : HEAD.size].T.tolist()
        head: dict[str, list[int]] = dict(zip(HEAD.at, columns, strict=True))
        self.start, self.finish, self.nfe = head["start"], head["finish"], head["nfe"]
        self.length, self.before = head["length"], head["before"]
        self.steps = head["steps"][0]
        most = max(map(operator.sub, self.length, self.before))
        first = HEAD.size
        self.emitted: list[list[int]] = packed[:, first : first + most].tolist()

    @property
    def _words(self) -> np.ndarray:
        """Of the slots, as far as they were fetched."""
        return self._packed[:, HEAD.size + self._runner.layout.most_new :]

    @functools.cached_property
    def _slots(self) -> dict[str, Any]:
        """The slots as named leaves, as `ModelRunner.unpack`, with a leading axis."""
        layout = self._runner.slot_layout
        return unpack(self._words[:, : layout.near], layout)

    def hold(self) -> bool:
        """Bring the rest of the slots to the host; False: the device failed, and they are lost."""
        far = self._far
        try:
            self._far = None if far is None else self._runner.device.read(lambda: np.asarray(far))
        except (DeviceFailure, jax.errors.JaxRuntimeError):
            return False
        return True

    def saved(self, row: int) -> np.ndarray:
        """The slot as `ModelRunner.restore` takes it; a copy.

        Raises:
            DeviceFailure: It is lost.
        """
        if not self.hold():
            raise DeviceFailure("what a text needs to resume is lost with the device")
        slot, near = self._words[row], self._runner.slot_layout.near
        far = () if self._far is None else self._far[row]
        return np.concatenate([slot[:near], far, slot[near:]]).astype(np.int32, copy=False)

    def window(self, row: int, length: int) -> tuple[int | None, ...]:
        """The open cells after the first `length` output tokens, None for a hole."""
        buffer = self._buffer(row)
        tokens, filled = buffer.tokens.reshape(-1), buffer.filled.reshape(-1)
        first = int(buffer.prompt_len) + length - int(buffer.start)
        is_open = np.repeat(buffer.status != 0, buffer.tokens.shape[-1])
        end = min(len(tokens), int(buffer.limit) - int(buffer.start))
        return tuple(
            int(tokens[i]) if filled[i] else None for i in range(max(first, 0), end) if is_open[i]
        )

    def written(self, row: int, first: int, count: int) -> list[Write]:
        """What was last written to `count` positions from `first` on."""
        return writes_at(self._slots["written"][row], first, count)

    def behind_text(self, row: int, length: int) -> Tail:
        """What stands after the first `length` output tokens."""
        return tail_of(self._buffer(row), self._slots["written"][row], length)

    def behind(self, row: int) -> int:
        """The cell after the emitted tokens of a row whose last fetch is this one."""
        buffer = self._buffer(row)
        place = int(buffer.prompt_len) + self.length[row] - int(buffer.start)
        return int(buffer.tokens.reshape(-1)[place])

    def drafted(self, row: int) -> DraftMetrics | None:
        """Draft counts of a request so far; None for a strategy without drafts."""
        return draft_metrics(jax.tree.map(lambda leaf: leaf[row], self._slots["carry"].slot))

    def _buffer(self, row: int) -> BlockBuffer:
        return jax.tree.map(lambda leaf: leaf[row], self._slots["buffer"])


def draft_metrics(slot: Mapping[str, np.ndarray]) -> DraftMetrics | None:
    """The counts of `dflash.drafting` in a strategy's `slot` leaves; None where it has none."""
    names = drafting.ROUNDS, drafting.PROPOSED, drafting.ACCEPTED
    if not slot.keys() >= {*names}:
        return None
    return DraftMetrics(*(tuple(slot[name].tolist()) for name in names))


def writes_at(held: np.ndarray, first: int, count: int) -> list[Write]:
    """What was last written to `count` positions from `first` on.

    Args:
        held: `DecodeState.written` of a slot [N F].
    """
    rows = held[(first + np.arange(count)) % len(held)].tolist()
    return [
        Write(
            law=row[LAW],
            raw=row[RAW],
            top=dict(zip(map(int, row[TOP_IDS]), row[TOP], strict=True)),
            step=int(row[STEP]),
        )
        if row[STEP] == row[STEP]  # else NaN
        else NOTHING_WRITTEN
        for row in rows
    ]


def tail_of(buffer: BlockBuffer, held: np.ndarray, length: int) -> Tail:
    """What stands in the window [K S] after the first `length` output tokens."""
    start = int(buffer.start)
    first = max(int(buffer.prompt_len) + length, start)
    cells = zip(buffer.tokens.ravel().tolist(), buffer.filled.ravel().tolist(), strict=True)
    ids = [token if filled else None for token, filled in cells][first - start :]
    return Tail(first, ids, writes_at(held, first, len(ids)))
