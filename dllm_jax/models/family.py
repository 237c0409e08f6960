"""What is known of a model family, and of one checkpoint of it; `family_table` has the rows."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

from dllm_jax.convert.config.parsers import Layers, Parser
from dllm_jax.convert.tensor_names import Table, table_of

Attention = Literal["full", "causal", "block_causal", "d2f"]
Dialect = Literal["hf", "qwen_moe", "llada_moe", "llada", "llada2", "dflash", "diffusion_gemma"]

D2F_BLOCK = 32
_PLAIN = Layers()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoding:
    """The decoding settings of a family, for users who name none.

    Attributes:
        family: Name of the family.
        strategy: Name of the strategy the model was made for.
        block_size: Tokens of a block; 1 for an autoregressive model.
        buffer_size: Blocks in the window.
        edit_threshold: Threshold of a strategy that edits; None is the strategy's own default.
        remasking, block_length, append: Settings of `full_sequence`; None is its own default.
        temperature, top_p: Defaults of requests without sampling parameters.
        attention: Attention mask of training: "full", "causal" or "block_causal" (the same block
            and earlier ones). "d2f": blocks after a prompt with full attention.
        alternatives: Other strategies that a checkpoint of this form may be trained for; its files
            do not state which.
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
    append: bool | None = None
    temperature: float = 0.0
    top_p: float | None = None
    attention: Attention = "block_causal"
    alternatives: tuple[str, ...] = ()

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling fields among these, by name."""
        return {"temperature": self.temperature, "top_p": self.top_p}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FamilyDefaults(Decoding):
    """The decoding defaults of one checkpoint. Hashable, because it is static in a `Model`.

    Attributes:
        stop_token_ids: Ids that end a text, ascending.
        forbidden_token_ids: Ids that are edits and not text.
        delete_token_id, split_token_id: The ids of these two edits, for `edit_indel`; None unless
            the model has both.
        vocab_limit: Rows of the vocabulary at or past this id belong to no token.
        numbers: Fields of the family's own strategy that its files set, by name.
        unread_token_ids: Ids that stand for images or sounds; a prompt with one is refused.
    """

    stop_token_ids: tuple[int, ...] = ()
    forbidden_token_ids: tuple[int, ...] = ()
    delete_token_id: int | None = None
    split_token_id: int | None = None
    pad_token_id: int = 0
    vocab_limit: int
    numbers: tuple[tuple[str, float], ...] = ()
    unread_token_ids: tuple[int, ...] = ()

    def __post_init__(self):
        if self.attention not in get_args(Attention):
            raise ValueError(
                f"attention={self.attention!r} is unknown; use one of "
                f"{', '.join(get_args(Attention))}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hint:
    """A setting that the name of a folder or repository implies.

    Attributes:
        pattern: A regular expression, searched anywhere in the name, in any case.
        settings: Fields of `Decoding`, and `trained_len`, that it changes.
        strategy: The strategy such a checkpoint was trained for. It is only noted, because a name
            proves nothing.
        refusal: If set, refuse such a folder as not of the family; the text says what it is.
    """

    pattern: str
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    strategy: str | None = None
    refusal: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family(Decoding):
    """One row.

    Attributes:
        architecture: The class that `architectures` or `auto_map` names.
        also: Other names of that class.
        model_types: Used only if no class is named; empty if they would be ambiguous.
        dialect: Name of a known form of the config, or a function that reads another form.
        tensors: Names of the tensors; None: those of `tensor_names.TABLES`.
        layers: Properties of the layers that the config does not state.
        shift: Row i of the output predicts position i + 1.
        mask_token_id: None if the files must state it, and for a model without a mask token.
        mask_tokens: Texts of the mask in the vocabulary; empty for a model without a mask token.
        is_marked: Other models have the same class; a checkpoint is of this family only if its
            files have a mask token.
        stop_tokens: Ids that end a text, with their texts. As for the mask, an id counts only in
            the family's own vocabulary: checkpoints of the same architecture have others.
        edits: Entries of the config with ids that are edits and not text, named as the fields of
            `FamilyDefaults`.
        unread: Entries with ids that stand for images or sounds, which a prompt must not contain.
        trained_len: Longest text of training, if the config states more.
        hints: Settings implied by the name.
    """

    architecture: str
    also: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()
    dialect: Dialect | Parser = "hf"
    tensors: Table | None = None
    layers: Layers = _PLAIN
    shift: bool
    mask_token_id: int | None
    mask_tokens: tuple[str, ...] = ()
    is_marked: bool = False
    stop_tokens: tuple[tuple[int, str], ...]
    pad_token_id: int | None = None
    edits: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    trained_len: int | None = None
    hints: tuple[Hint, ...] = ()

    @property
    def name(self) -> str:
        """Name of the family."""
        return self.family

    @property
    def table(self) -> Table:
        """The names of its tensors."""
        return self.tensors or table_of(self.family)


def with_d2f_adapter(defaults: FamilyDefaults) -> FamilyDefaults:
    """The defaults of a model after a D2F adapter was merged into its weights.

    The adapter changes the attention mask, hence the strategy; token ids stay the base's.

    Source: the settings of the published D2F runs (Wang et al. 2025, arXiv 2508.09192).
    """
    own = Decoding(
        family=defaults.family,
        strategy="d2f",
        block_size=D2F_BLOCK,
        buffer_size=4,
        accept_threshold=0.95,
        add_block_threshold=0.1,
        semi_complete_threshold=0.9,
        attention="d2f",
    )
    return dataclasses.replace(defaults, **vars(own))
