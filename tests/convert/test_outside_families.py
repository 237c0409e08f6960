"""A family from outside is a value: `--family FILE:NAME` and `dj.load(family=)` use it everywhere.

The worked example is loaded, decoded and converted by Python and by the command line, and
`check_family` passes it and names what is wrong with each of its mutants.
"""

import dataclasses
import json

import numpy as np
import pytest
from safetensors.numpy import save_file

import dllm_jax as dj
from dllm_jax.cli.entry import main
from dllm_jax.convert import convert, inspect
from dllm_jax.convert.rules import placements, tensor_shapes
from dllm_jax.convert.tensor_names import LLAMA
from dllm_jax.convert.testing import check_family
from dllm_jax.models.architecture import DENSE
from dllm_jax.models.families import parse_config
from dllm_jax.strategies.core.resolve import load_object

SPEC = "examples/my_family.py:FAMILY"
FAMILY, CONFIG, REFERENCE = (
    load_object(f"examples/my_family.py:{name}", "family")
    for name in ("FAMILY", "CONFIG", "reference")
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of the example."""
    made, rng = tmp_path_factory.mktemp("pebble"), np.random.default_rng(1)
    shapes = DENSE.param_shapes(parse_config(CONFIG, family=FAMILY).config, np.float32)
    names = tensor_shapes(placements(FAMILY.table.rules_for(), shapes))
    tensors = {n: rng.normal(size=s, scale=0.3).astype("float32") for n, s in names.items()}
    save_file(tensors, made / "model.safetensors")
    (made / "config.json").write_text(json.dumps(CONFIG))
    return made


def test_50_3_the_example_is_right():
    check_family(SPEC, CONFIG, REFERENCE)


SWAPPED = {
    "blocks.{i}.gate.weight": "blocks.{i}.up.weight",
    "blocks.{i}.up.weight": "blocks.{i}.gate.weight",
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda rules: [r for r in rules if ".k." not in r.pattern],
            "layers.0.wqkv have no tensor",
        ),
        (lambda rules: [*rules, rules[0]], "elements of embed have several tensors"),
        (
            lambda rules: [
                dataclasses.replace(rule, pattern=SWAPPED.get(rule.pattern, rule.pattern))
                for rule in rules
            ],
            "logits under a full mask differ by",
        ),
    ],
)
def test_50_3_what_is_wrong_with_a_family_is_named(change, words):
    table = dataclasses.replace(FAMILY.table, rules=tuple(change(FAMILY.table.rules)))
    with pytest.raises(AssertionError, match=words):
        check_family(dataclasses.replace(FAMILY, tensors=table), CONFIG, REFERENCE)


def test_50_3_names_of_no_tensor_are_refused():
    with pytest.raises(ValueError, match=r"x\.weight: no such name to change"):
        LLAMA.renamed({"x.weight": "y.weight"})


def test_50_3_a_folder_is_loaded_and_converted(folder, tmp_path):
    model = dj.load(folder, family=FAMILY)
    assert (model.defaults.family, model.config.mask_token_id) == ("pebble", 63)
    out = dj.generate(model, [[5, 6, 7]], max_tokens=8)
    assert int(out.length[0]) == 8 or int(out.finish[0])
    made = convert(folder, tmp_path / "converted", "float32", family=FAMILY)
    again = dj.load(made, family=SPEC)
    for name, leaf in model.params["layers"][1].items():
        np.testing.assert_array_equal(leaf, again.params["layers"][1][name])
    assert "family 'pebble' is unknown" in inspect(made).problems[0]
    assert (
        "architecture 'PebbleForMaskedLM' (model_type None) is unknown"
        in (inspect(folder).problems[0])
    )


def test_50_3_verbs_take_the_flag(folder, tmp_path, capsys):
    assert main(["inspect", str(folder), "--json", "--family", SPEC]) == 0
    assert json.loads(capsys.readouterr().out)["family"] == "pebble"
    assert main(["convert", str(folder), str(tmp_path / "made"), "--family", SPEC]) == 0
    assert main(["generate", "x", "--model", str(folder), "--family", SPEC]) == 1
    assert "has no tokenizer" in capsys.readouterr().err  # so the weights are loaded


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("missing.py:FAMILY", "family file 'missing.py' does not exist; check the path"),
        ("examples/my_family.py:FAMILLY", "did you mean 'FAMILY'?"),
        ("examples/my_family.py:CONFIG", "is of type dict; give a Family"),
        ("no_such_module_x:FAMILY", "cannot import no_such_module_x"),
    ],
)
def test_50_3_what_is_no_family_is_one_line(folder, capsys, spec, words):
    assert main(["inspect", str(folder), "--family", spec]) == 2
    text = capsys.readouterr().err
    assert words in text
    assert text.count("\n") == 1


def test_50_3_drawn_weights_have_a_family_of_ours():
    with pytest.raises(ValueError, match="family='x:Y': the weights of"):
        dj.load("random:JetLM/SDAR-1.7B-Chat", family="x:Y")
