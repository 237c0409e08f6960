"""Every family's tensors arrive bit for bit where the network reads them, however they are stored.

The expected leaves are built here one head and one expert at a time from the definition of the
layout, not with the tables under test. Then: shards, layouts of the experts, types, Orbax and back,
export and back; and every way a family's own files can contradict its config is named.
"""

import json
import re

import jax
import ml_dtypes
import numpy as np
import pytest

from checkpoints_convert import convert, export_hf, load_params
from tests.golden.folders import read_config, read_tensors, write_tensors
from tests.oracles.checkpoints import has_experts, write_tiny
from tests.oracles.tiny_configs import CONFIGS
from tests.test_convert import assert_same

FAMILIES = sorted(CONFIGS)
ROUTED = ["sdar_moe", "qwen3_moe", "llada2", "llada2_2"]
LLADA = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ff_norm",
    "self_attn.o_proj": "attn_out",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
}


class Tiny:
    """A written checkpoint's config and tensors, under Llama's names where those have any."""

    def __init__(self, folder):
        self.config = config = read_config(folder)
        self.tensors = read_tensors(folder)
        self.is_llada = "d_model" in config
        self.is_fused = config["architectures"] == ["LLaDA2MoeModelLM"]
        self.heads = config["n_heads" if self.is_llada else "num_attention_heads"]
        self.groups = config["n_kv_heads" if self.is_llada else "num_key_value_heads"]
        self.width = config["d_model" if self.is_llada else "hidden_size"]
        self.layers = config["n_layers" if self.is_llada else "num_hidden_layers"]
        self.size = config.get("head_dim") or self.width // self.heads
        self.tied = config["weight_tying" if self.is_llada else "tie_word_embeddings"]

    def end(self, name):
        """A tensor outside of the layers: "embed", "norm" or "head"."""
        if self.is_llada:
            name = {"embed": "wte", "norm": "ln_f", "head": "ff_out"}[name]
            return self.tensors[f"model.transformer.{name}.weight"]
        embed = "word_embeddings" if self.is_fused else "embed_tokens"
        return self.tensors[
            {
                "embed": f"model.{embed}.weight",
                "norm": "model.norm.weight",
                "head": "lm_head.weight",
            }[name]
        ]

    def get(self, i, name, kind="weight"):
        """A tensor of layer i, None where it has none."""
        if self.is_llada:
            name = LLADA.get(name, name)
            return self.tensors.get(f"model.transformer.blocks.{i}.{name}.{kind}")
        return self.tensors.get(f"model.layers.{i}.{name}.{kind}")

    def rows(self, i, which, head, kind="weight"):
        """The rows of one query, key or value head; None where there is no such tensor."""
        if self.is_fused:
            head += {"q": 0, "k": self.heads, "v": self.heads + self.groups}[which]
            tensor = self.get(i, "attention.query_key_value", kind)
        else:
            tensor = self.get(
                i, f"{which}_proj" if self.is_llada else f"self_attn.{which}_proj", kind
            )
        return None if tensor is None else tensor[head * self.size : (head + 1) * self.size]

    def attention(self, i):
        n = self.heads // self.groups
        dtype = self.end("embed").dtype
        layer = {
            "attn_norm": self.get(i, "input_layernorm"),
            "mlp_norm": self.get(i, "post_attention_layernorm"),
            "wqkv": np.zeros((self.width, self.groups, n + 2, self.size), dtype),
            "wo": np.zeros((self.heads, self.size, self.width), dtype),
        }
        if self.rows(i, "q", 0, "bias") is not None:
            layer["bqkv"] = np.zeros((self.groups, n + 2, self.size), dtype)
        for group in range(self.groups):
            members = [("q", group * n + member) for member in range(n)]
            for slot, (which, head) in enumerate([*members, ("k", group), ("v", group)]):
                layer["wqkv"][:, group, slot] = self.rows(i, which, head).T
                if "bqkv" in layer:
                    layer["bqkv"][group, slot] = self.rows(i, which, head, "bias")
        out = "attention.dense" if self.is_fused else "self_attn.o_proj"
        for head in range(self.heads):
            columns = slice(head * self.size, (head + 1) * self.size)
            layer["wo"][head] = self.get(i, out)[:, columns].T
        if self.get(i, out, "bias") is not None:
            layer["bo"] = self.get(i, out, "bias")
        query = "attention.query_layernorm" if self.is_fused else "self_attn.q_norm"
        if self.get(i, query) is not None:
            key = "attention.key_layernorm" if self.is_fused else "self_attn.k_norm"
            layer |= {"q_norm": self.get(i, query), "k_norm": self.get(i, key)}
        return layer

    def swiglu(self, i, at):
        gate, up = self.get(i, f"{at}gate_proj"), self.get(i, f"{at}up_proj")
        return np.stack([gate.T, up.T], axis=1), self.get(i, f"{at}down_proj").T

    def feed_forward(self, i):
        if not has_experts(self.config, i):
            gate_up, down = self.swiglu(i, "mlp.")
            return {"w_gate_up": gate_up, "w_down": down}
        both = [self.swiglu(i, f"mlp.experts.{e}.") for e in range(self.config["num_experts"])]
        layer = {
            "router": self.get(i, "mlp.gate").T,
            "experts_gate_up": np.stack([gate_up for gate_up, _ in both]),
            "experts_down": np.stack([down for _, down in both]),
        }
        if self.get(i, "mlp.gate", "expert_bias") is not None:
            layer["router_bias"] = self.get(i, "mlp.gate", "expert_bias").astype(np.float32)
        if self.get(i, "mlp.shared_experts.gate_proj") is not None:
            layer["shared_gate_up"], layer["shared_down"] = self.swiglu(i, "mlp.shared_experts.")
        return layer

    def tree(self):
        return {
            "embed": self.end("embed"),
            **({} if self.tied else {"lm_head": self.end("head")}),
            "final_norm": self.end("norm"),
            "layers": [self.attention(i) | self.feed_forward(i) for i in range(self.layers)],
        }


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Tiny folders by what they were written with, each written once; not to be changed."""
    made = {}

    def write(family, **options):
        key = json.dumps([family, options], sort_keys=True)
        if key not in made:
            made[key] = write_tiny(family, tmp_path_factory.mktemp(family) / "model", **options)
        return made[key]

    return write


# What differs from the plain form: by family, else under "all".
VARIANTS = [
    *((family, {}) for family in FAMILIES),
    *((family, {"dtype": "bfloat16", "bias_dtype": "bfloat16"}) for family in FAMILIES),
    *((family, {"tie_word_embeddings": True}) for family in ("fast_dllm_v2", "sdar_moe", "llada2")),
    ("llada", {"weight_tying": True}),
    ("llada", {"include_qkv_bias": True, "n_kv_heads": 2}),
    ("llada", {"mlp_hidden_size": 96}),  # a block's ff_out has the shape of the head
    ("llada2", {"use_qkv_bias": True, "use_bias": True}),
    ("llada2", {"num_shared_experts": 2, "first_k_dense_replace": 2}),
    ("llada2", {"moe_router_enable_expert_bias": False, "num_shared_experts": 0}),
    ("sdar_moe", {"mlp_only_layers": [1]}),
    ("qwen3", {"attention_bias": True}),
]


@pytest.mark.parametrize(("family", "options"), VARIANTS, ids=str)
def test_every_leaf_is_where_the_layout_says(family, options, tiny):
    folder = tiny(family, **options)
    params, report = load_params(folder)
    assert report.is_ok
    assert_same(params, Tiny(folder).tree())


@pytest.mark.parametrize("shards", ["round_robin", "layers"])
@pytest.mark.parametrize("family", FAMILIES)
def test_shards_change_nothing(family, shards, tiny):
    folder = tiny(family, shards=shards)
    assert len(list(folder.glob("*.safetensors"))) >= 3
    assert_same(load_params(folder)[0], load_params(tiny(family))[0])


@pytest.mark.parametrize("experts", ["merged", "packed"])
@pytest.mark.parametrize("shards", [None, "round_robin"])
@pytest.mark.parametrize("family", ROUTED)
def test_layouts_of_experts_give_the_same(family, shards, experts, tiny):
    folder = tiny(family, experts=experts, shards=shards)
    assert not any(re.search(r"experts\.\d", name) for name in read_tensors(folder))
    assert_same(load_params(folder)[0], load_params(tiny(family))[0])


def test_the_other_name_of_the_experts_bias_is_read(tmp_path, tiny):
    folder = write_tiny("llada2", tmp_path / "model")
    tensors = read_tensors(folder)
    renamed = {n.replace("expert_bias", "e_score_correction_bias"): t for n, t in tensors.items()}
    assert renamed.keys() != tensors.keys()
    write_tensors(folder, renamed)
    assert_same(load_params(folder)[0], load_params(tiny("llada2"))[0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_experts_bias_is_float32_whatever_the_type(dtype, tiny, tmp_path):
    exact = load_params(tiny("llada2"), "float32")[0]
    for source in (tiny("llada2"), convert(tiny("llada2"), tmp_path / "converted", "float32")):
        params, _ = load_params(source, dtype)
        for layer, wanted in zip(params["layers"][1:], exact["layers"][1:], strict=True):
            assert layer["router_bias"].dtype == np.float32
            assert layer["router"].dtype == np.dtype(dtype)
            assert layer["router_bias"].tobytes() == wanted["router_bias"].tobytes()
    rounded = tiny("llada2", bias_dtype="bfloat16")
    stored = read_tensors(rounded)["model.layers.1.mlp.gate.expert_bias"]
    assert stored.dtype == ml_dtypes.bfloat16
    bias = load_params(rounded, dtype)[0]["layers"][1]["router_bias"]
    assert bias.tobytes() == stored.astype(np.float32).tobytes()


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_converted_folder_restores_bit_for_bit(family, dtype, tiny, tmp_path):
    direct, report = load_params(tiny(family), dtype)
    folder = convert(tiny(family), tmp_path / "converted", dtype)
    back, again = load_params(folder)
    assert_same(back, direct)
    assert again.num_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(direct))
    assert (again.kind, again.family, again.config, again.defaults) == (
        "converted",
        report.family,
        report.config,
        report.defaults,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_export_writes_back_what_was_read(family, tiny, tmp_path):
    source = tiny(family, dtype="bfloat16")
    params, report = load_params(source)
    folder = export_hf(params, report.config, tmp_path, family=report.family)
    ours, theirs = read_tensors(folder), read_tensors(source)
    assert sorted(ours) == sorted(theirs)
    for name, tensor in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape), name
        assert ours[name].tobytes() == tensor.tobytes(), name
    back, again = load_params(folder)
    assert again.config == report.config
    assert_same(back, params)
