"""Proves that a model decoded with nothing said gets the strategy and sampling its family needs.

`dj.generate`, `LLM` and the command line take the same strategy with the same numbers.
"""

import dataclasses
import warnings
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.api import generate
from dllm_jax.api import strategy as api_strategy
from dllm_jax.api.strategy import check_fit
from dllm_jax.cli import entry, info
from dllm_jax.cli import strategy as cli_strategy
from dllm_jax.cli.engine import sampling_params
from dllm_jax.loading.model import Model
from dllm_jax.models.architecture import arch_of
from dllm_jax.models.families import parse_config
from dllm_jax.models.family import with_d2f_adapter
from dllm_jax.models.family_table import FAMILIES
from dllm_jax.strategies import (
    D2F,
    BlockDiffusion,
    Edit,
    EditIndel,
    FastDLLMV2,
    FullSequence,
    MultiBD,
    Needs,
    as_strategy,
    load_strategy,
)
from tests.contract.models import causal
from tests.oracles.checkpoints import write_tiny
from tests.oracles.tiny_configs import CONFIGS

# A family's own strategy.


def tiny(family, source="", name="", **changes):
    """A model of a family without weights, which no rule here looks at."""
    parsed = parse_config({**CONFIGS[family], "mask_token_id": 47, **changes}, name=name)
    return Model({}, parsed.config, arch_of(parsed.config), parsed.defaults, source=source)


@pytest.fixture(scope="module")
def dream():
    return tiny("dream", source="tests/dream")


def test_ar_refuses_another_window():
    with pytest.raises(ValueError, match="leave both at their defaults, 2 and 1"):
        dj.generate(causal(), [[5, 6]], dj.strategies.AR(block_size=1), max_tokens=4)


@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_is_decoded_by_its_own_strategy(family):
    model = tiny(family)
    chosen = api_strategy.resolve_strategy(model, None)
    assert type(chosen) is type(load_strategy(model.defaults.strategy))
    sizes = {"ar": (2, 1), "full_sequence": (32, 8)}  # the window is the 256 positions there are
    usual = (model.defaults.block_size, 1)
    assert (chosen.block_size, chosen.buffer_size) == sizes.get(model.defaults.strategy, usual)
    check_fit(model, chosen)


def test_a_strategy_nobody_promised_is_an_error():
    model = tiny("sdar", dllm_jax={"strategy": "multi_db"})
    with pytest.raises(ValueError, match="strategy='multi_db' is unknown; use one of ar, block_d"):
        api_strategy.resolve_strategy(model, None)


def test_thresholds_of_a_strategy_that_revises_are_for_that_alone():
    model = tiny("llada2_2")
    own = api_strategy.resolve_strategy(model, None)
    assert own == EditIndel(0.5, 0.0, delete_token_id=48, split_token_id=49)
    assert own == api_strategy.resolve_strategy(model, EditIndel())
    assert api_strategy.resolve_strategy(model, "edit") == Edit()
    stranger = api_strategy.resolve_strategy(model, "multi_bd")
    assert stranger.accept_threshold == MultiBD().accept_threshold
    plain = tiny("llada2")
    assert plain.defaults.accept_threshold == 0.95
    assert api_strategy.resolve_strategy(plain, "edit") == Edit()
    sdar = tiny("sdar", dllm_jax={"accept_threshold": 0.5})
    assert api_strategy.resolve_strategy(sdar, "block_diffusion").accept_threshold == 0.5


def test_fast_dllm_v2_decodes_as_its_card_says():
    # Blocks of 32, sub-blocks of 8, threshold 0.9.
    assert api_strategy.resolve_strategy(tiny("fast_dllm_v2"), None) == FastDLLMV2()


def test_models_of_full_attention_decode_as_their_cards_say(dream):
    llada = api_strategy.resolve_strategy(tiny("llada", max_sequence_length=4096), None)
    assert llada == FullSequence(block_length=32)
    illada = api_strategy.resolve_strategy(tiny("illada", max_position_embeddings=8192), None)
    assert illada == FullSequence(block_length=32, append=True, buffer_size=64)
    chosen = api_strategy.resolve_strategy(dream, None)
    assert chosen == FullSequence(remasking="entropy", buffer_size=8)
    assert api_strategy.default_params(dream, chosen) == USUAL


def test_a_schedules_threshold_is_for_that_alone(dream):
    assert api_strategy.resolve_strategy(dream, "multi_bd").accept_threshold == 0.9
    stranger = api_strategy.resolve_strategy(tiny("sdar"), "full_sequence")
    assert stranger == FullSequence(buffer_size=8)


def test_a_whole_window_is_no_longer_than_the_model():
    model = tiny("llada", max_sequence_length=100)
    assert api_strategy.resolve_strategy(model, "full_sequence").buffer_size == 3
    assert api_strategy.family_strategy(model, "full_sequence", block_size=8).buffer_size == 12
    asked = api_strategy.family_strategy(model, "full_sequence", buffer_size=5)
    with pytest.raises(ValueError, match="160 tokens, more than the model's 100 positions"):
        check_fit(model, asked)


class Asked:
    """An engine that only takes requests."""

    def __init__(self, *_, **__):
        self.requests = []

    def inbox(self):
        return self

    def add(self, request):
        self.requests.append(request)
        return str(len(self.requests))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def __iter__(self):
        return iter(())


@pytest.fixture
def started(monkeypatch):
    """The strategies of every `LLM` made from here on, none of which runs."""
    made = []

    def start(_, strategy, *__, **___):
        made.append(strategy)
        return SimpleNamespace(layout=SimpleNamespace(max_model_len=256))

    monkeypatch.setattr("dllm_jax.api.llm.start", start)
    monkeypatch.setattr("dllm_jax.api.llm.SharedEngine", Asked)
    return made


@pytest.mark.parametrize("sizes", [{}, {"block_size": 32}])
def test_every_entrance_takes_the_familys_own(dream, started, monkeypatch, sizes):
    monkeypatch.setattr(generate, "_generate", lambda _, strategy, *__: strategy)
    own = api_strategy.resolve_strategy(dream, None)
    dj.LLM(dream, **sizes)
    assert started == [own]
    assert cli_strategy.resolve(dream, None, None, {}) == own
    bare = dj.generate(dream, [[5, 6]], max_tokens=99)
    assert bare.replace(accept_threshold=1.0) == own


def test_the_command_line_warns_in_one_line(monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    entry._warn_in_one_line()
    reported = warnings.formatwarning("a\n b", UserWarning, "file.py", 3)
    assert reported == "note: a b\n"
    assert "file.py:3" in warnings.formatwarning("a", RuntimeWarning, "file.py", 3)


def test_a_d2f_adapter_changes_how_the_base_is_decoded():
    base = tiny("llada").defaults
    adapted = with_d2f_adapter(base)
    changed = {"strategy": "d2f", "block_size": 32, "buffer_size": 4, "accept_threshold": 0.95}
    changed |= {"add_block_threshold": 0.1, "semi_complete_threshold": 0.9, "attention": "d2f"}
    changed |= {"remasking": None, "block_length": None}
    assert adapted == dataclasses.replace(base, **changed)
    model = tiny("llada").replace(defaults=adapted)
    assert (
        api_strategy.resolve_strategy(model, None) == D2F()
    )  # its defaults are the published ones


def inspected(folder, capsys):
    assert entry.main(["inspect", str(folder)]) == 0
    reported = capsys.readouterr().out.splitlines()
    return [line.removeprefix("note: ") for line in reported if line.startswith("note: ")]


@pytest.mark.parametrize("family", ["llada", "llada2", "sdar"])
def test_inspect_tells_how_a_checkpoint_is_decoded(family, tmp_path, capsys):
    note = api_strategy.alternatives_note(tiny(family))
    assert (note is not None) == (family == "llada2")
    assert inspected(write_tiny(family, tmp_path), capsys) == ([note] if note else [])
    assert note is None or note.startswith(
        "the files do not tell whether it was made for 'multi_bd' or for 'edit' or 'dmax'; "
    )


def test_info_has_a_line_for_every_family():
    lines = info._families()
    assert lines.keys() == {*(row.name for row in FAMILIES), "llada2, 2.2", "dflash"}
    assert lines["dream"] == (
        "full_sequence, block 32, buffer 16, accept 1, remasking entropy, temperature 0.2, "
        "top-p 0.95, trained full, shifted, mask 151666, stops 151643 151645, class DreamModel"
    )
    assert lines["llada2"].startswith("multi_bd, block 32, buffer 1, accept 0.95, temperature 0, ")
    assert ", or edit or dmax, " in lines["llada2"]
    assert lines["llada2, 2.2"].startswith(
        "edit_indel, block 32, buffer 1, accept 0.5, edit 0, temperature 0, "
    )


# Sampling where nobody asks for any.


def command(*words):
    return entry.parse(["generate", "--model", "x", *words])


@pytest.fixture
def own():
    """A model whose own strategy is there, with sampling of its own."""
    return tiny("sdar", dllm_jax={"temperature": 0.2, "top_p": 0.95})


USUAL = dj.SamplingParams(temperature=0.2, top_p=0.95)


def test_sampling_is_the_familys_where_nothing_is_said(own):
    assert api_strategy.default_params(own, MultiBD()) == USUAL
    assert sampling_params(command(), own, MultiBD()) == USUAL
    asked = sampling_params(command("--temperature", "0", "--top-p", "1"), own, MultiBD())
    assert asked == dj.SamplingParams(temperature=0.0, top_p=1.0)
    assert api_strategy.default_params(tiny("sdar"), MultiBD()) == dj.SamplingParams()


def test_sampling_is_greedy_under_another_strategy(own, dream):
    assert (dream.defaults.temperature, dream.defaults.top_p) == (0.2, 0.95)
    assert api_strategy.default_params(own, BlockDiffusion()) == dj.SamplingParams()
    for strategy in (MultiBD(), BlockDiffusion(), as_strategy(lambda _, state: state)):
        assert api_strategy.default_params(dream, strategy) == dj.SamplingParams()
        assert sampling_params(command(), dream, strategy) == dj.SamplingParams()


def test_llm_samples_as_the_family_does(own, started):
    llm = dj.LLM(own)
    llm.generate([[5, 6], [7, 8]], use_tqdm=False)
    llm.stream([5, 6])
    llm.generate([[5, 6]], dj.SamplingParams(), use_tqdm=False)
    *unsaid, said = [request.params for request in llm.engine.requests]
    assert unsaid == [USUAL] * 3
    assert said == dj.SamplingParams()


# LLaDA2.2 routes four tokens together here, and has two ids that are edits.


@pytest.fixture(scope="module")
def routed():
    return tiny("llada2_2")


def test_blocks_of_denoising_hold_whole_blocks_of_routing(routed):
    check_fit(routed, MultiBD(block_size=8, buffer_size=2))
    with pytest.raises(ValueError, match=r"block_size=6 must be a multiple of 4.*; use 32"):
        check_fit(routed, MultiBD(block_size=6, buffer_size=1))
    with pytest.raises(ValueError, match=r"block_size=6 must be a multiple of 4.*; use 32"):
        dj.LLM(routed, BlockDiffusion(block_size=6), warm_up=False)


@pytest.mark.parametrize("prompt", ["whole_causal", "whole_full", "in_window"])
def test_prompts_that_split_blocks_of_routing_are_refused(routed, prompt):
    split = as_strategy(lambda _, state: state, block_size=4, buffer_size=1, needs=Needs(prompt))
    with pytest.raises(ValueError, match=f"takes the prompt in as '{prompt}'.* 4 tokens.*'edit_in"):
        check_fit(routed, split)


def test_logits_want_whole_blocks_of_routing(routed):
    with pytest.raises(ValueError, match=r"6 tokens long; blocks of 4 .* give a multiple of that"):
        routed.logits(jnp.ones((1, 6), jnp.int32))


def test_ids_that_are_edits_are_never_drawn(routed):
    never = routed.forbidden(jnp.arange(52))
    assert np.flatnonzero(never).tolist() == [47, 48, 49, 50, 51]
    never = routed.forbidden(jnp.arange(52), allow=(47, 48, 49, 50))
    assert np.flatnonzero(never).tolist() == [47, 50, 51], "no mask, and no row without a token"


def test_edits_that_move_text_want_their_ids():
    with pytest.raises(
        ValueError, match=r"EditIndel deletes and inserts by two ids.*sdar has none"
    ):
        check_fit(tiny("sdar"), EditIndel())


@pytest.mark.long
def test_edits_that_move_text_hold_no_grammar_and_no_tokens_behind_a_hole(tmp_path):
    llm = dj.LLM(str(write_tiny("llada2_2", tmp_path)), warm_up=False, max_num_seqs=1)
    wanted = dj.SamplingParams(constraint=dj.Regex("[0-9]+"))
    with pytest.raises(ValueError, match="EditIndel with these fields takes no constraint"):
        llm.generate([[5, 6]], wanted, use_tqdm=False)
    with pytest.raises(ValueError, match="EditIndel does not see what stands behind a hole"):
        llm.infill([5, 6], [7, 8])
