"""The transformers tokenizer of a folder, built from its data files alone.

Repositories of these families name tokenizer classes of their own in `auto_map`; their files are
ordinary fast tokenizers, so the stock classes read them and no code of the folder is run. Every
token has the id that the files state: transformers would give a new id to a special token that is
named but is none (SDAR's `<|MASK|>`), and to added tokens the next free ones.
"""

import contextlib
import json
import math
import os
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from dllm_jax.convert import tokenizer_files
from dllm_jax.convert.small_files import MOST_TEMPLATE_BYTES, read_text
from dllm_jax.convert.tokenizer_files import TokenizerParts

MOST_GROWTH = 1000  # times the length of a text, before it is split into tokens or after
# The most that one step of a `tokenizer.json` makes of a character; of others nothing is known to
# grow. NFKC makes 18 of one.
_GROWTHS = {"ByteLevel": 4, "Precompiled": 18, "NFD": 4, "NFKD": 18, "NFC": 3, "NFKC": 18}
_EXITS = (KeyboardInterrupt, SystemExit, GeneratorExit)
_NO_ADVICE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
# The roles of every stock class; unset ones would get defaults.
_ROLES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_PLAIN = ("model_max_length", "clean_up_tokenization_spaces", "padding_side", "truncation_side")
# `tokenizer.json` states these itself; for a vocabulary with merges the settings do.
_OF_VOCABULARIES = ("add_bos_token", "add_eos_token", "add_prefix_space")


def read_tokenizer(folder: Path, mask_token_id: int | None = None) -> Any:
    """The tokenizer in `folder`.

    Args:
        mask_token_id: The model's. The token of that id is made the tokenizer's mask token,
            whatever the files call one, and special: decoded text leaves it out.

    Raises:
        ValueError: If the files cannot be read.
    """
    with _without_advice():
        try:
            return _tokenizer(folder, mask_token_id)
        except _EXITS:
            raise
        except BaseException as error:  # whatever the tokenizers library meets in a broken file
            raise ValueError(
                f"{folder}: the tokenizer cannot be read ({error}); download its files again"
            ) from error


def encode(tokenizer: Any, text: str, special: bool = True) -> list[int]:
    """Token ids of a text.

    Args:
        special: Add the tokens that the tokenizer puts around a text, but never a second BOS: a
            rendered conversation may have one already.

    Raises:
        ValueError: The text holds a lone surrogate, which UTF-8 cannot encode; the tokenizers
            library gives no reason. Or that library gives up on the text, by a pattern of the
            folder that backtracks without end, say.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text is not UTF-8: {text[error.start]!r} at character {error.start} is half a "
            "character; give the text as UTF-8"
        ) from error

    def ids(special: bool) -> list[int]:
        try:
            return tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        except _EXITS:
            raise
        except BaseException as error:  # a panic of native code is no `Exception`
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise ValueError(
                f"the tokenizer cannot encode the text ({reason}); change the text, or use another "
                "tokenizer.json"
            ) from error

    bos = getattr(tokenizer, "bos_token_id", None)
    found = ids(special)
    if special and bos is not None and found[:2] == [bos, bos] and len(ids(False)) < len(found):
        return found[1:]
    return found


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


def _tokenizer(folder: Path, mask_token_id: int | None) -> Any:
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    parts = tokenizer_files.read_parts(folder)
    special = set(parts.special_ids)
    if mask_token_id is not None and mask_token_id in parts.texts:
        special.add(mask_token_id)
    added: dict[int, Any] = {}
    for i in sorted(special | parts.added.keys()):
        record = {"content": parts.texts[i], **parts.added.get(i, {}), "special": i in special}
        added[i] = AddedToken(**record)
    settings = _settings(folder, parts, mask_token_id)
    settings["added_tokens_decoder"] = added
    if (folder / "tokenizer.json").is_file():
        tokenizer = PreTrainedTokenizerFast(**_whole(folder, parts), **settings)
    else:
        from transformers import Qwen2Tokenizer

        vocab, merges = _vocabulary(folder)
        vocab |= {text: i for i, text in parts.texts.items()}
        own = {name: parts.settings[name] for name in _OF_VOCABULARIES if name in parts.settings}
        tokenizer = Qwen2Tokenizer(vocab=vocab, merges=merges, **own, **settings)
    for i in added:
        if (found := tokenizer.convert_tokens_to_ids(parts.texts[i])) != i:
            raise ValueError(f"token {parts.texts[i]!r} has id {i} in one file, {found} in another")
    return tokenizer


def _settings(folder: Path, parts: TokenizerParts, mask_token_id: int | None) -> dict[str, Any]:
    """Arguments of a stock class besides the vocabulary; roles only of tokens that exist."""
    ids: dict[str, int | None] = {role: parts.ids.get(text) for role, text in parts.roles.items()}
    if mask_token_id is not None:
        ids["mask_token"] = mask_token_id
    roles = {role: parts.texts.get(i) for role, i in ids.items() if i is not None}
    extra = [parts.texts[parts.ids[text]] for text in parts.extra if text in parts.ids]
    return {
        **{name: parts.settings[name] for name in _PLAIN if parts.settings.get(name) is not None},
        **dict.fromkeys(_ROLES),
        **roles,
        "extra_special_tokens": extra,
        "chat_template": _chat_template(folder, parts.settings),
    }


def _whole(folder: Path, parts: TokenizerParts) -> dict[str, Any]:
    """A `tokenizer.json`, with the tokens that only other files of the folder have.

    The tokenizers library numbers added tokens after the vocabulary and ignores their stated ids.
    A token that is also in the vocabulary keeps its id.
    """
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    content = tokenizer_files.read_json(path)
    before = _growth(content.get("normalizer")) * _growth(content.get("pre_tokenizer"))
    if max(before, _growth(content.get("decoder"))) > MOST_GROWTH:
        raise ValueError(
            f"tokenizer.json can make a text more than {MOST_GROWTH} times as long; its "
            "normalizer, pre_tokenizer or decoder is not meant to be used"
        )
    vocab = content["model"]["vocab"]
    stated = [token["id"] for token in content.get("added_tokens") or ()]
    stated = [i for i in stated if i in parts.added and parts.texts[i] not in vocab]
    counted = list(range(len(vocab), len(vocab) + len(stated)))
    unknown = [i for i in parts.added.keys() - set(stated) if parts.texts[i] not in vocab]
    if (stated == counted and not unknown) or not isinstance(vocab, dict):
        return {"tokenizer_file": str(path)}
    vocab |= {parts.texts[i]: i for i in parts.added}
    return {"tokenizer_object": Tokenizer.from_str(json.dumps(content))}


def _growth(step: Any) -> int:
    """The most that a step of a `tokenizer.json`, or a sequence of steps, makes of a character."""
    if not isinstance(step, dict):
        return 1
    parts = next((step[key] for key in _SEQUENCES if isinstance(step.get(key), list)), None)
    if parts is not None:
        return math.prod(map(_growth, parts))
    kind, content = step.get("type"), step.get("content", step.get("prepend"))
    if not isinstance(content, str):
        return _GROWTHS.get(str(kind), 1)
    pattern = tokenizer_files.json_object(step.get("pattern")).get("String")
    if kind == "Replace" and isinstance(pattern, str) and pattern:
        return max(1, -(-len(content) // len(pattern)))
    return 1 + len(content)  # next to each character, or in the place of what a pattern finds


_SEQUENCES = ("normalizers", "pretokenizers", "decoders")


def _vocabulary(folder: Path) -> tuple[dict[str, int], Any]:
    """The plain tokens and merges of a folder without `tokenizer.json`."""
    from tokenizers.models import BPE

    merges = folder / "merges.txt"
    if not merges.is_file():
        raise ValueError("vocab.json has no merges.txt beside it")
    return BPE.read_file(str(folder / "vocab.json"), str(merges))


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> Any:
    """The folder's own: a text, a list of named ones, or None."""
    beside, older = folder / "chat_template.jinja", folder / "chat_template.json"
    if beside.is_file():
        return read_text(beside, MOST_TEMPLATE_BYTES) or None
    if settings.get("chat_template"):
        return settings["chat_template"]
    if older.is_file():
        return tokenizer_files.read_json(older).get("chat_template") or None
    return None
