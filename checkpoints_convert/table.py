"""A family's table: its rules, the forms its files may take, and what else to know of its names."""

import dataclasses
import re
from collections.abc import Iterable

from .spec import Rule, numbered

Rules = tuple[Rule, ...]
Forms = tuple[Rules, ...]


@dataclasses.dataclass(frozen=True)
class ConfigKeys:
    """What `config.json` calls the facts that tensors may contradict."""

    layers: str = "num_hidden_layers"
    tied: str = "tie_word_embeddings"
    vocab: str = "vocab_size"


@dataclasses.dataclass(frozen=True)
class Table:
    """How the tensors of a family fill the tree.

    Attributes:
        rules: Those that every file follows.
        choices: Sets of rules of which a checkpoint follows one each, the usual one first.
        embed: Name of the embedding.
        lm_head: Name of the head, which a tied model may hold as a copy of the embedding.
    """

    rules: Rules
    choices: tuple[Forms, ...] = ()
    embed: str = "model.embed_tokens.weight"
    lm_head: str = "lm_head.weight"
    keys: ConfigKeys = ConfigKeys()

    def rules_for(self, names: Iterable[str] = ()) -> Rules:
        """The rules that files with tensors of these names follow; the usual ones without."""
        held = tuple(names)
        chosen = [max(forms, key=lambda form: _known(form, held)) for forms in self.choices]
        return self.rules + tuple(rule for form in chosen for rule in form)

    def every_rule(self) -> Rules:
        """The rules of all forms."""
        return self.rules + tuple(r for forms in self.choices for form in forms for r in form)


def _known(rules: Rules, names: tuple[str, ...]) -> int:
    """How many of the names the rules know."""
    return sum(numbered(rules, name) is not None for name in names)


# Rotary tables that old versions stored, and averaged copies of weights: not needed, not missed.
IGNORED = re.compile(r".*\.rotary_emb\.inv_freq|.*\.rope\.freqs|(.*[._])?ema([._].*)?")
