"""A text of a snapshot in an engine of its own, in the state that was saved."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from dllm_jax.api.drafts import bind_draft
from dllm_jax.api.snapshot import (
    SavedText,
    Snapshot,
    SnapshotError,
    model_facts,
    said,
    saved_strategy,
)
from dllm_jax.api.strategy import check_fit
from dllm_jax.engine.checks import short_repr
from dllm_jax.engine.engine import Engine
from dllm_jax.engine.layout import Placement
from dllm_jax.engine.requests import DraftMetrics, Request
from dllm_jax.engine.sequence import Sequence
from dllm_jax.loading.model import Model
from dllm_jax.runner import buckets, packing
from dllm_jax.runner.runner import ModelRunner


class SavedSlot:
    """A slot of a snapshot in place of a fetch, for `Sequence.saved`."""

    def __init__(self, slot: np.ndarray, device: ModelRunner):
        self._slot, self._device = slot, device

    def hold(self) -> bool:
        """As `Fetched.hold`."""
        return True

    def saved(self, row: int) -> np.ndarray:
        """As `Fetched.saved`."""
        del row
        return self._slot

    def drafted(self, row: int) -> DraftMetrics | None:
        """As `Fetched.drafted`."""
        del row
        return packing.draft_metrics(self._device.unpack(self._slot)["carry"].slot)

    def window(self, row: int, length: int) -> tuple[int | None, ...]:
        """Empty: nothing was fetched yet."""
        del row, length
        return ()


def _check_same(name: str, stored: Mapping[str, Any], model: Model) -> None:
    now = model_facts(model)
    none = {"quantization": None, "kv_cache_dtype": None, "quantized_head": False}
    stored = {**none, **stored}  # older snapshots had no other
    for what in ("config", "dtype", *none, "weights"):
        unknown = what not in none and stored[what] is None
        if not unknown and stored[what] != now[what]:
            raise SnapshotError(
                f"{name} {model.source!r} is not the snapshot's, {stored['source']!r}: it differs "
                f"in its {what}; give the same one by --{name}"
            )


def resume(
    snapshot: Snapshot,
    which: int,
    model: Model,
    implementation: str | None = None,
    draft: str | None = None,
    given: str | None = None,
) -> tuple[Engine, str]:
    """An engine with one text of the snapshot, in its last fetched state.

    Args:
        which: Index into `snapshot.texts`.
        implementation: Attention back end, None for the best.
        draft: The current path of the snapshot's drafter; None: unchanged.
        given: As of `saved_strategy`.

    Returns:
        The engine and the request's id.

    Raises:
        SnapshotError: The model, the drafter or the strategy is not the snapshot's, or a field has
            a value that no engine wrote.
    """
    if not 0 <= which < len(snapshot.texts):
        raise SnapshotError(
            f"{which=}: the snapshot holds {len(snapshot.texts)} texts; give one of them"
        )
    try:
        return _resumed(snapshot, which, model, implementation, draft, given)
    except (KeyError, IndexError, TypeError, OverflowError, AttributeError) as error:
        raise SnapshotError(
            f"the snapshot's text {which} is damaged ({said(error)}); it cannot be replayed"
        ) from error


def _resumed(
    snapshot: Snapshot,
    which: int,
    model: Model,
    implementation: str | None,
    draft: str | None,
    given: str | None,
) -> tuple[Engine, str]:
    """See `resume`."""
    _check_same("model", snapshot.model, model)
    text = snapshot.texts[which]
    if snapshot.draft is not None:
        draft = draft or snapshot.draft["source"]
    strategy, aux = bind_draft(saved_strategy(snapshot, given), draft, model)
    for one in aux.values():
        _check_same("draft", snapshot.draft or {}, one)
    check_fit(model, strategy)
    placement = text.placement
    end = max(placement.limit, placement.prompt_len + len(placement.given))
    if end > model.config.max_position:
        raise SnapshotError(
            f"the snapshot's text ends at {end}, {model.source} takes {model.config.max_position} "
            "tokens; it cannot be replayed"
        )
    written = end + strategy.block_size
    window = strategy.block_size * strategy.buffer_size
    most = 2 * max(model.config.max_position, buckets.PREFILL_BUCKETS[-1])
    if max(snapshot.config.prefill_buckets or (0,)) > most:
        raise SnapshotError(
            f"config.prefill_buckets={short_repr(snapshot.config.prefill_buckets)} of the snapshot "
            f"holds more than {most}, twice what the model takes; it cannot be replayed"
        )
    config = dataclasses.replace(
        snapshot.config,
        max_num_seqs=1,
        slot_buckets=None,
        num_pages=-(-max(written, window) // snapshot.config.page_size) + 1,
        max_steps_per_chunk=1,
    )
    layout = buckets.make_layout(model, strategy, aux, config)
    device = ModelRunner(model, strategy, aux, layout, implementation)
    engine = Engine(device, model.tokenizer)
    request_id = engine.add(
        Request(
            prompt_token_ids=text.prompt,
            params=dataclasses.replace(text.params, n=1),
            suffix_token_ids=placement.given[text.params.max_tokens :],
            stream=True,
            denoise=True,
        )
    )
    (sequence,) = engine.sequences(request_id)
    _check_text(f"texts[{which}]", text, sequence.placement, layout.vocab_size)
    _restore(sequence, text, written, device)
    return engine, request_id


def _check_text(path: str, text: SavedText, fresh: Placement, vocab_size: int) -> None:
    """Refuse tokens and a placement that do not belong to the text's prompt and parameters."""
    if not all(0 <= token < vocab_size for token in text.tokens):
        raise SnapshotError(
            f"{path}.tokens holds an id outside [0, {vocab_size}); it cannot be replayed"
        )
    for field in dataclasses.fields(Placement):
        name = field.name
        stored, made = getattr(text.placement, name), getattr(fresh, name)
        if name in ("seed", "fold", "limit"):
            wrong = not 0 <= stored < 2**32
        elif name == "knobs":
            wrong = stored.keys() != made.keys()
        else:
            wrong = stored != made
        if wrong:
            raise SnapshotError(
                f"{path}.placement.{name}={short_repr(stored)} is not what its parameters make, "
                f"{short_repr(made)}; it cannot be replayed"
            )


def _restore(sequence: Sequence, text: SavedText, written: int, device: ModelRunner) -> None:
    """Set a sequence that is not admitted yet to the saved state of the text."""
    sequence.placement, sequence.capacity = text.placement, written
    # What was kept of earlier tokens is not saved.
    is_kept = not (device.layout.starts_over or text.params.reads_written)
    if text.slot is None or not is_kept:
        return
    if len(text.slot) != device.num_words:
        raise SnapshotError(
            f"a slot of the snapshot has {len(text.slot)} words, one of this model and strategy "
            f"has {device.num_words}; was the strategy changed since?"
        )
    sequence.saved = (SavedSlot(text.slot, device), 0)
    sequence.tokens, sequence.start, sequence.nfe = list(text.tokens), text.start, text.nfe
