"""A trajectory as one self-contained HTML page, without network access or other files.

Data flow: `Trajectory` -> `replay` and `pieces` -> JSON -> the template's style, script and data.
"""

import html
import itertools
import json
import re
from collections.abc import Sequence
from importlib import resources
from typing import Any

from dllm_jax.loading.pieces import piece
from dllm_jax.trace.replay import Frame, Replay, replay
from dllm_jax.trace.trajectory import Trajectory


def render_page(trajectory: Trajectory | Sequence[Trajectory], tokenizer: Any = None) -> str:
    """The HTML page; several trajectories of one prompt are shown side by side.

    Args:
        tokenizer: A transformers tokenizer; None shows ids.

    Raises:
        ValueError: A trajectory without steps, no trajectory, or several prompts.
    """
    several = [trajectory] if isinstance(trajectory, Trajectory) else list(trajectory)
    num_prompts = len({tuple(one.prompt) for one in several})
    if num_prompts != 1:
        raise ValueError(f"the trajectories have {num_prompts} prompts; give those of one prompt")
    facts = [page_facts(one, tokenizer) for one in several]
    names = " and ".join(one.strategy for one in several)
    parts = {
        "TITLE": html.escape(f"{names}: how a text was denoised"),
        "STYLE": _asset("page.css"),
        "SCRIPT": _asset("page.js"),
        "DATA": _script_safe(facts if len(facts) > 1 else facts[0]),
    }
    # In one pass, so that inserted parts are not searched for the names of others.
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda name: parts[name[1]], _asset("page.html"))


def page_facts(trajectory: Trajectory, tokenizer: Any = None) -> dict[str, Any]:
    """The data of the page, for JSON; probabilities are in thousandths."""
    played, text = replay(trajectory), text_of(tokenizer, trajectory.tokens)
    return {
        "model": trajectory.model,
        "strategy": trajectory.strategy,
        "settings": dict(trajectory.settings),
        "finish": trajectory.finish_reason,
        "prompt": text_of(tokenizer, trajectory.prompt),
        "promptLen": len(trajectory.prompt),
        "text": text,
        "numTokens": len(trajectory.tokens),
        "limit": trajectory.limit,
        "first": played.first,
        "end": played.end,
        "blockSize": played.block_size,
        "windowSize": trajectory.steps[0].before.tokens.size,
        "pieces": _pieces(played, tokenizer),
        "frames": [_frame(one, trajectory, tokenizer, text) for one in played.frames],
    }


def text_of(tokenizer: Any, ids: list[int]) -> str:
    """Ids as text without special tokens; without a tokenizer, the ids."""
    if tokenizer is None:
        return " ".join(map(str, ids))
    return tokenizer.decode(ids, skip_special_tokens=True)


def _asset(name: str) -> str:
    return (resources.files("dllm_jax.trace") / name).read_text(encoding="utf-8")


def _script_safe(facts: Any) -> str:
    """JSON that an HTML parser cannot mistake for the end of the script."""
    text = json.dumps(facts, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def _pieces(played: Replay, tokenizer: Any) -> dict[int, list[Any]]:
    """The text of every shown token, and 1 if it is special."""
    ids = set()
    for frame in played.frames:
        ids |= {token for _, token, _ in (*frame.put, *frame.guesses)}
        ids |= {token for _, token in frame.edited}
    found = {token: piece(tokenizer, token) for token in sorted(ids) if token >= 0}
    return {token: [one.text, int(one.is_special)] for token, one in found.items()}


def _frame(frame: Frame, trajectory: Trajectory, tokenizer: Any, text: str) -> dict[str, Any]:
    settled = text_of(tokenizer, trajectory.tokens[: frame.num_settled])
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(settled, text, strict=False))
    return {
        "start": frame.start,
        "status": frame.status,
        "nfe": frame.nfe,
        "settled": frame.num_settled,
        "shown": len([*alike]),  # characters of the text that are settled
        "commit": frame.commit_len,
        "put": frame.put,
        "guesses": frame.guesses,
        "accepted": frame.accepted,
        "edited": frame.edited,
    }
