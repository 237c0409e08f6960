"""How a model is decoded where nobody says otherwise: the value, and how it is read from JSON.

Plain values: nothing here reads a file, knows a family or runs a strategy.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

Attention = Literal["full", "causal", "block_causal", "d2f"]

D2F_BLOCK = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class FamilyDefaults:
    """How a model is decoded when the user names no settings. Hashable: static in a `Model`.

    Attributes:
        strategy: Name of the strategy the model was made for, whether or not it is there yet.
        block_size: Tokens of a block; 1 for a model that was trained token by token.
        buffer_size: Blocks in the window.
        edit_threshold: Of a strategy that edits; None is its own.
        remasking, block_length: Of `full_sequence`; None is its own.
        temperature, top_p: Of requests that bring no sampling parameters at all.
        attention: Which positions saw which in training: all, those before, those of the same
            block and before; "d2f": blocks behind a prompt that sees itself whole.
        alternatives: Strategies a checkpoint of this form may have been made for instead; its
            files do not tell.
        stop_token_ids: Ids that end a text, ascending.
        forbidden_token_ids: Ids with a meaning for one strategy alone; the others never draw them.
        vocab_limit: Rows of the vocabulary at or past this id belong to no token.
    """

    family: str
    strategy: str
    block_size: int
    buffer_size: int = 1
    accept_threshold: float = 0.95
    add_block_threshold: float = 0.1
    semi_complete_threshold: float = 0.9
    edit_threshold: float | None = None
    remasking: str | None = None
    block_length: int | None = None
    temperature: float = 0.0
    top_p: float | None = None
    attention: Attention = "block_causal"
    alternatives: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    forbidden_token_ids: tuple[int, ...] = ()
    pad_token_id: int = 0
    vocab_limit: int

    def __post_init__(self):
        if self.attention not in get_args(Attention):
            raise ValueError(
                f"attention={self.attention!r} is unknown; use one of "
                f"{', '.join(get_args(Attention))}"
            )


def with_d2f_adapter(defaults: FamilyDefaults) -> FamilyDefaults:
    """The defaults of a model after a D2F adapter went into its weights.

    The adapter changes what sees what, hence the strategy; tokens and their ids are the base's.

    Source: the settings of the published D2F runs (Wang et al. 2025, arXiv 2508.09192).
    """
    return dataclasses.replace(
        defaults,
        strategy="d2f",
        block_size=D2F_BLOCK,
        buffer_size=4,
        accept_threshold=0.95,
        add_block_threshold=0.1,
        semi_complete_threshold=0.9,
        temperature=0.0,
        top_p=None,
        remasking=None,
        block_length=None,
        attention="d2f",
        alternatives=(),
    )


def defaults_from_json(mapping: Mapping[str, Any]) -> FamilyDefaults:
    """The value whose `dataclasses.asdict` went through JSON.

    Raises:
        TypeError: An unknown entry, or one that is missing.
        ValueError: An entry of a value that does not exist.
    """
    return FamilyDefaults(**{name: as_tuple(value) for name, value in mapping.items()})


def as_tuple(value: Any) -> Any:
    """A JSON list as the tuple it was."""
    return tuple(value) if isinstance(value, list) else value
