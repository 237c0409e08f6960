"""How a model is decoded where nobody says how: its strategy, the numbers of it, sampling.

`dj.generate`, `LLM` and every verb of the command line ask here, so they agree. A family's own
strategy may not be there yet; then another one stands in, and whoever named none is told what to
expect. Nothing here runs a model.
"""

import warnings
from typing import Any, Protocol

from dllm_jax.model import Model
from dllm_jax.models.families import FamilyDefaults
from dllm_jax.requests import SamplingParams
from strategies.resolve import load_strategy, strategy_names

# Strategies that are promised, and what a model made for one loses while it is not there.
_LOSSES = {
    "full_sequence": "the model was trained with full attention, so texts suffer where a block "
    "does not see the ones behind it",
}
_STAND_IN = "multi_bd"
# These revise what they accepted: their accept thresholds are low, and mean nothing elsewhere.
_REVISING = ("edit", "dmax")


class Described(Protocol):
    """What is asked of a model here, which a report on a checkpoint has as well."""

    @property
    def config(self) -> Any:
        """Facts of the network."""

    @property
    def defaults(self) -> FamilyDefaults:
        """How the family is decoded when nothing is said."""
        ...


def default_strategy(model: Described) -> str:
    """Name of the strategy of a model where nobody names one: its family's, once that is there."""
    own = model.defaults.strategy
    if own in strategy_names() or own not in _LOSSES:
        return own
    return _STAND_IN if model.config.mask_token_id >= 0 else "ar"


def stand_in_note(model: Described) -> str | None:
    """What to expect where another strategy stands in for the family's; None where none does."""
    defaults, used = model.defaults, default_strategy(model)
    if used == defaults.strategy:
        return None
    return (
        f"{defaults.family} is decoded with {used!r}: its own "
        f"strategy, {defaults.strategy!r}, is not there yet, and {_LOSSES[defaults.strategy]}; "
        f"name a strategy to say that this is meant"
    )


def alternatives_note(model: Described) -> str | None:
    """Which strategies a checkpoint of this form may have been made for; None where that is clear.

    LLaDA2.0, LLaDA2.1 and DMax, say, have the same files.
    """
    defaults = model.defaults
    if not defaults.alternatives:
        return None
    return (
        f"the files do not tell whether it was made for {defaults.strategy!r} or for "
        f"{' or '.join(map(repr, defaults.alternatives))}; name a strategy where it was another"
    )


_told: set[tuple[str, str]] = set()


def warn_of_stand_in(model: Model, stacklevel: int = 2) -> None:
    """Say once a process and model that another strategy stands in for the family's.

    Only where the user named no strategy.
    """
    note, key = stand_in_note(model), (model.source, model.defaults.strategy)
    if note is None or key in _told:
        return
    _told.add(key)
    warnings.warn(note, stacklevel=stacklevel + 1)


def resolve_strategy(model: Model, strategy: Any) -> Any:
    """The strategy to run: the family's default for None, its sizes where they are left open."""
    if strategy is None:
        strategy = family_strategy(model, default_strategy(model))
    elif isinstance(strategy, str) and ":" not in strategy:
        strategy = family_strategy(model, strategy)
    strategy = load_strategy(strategy)
    defaults = model.defaults
    sizes = {"block_size": defaults.block_size, "buffer_size": defaults.buffer_size}
    missing = {name: size for name, size in sizes.items() if getattr(strategy, name) is None}
    return strategy.replace(**missing) if missing else strategy


def family_strategy(model: Model, name: str, **overrides: Any) -> Any:
    """The strategy called `name` with the numbers of the model's family, then `overrides`."""
    plain = load_strategy(name)
    defaults = model.defaults
    wanted: dict[str, Any] = {
        "add_block_threshold": defaults.add_block_threshold,
        "semi_complete_threshold": defaults.semi_complete_threshold,
    }
    if name == defaults.strategy or not {name, defaults.strategy} & {*_REVISING}:
        wanted |= {"accept_threshold": defaults.accept_threshold}
    if name == defaults.strategy:
        wanted |= {"edit_threshold": defaults.edit_threshold}
    if plain.needs.prompt.startswith("grid"):  # elsewhere the size is the algorithm's, as AR's 2
        wanted |= {"block_size": defaults.block_size}
    if name == default_strategy(model):
        wanted |= {"buffer_size": defaults.buffer_size}
    known = {k: v for k, v in wanted.items() if hasattr(plain, k)}
    return load_strategy(plain, **{**known, **overrides})


def default_params(model: Model, strategy: Any, **params: Any) -> SamplingParams:
    """Sampling parameters with the family's temperature and top-p where `params` has none.

    Only under the family's own strategy: elsewhere they would change which confidences a threshold
    accepts, and decoding is greedy.
    """
    own = model.defaults.strategy
    if own not in strategy_names() or type(strategy) is not type(load_strategy(own)):
        return SamplingParams(**params)
    usual = {"temperature": model.defaults.temperature, "top_p": model.defaults.top_p}
    return SamplingParams(**usual | params)
