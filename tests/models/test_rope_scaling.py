"""YaRN's frequencies and its factor of what is rotated are those of transformers, told in any way.

The numbers are those of `transformers.modeling_rope_utils` 5.23 (`_compute_yarn_parameters`, run
with torch 2.13 on the entries below); llama3's are held by test_family_logits.py, and a drafter
with YaRN by test_draft_model.py.
"""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax.models.families import ConfigError, config_from_json, config_json, parse_config
from dllm_jax.models.layers import YarnScaling, rope_tables
from tests.oracles.tiny_configs import CONFIGS

# Entries of a config, the factor, frequencies of the pairs.
TOLD = {
    "as Qwen3's cards ask": (
        {
            "head_dim": 16,
            "rope_theta": 10000.0,
            "max_position_embeddings": 256,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
        1.138629436111989,
        "1.0 0.23717081546783447 0.04999999701976776 0.007905694656074047 "
        "0.0024999999441206455 0.0007905694656074047 0.0002500000118743628 "
        "7.905694656074047e-05",
    ),
    "with betas and scales of attention": (
        {
            "head_dim": 32,
            "rope_theta": 1e6,
            "max_position_embeddings": 4096,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 512,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "mscale": 0.7,
                "mscale_all_dim": 0.4,
            },
        },
        1.0575928109100559,
        "1.0 0.4216965138912201 0.13892807066440582 0.04218154773116112 "
        "0.010870330035686493 0.0016669018659740686 0.0007029266562312841 "
        "0.00029642172739841044 0.0001250000059371814 5.271206100587733e-05 "
        "2.2228492525755428e-05 9.373678039992228e-06 3.9528467823402025e-06 "
        "1.6669017668391461e-06 7.029266839708725e-07 2.964217173939687e-07",
    ),
    "with a factor of its own, ends within pairs, in the new spelling": (
        {
            "head_dim": 32,
            "rope_theta": ...,
            "max_position_embeddings": 4096,
            "rope_scaling": ...,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 5e5,
                "factor": 2.5,
                "original_max_position_embeddings": 1024,
                "attention_factor": 1.25,
                "truncate": False,
            },
        },
        1.25,
        "1.0 0.44036662578582764 0.19350522756576538 0.07308797538280487 "
        "0.026845945045351982 0.009470694698393345 0.003135116072371602 "
        "0.0012845784658566117 0.0005656853900291026 0.00024910896900109947 "
        "0.00010969927097903565 4.8307898396160454e-05 2.127318293787539e-05 "
        "9.36800006456906e-06 4.12535382565693e-06 1.8166682593800942e-06",
    ),
    "of a length that is not said": (
        {
            "head_dim": 16,
            "rope_theta": 10000.0,
            "max_position_embeddings": 128,
            "rope_scaling": {"type": "yarn", "factor": 2.0},
        },
        1.0693147180559945,
        "1.0 0.263523131608963 0.06666666269302368 0.015811389312148094 "
        "0.004999999888241291 0.0015811389312148094 0.0005000000237487257 "
        "0.00015811389312148094",
    ),
}


def parse(**changes):
    config = {**CONFIGS["qwen3"], **changes}
    return parse_config({key: value for key, value in config.items() if value is not ...})


@pytest.mark.parametrize("name", TOLD)
def test_tables_hold_transformers_frequencies_and_factor(name):
    changes, factor, frequencies = TOLD[name]
    config = parse(**changes).config
    positions = np.array([[0, 1, 7, 100]])
    cos, sin = rope_tables(
        jnp.asarray(positions), config.head_dim, config.rope_theta, config.rope_scaling
    )
    angle = positions[..., None] * np.array(frequencies.split(), np.float64)
    np.testing.assert_allclose(cos, factor * np.cos(angle), rtol=0, atol=2e-5)
    np.testing.assert_allclose(sin, factor * np.sin(angle), rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", TOLD)
def test_a_scaling_comes_back_from_both_forms(name):
    parsed = parse(**TOLD[name][0])
    assert isinstance(parsed.config.rope_scaling, YarnScaling)
    stored = json.loads(json.dumps(dataclasses.asdict(parsed.config)))
    assert config_from_json("qwen3", stored) == parsed.config
    assert parse_config(config_json("qwen3", parsed.config)).config == parsed.config


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"factor": None}, "factor=None must be a positive number"),
        ({"factor": 0.5}, "factor=0.5 must be at least 1"),
        ({"beta_fast": 1, "beta_slow": 2}, "beta_fast=1.0 above beta_slow=2.0"),
        ({"original_max_position_embeddings": 0.5}, "original_max_position_embeddings=0.5 whole"),
        ({"truncate": "no"}, "truncate='no' must be true or false"),
        ({"mscale": "big"}, "mscale='big' must be a positive number"),
    ],
)
def test_what_cannot_be_is_refused(entry, words):
    with pytest.raises(ConfigError) as caught:
        parse(rope_scaling={"rope_type": "yarn", "factor": 4.0, **entry})
    assert words in str(caught.value)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    ("stated", "scaling", "longest"),
    [
        (40960, {"factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        (32768, {"factor": 4.0}, 131072),  # the length before it, as transformers reads it
        (163840, {"factor": 40, "original_max_position_embeddings": 4096}, 163840),
        (65536, {"factor": 1.5, "original_max_position_embeddings": 32768}, 65536),
        (40960, None, 40960),
    ],
)
def test_14_yarns_factor_counts_for_the_models_length(stated, scaling, longest):
    for name in ("rope_scaling", "rope_parameters"):
        entry = scaling and {"rope_type": "yarn", "rope_theta": 1e6, **scaling}
        config = {**CONFIGS["qwen3"], "max_position_embeddings": stated, name: entry}
        cfg = parse_config(config).config
        assert cfg.max_position == longest
        assert parse_config(config_json("qwen3", cfg)).config == cfg
    three = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    three |= {"rope_type": "llama3", "original_max_position_embeddings": 8192}
    config = {**CONFIGS["qwen3"], "max_position_embeddings": stated, "rope_scaling": three}
    assert parse_config(config).config.max_position == stated
