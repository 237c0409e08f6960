"""The transformers tokenizer of a folder, built from its data files alone.

Repositories of these families name tokenizer classes of their own in `auto_map`; their files are
ordinary fast tokenizers, so the stock classes read them and no code of the folder is run.
"""

import contextlib
import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

_NO_ADVICE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer in `folder`.

    Raises:
        ValueError: If the files cannot be read.
    """
    with _without_advice():
        from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

        kind = PreTrainedTokenizerFast
        if not (folder / "tokenizer.json").is_file():  # vocab.json and merges.txt
            kind = Qwen2Tokenizer
        try:
            return kind.from_pretrained(folder, **_overrides(folder))
        except Exception as error:  # whatever the tokenizers library meets in a broken file
            raise ValueError(
                f"{folder}: the tokenizer cannot be read ({error}); download its files again"
            ) from error


@contextlib.contextmanager
def _without_advice() -> Generator[None, None, None]:
    """Without transformers' advice to install PyTorch, which it gives when it is imported."""
    before = os.environ.get(_NO_ADVICE)
    os.environ[_NO_ADVICE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NO_ADVICE]
        else:
            os.environ[_NO_ADVICE] = before


def _overrides(folder: Path) -> dict[str, Any]:
    """Settings that the stock classes would stumble over, in a form they take."""
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    extra = settings.get("extra_special_tokens")
    if isinstance(extra, list):  # a list in old files, a mapping by name in new ones
        return {"extra_special_tokens": {f"extra_{i}": token for i, token in enumerate(extra)}}
    return {}
