"""How a model is decoded where nobody says how: its strategy, the numbers of it, sampling.

`dj.generate`, `LLM` and every verb of the command line ask here, so they agree. Nothing here runs a
model.
"""

from typing import Any, Protocol

from dllm_jax.api.drafts import refuse_draft
from dllm_jax.engine.requests import SamplingParams
from dllm_jax.loading.model import Model
from dllm_jax.models.families import FamilyDefaults
from dllm_jax.strategies.core.resolve import load_strategy, strategy_names

# Whose accept threshold is their own: low where what was accepted is revised, 1 where a schedule
# decides. It means nothing to another strategy, nor does another's to them.
_OWN_THRESHOLD = ("edit", "dmax", "full_sequence")
# What a model that decodes token by token does with a draft.
_TOKEN_BY_TOKEN, _DRAFTED = "ar", "dflash"


class Described(Protocol):
    """What is asked of a model here, which a report on a checkpoint has as well."""

    @property
    def defaults(self) -> FamilyDefaults:
        """How the family is decoded when nothing is said."""
        ...


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


def usual_strategy(model: Described, draft: Any = None) -> str:
    """The name of the strategy where nobody names one: the family's.

    Args:
        draft: What is given as a draft, None for nothing. With one, `dflash` takes the place of
            `ar`; another strategy stays and then refuses the draft, which it could not use.
    """
    own = model.defaults.strategy
    return _DRAFTED if draft is not None and own == _TOKEN_BY_TOKEN else own


def resolve_strategy(model: Model, strategy: Any, draft: Any = None) -> Any:
    """The strategy to run: the usual one for None, its sizes where they are left open.

    Args:
        draft: As of `usual_strategy`.
    """
    refuse_draft(model)
    if strategy is None:
        strategy = family_strategy(model, usual_strategy(model, draft))
    elif isinstance(strategy, str) and ":" not in strategy:
        strategy = family_strategy(model, strategy)
    strategy = load_strategy(strategy)
    defaults = model.defaults
    sizes = {"block_size": defaults.block_size, "buffer_size": defaults.buffer_size}
    missing = {name: size for name, size in sizes.items() if getattr(strategy, name) is None}
    return strategy.replace(**missing) if missing else strategy


def family_strategy(model: Model, name: str, **overrides: Any) -> Any:
    """The strategy called `name` with the numbers of the model's family, then `overrides`."""
    refuse_draft(model)
    plain = load_strategy(name)
    defaults = model.defaults
    wanted: dict[str, Any] = {
        "add_block_threshold": defaults.add_block_threshold,
        "semi_complete_threshold": defaults.semi_complete_threshold,
    }
    if name == defaults.strategy or not {name, defaults.strategy} & {*_OWN_THRESHOLD}:
        wanted |= {"accept_threshold": defaults.accept_threshold}
    if plain.needs.prompt.startswith("grid"):  # elsewhere the size is the algorithm's, as AR's 2
        wanted |= {"block_size": defaults.block_size}
    if name == defaults.strategy:
        of_one = ("edit_threshold", "remasking", "block_length")
        told = {key: getattr(defaults, key) for key in of_one}
        wanted |= {"buffer_size": defaults.buffer_size}
        wanted |= {key: value for key, value in told.items() if value is not None}
    known = {k: v for k, v in wanted.items() if hasattr(plain, k)}
    strategy = load_strategy(plain, **{**known, **overrides})
    if plain.needs.prompt == "in_window" and "buffer_size" not in overrides:
        # The window is all of a text here: the usual one, or what the model has positions for.
        most = max(1, model.config.max_position // (strategy.block_size or defaults.block_size))
        strategy = strategy.replace(buffer_size=min(strategy.buffer_size or most, most))
    return strategy


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
