"""Single tokens as clients read them: with bytes and log-probabilities, or in a window."""

import functools
import math
from collections.abc import Iterable
from typing import Any

from dllm_jax import structured
from dllm_jax.loading.pieces import plain_text

LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON does not have


class TokenTexts:
    """The tokens of a tokenizer, each read once."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._pieces: dict[int, str] = {}

    def piece(self, token: int) -> str:
        """A token as it stands in a text."""
        text = self._pieces.get(token)
        if text is None:
            text = self._pieces[token] = plain_text(self._tokenizer, token)
        return text

    def logprobs(
        self, said: Iterable[dict[int, float]], num_top: int | None
    ) -> list[dict[str, Any] | None]:
        """Log-probabilities of tokens, of which the first of each is its own.

        None for a token that is no text.
        """
        found = []
        for values in said:
            token, own = next(iter(values.items()))
            top = sorted(values.items(), key=lambda pair: -pair[1])[:num_top]
            entry = _entry(self._spelt[token], own) if token in self._spelt else None
            if entry is not None:
                entry["top_logprobs"] = [_entry(self._bytes(one), value) for one, value in top]
            found.append(entry)
        return found

    @functools.cached_property
    def _spelt(self) -> dict[int, bytes]:
        """Bytes of the tokens that are text."""
        spelt = structured.token_bytes(self._tokenizer)
        return {token: data for token, data in enumerate(spelt) if data is not None}

    def _bytes(self, token: int) -> bytes:
        data = self._spelt.get(token)
        return self.piece(token).encode() if data is None else data


def _entry(data: bytes, value: float) -> dict[str, Any]:
    """A token and its log-probability; one that was given has none."""
    number = None if math.isnan(value) else max(value, LEAST_LOGPROB)
    return {"token": data.decode(errors="replace"), "logprob": number, "bytes": list(data)}
