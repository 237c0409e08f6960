"""A window of tokens as text for the terminal.

Nothing here knows where the ids come from.
"""

from collections import abc
from typing import Any

from dllm_jax.cli.watch import END_MARK, Frame
from dllm_jax.engine.requests import RequestOutput
from dllm_jax.engine.scheduler import Sequence


def frame(model: Any, output: RequestOutput, sequence: Sequence) -> Frame:
    """The window of a text as it stands: end marks are small squares.

    Args:
        output: Of a request with `denoise`.
        sequence: What the engine keeps of it; its `start` says what has left the window.
    """
    one, placement = output.outputs[0], sequence.placement
    behind = placement.given[placement.limit - placement.prompt_len :]
    committed = min(max(0, sequence.start - len(sequence.prompt)), len(one.token_ids))
    settled = one.token_ids[committed:]
    return Frame(
        nfe=sequence.nfe,
        committed=model.tokenizer.decode(one.token_ids[:committed], skip_special_tokens=True),
        cells=cell_texts(model, (*settled, *one.window)),
        num_settled=len(settled),
        behind=model.tokenizer.decode(list(behind), skip_special_tokens=True) if behind else "",
    )


def cell_texts(model: Any, cells: abc.Sequence[int | None]) -> tuple[str | None, ...]:
    """Each cell alone as text, None for a hole, line ends made visible; ids without a tokenizer."""
    return tuple(None if cell is None else _cell_text(model, cell) for cell in cells)


def _cell_text(model: Any, token: int) -> str:
    if token in model.defaults.stop_token_ids:
        return END_MARK
    if model.tokenizer is None:
        return f"[{token}]"
    return model.tokenizer.decode([token]).replace("\n", "⏎")
