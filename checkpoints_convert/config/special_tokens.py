"""Ids of the mask, end and padding tokens, resolved if the files of a checkpoint disagree."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, cast


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerFacts:
    """The contents of a folder's tokenizer files; None or empty if they do not state a value.

    Attributes:
        num_tokens: The highest token id plus one, added tokens included. Later rows of the
            embedding belong to no token.
        mask_token_id: Id of `mask_token`; None without one, or if its text is not in the
            vocabulary (SDAR's files say `<|MASK|>`, its vocabulary `<MASK>`).
        mask_token: The text of `mask_token`, in the vocabulary or not.
        bos_token_id, eos_token_id, pad_token_id: Ids of these roles, if they exist.
        special_token_ids: Tokens flagged special or named for a role, ascending. Decoded text
            leaves them out.
        vocabulary: The id of every token by its text, added tokens included; an id may have two
            texts. Ignored when facts are compared.
    """

    num_tokens: int | None = None
    mask_token_id: int | None = None
    mask_token: str | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    special_token_ids: tuple[int, ...] = ()
    vocabulary: Mapping[str, int] = dataclasses.field(
        default_factory=dict[str, int], repr=False, compare=False
    )

    def id_of(self, *texts: str) -> int | None:
        """Id of the first of these texts that is a token, None if none is."""
        return next((self.vocabulary[text] for text in texts if text in self.vocabulary), None)

    def mask_id(self, *usual: str) -> int | None:
        """Id of `mask_token`, else of the first of the family's `usual` texts that is a token.

        Folders of LLaDA2 and Fast-dLLM v2 list their mask as an added token without a role.
        """
        return self.id_of(*usual) if self.mask_token_id is None else self.mask_token_id


def _listed(value: Any) -> list[Any]:
    """A list unchanged, any other value as a list of one."""
    return list(cast("Iterable[Any]", value)) if isinstance(value, list | tuple) else [value]


def ids(value: Any) -> list[int]:
    """An id, a list of ids or nothing, as a list."""
    return [item for item in _listed(value) if isinstance(item, int) and not isinstance(item, bool)]


def first_id(limit: int, candidates: Iterable[Any]) -> int:
    """The first candidate that is an id below `limit`; 0 if none is."""
    return next((i for value in candidates for i in ids(value) if 0 <= i < limit), 0)


def stop_ids(
    stated: Iterable[Any], usual: Iterable[int], vocab: int, notes: list[str]
) -> tuple[int, ...]:
    """The stop ids that the files state and those of the family, ascending.

    Args:
        stated: `eos_token_id` of each file: an id, a list of ids or None.
        usual: Stop ids of the family that belong to this vocabulary.
        vocab: Rows of the embedding; a stated id outside them is noted and ignored.
    """
    items = [item for value in stated for item in _listed(value)]
    for item in items:
        if item is not None and not ids(item):
            notes.append(f"eos_token_id={item!r} is no id; ignored")
    said = {i for item in items for i in ids(item)}
    for token in sorted(i for i in said if not 0 <= i < vocab):
        notes.append(f"eos_token_id={token} lies outside the vocabulary of {vocab}; ignored")
    return tuple(sorted({i for i in said if 0 <= i < vocab} | set(usual)))


def mask_id(
    sources: Mapping[str, int | None],
    vocab: int,
    ends: Iterable[int],
    problems: list[str],
    notes: list[str],
) -> int:
    """The id of the mask token from the first source that has one.

    Published SDAR-MoE configs name a padding or end id as the mask. Such a source is skipped if
    another has an id. Disagreement is noted.

    Args:
        sources: Id of each source by its name, the most trusted first.
        ends: Ids of padding and end tokens.
    """
    said = {where: i for where, i in sources.items() if i is not None}
    if not said:
        problems.append(
            "no mask token is known; set mask_token_id in config.json or mask_token in "
            "tokenizer_config.json"
        )
        return -1
    wrong = [f"mask_token_id={i!r} of {where}" for where, i in said.items() if not _in(i, vocab)]
    if wrong:
        problems.append(f"{', '.join(wrong)} must be an id of the vocabulary of {vocab}")
        return -1
    ends = set(ends)
    first = next(iter(said.items()))
    where, chosen = next((one for one in said.items() if one[1] not in ends), first)
    if chosen in ends:
        notes.append(f"mask token {chosen} of {where} is also a pad or end of text")
    if len(set(said.values())) > 1:
        says = ", ".join(f"{name} says {i}" for name, i in said.items())
        notes.append(f"mask token in conflict: {says}; using {chosen} of {where}")
    return chosen


def _in(value: Any, vocab: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocab
