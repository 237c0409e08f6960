"""Makes `families.npz`: what transformers says of a tiny checkpoint of every family.

Run by hand where torch is installed (the `oracle` extra); the tests read its output without torch:

    python -m tests.golden.make_family_golden

Each family is computed by the class of transformers nearest to it, as its own code came from there:
the tensors are renamed to that class's, the config's entries handed over one by one. Only LLaDA2.2
has no such class but where its capacity excludes nothing. Stored are, for each case, `ids` and
float32 logits under full, block-causal (4) and causal masks.
"""

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from tests.golden.family_cases import BLOCK, CASES, LENGTH, MASKS, write_case

HERE = Path(__file__).parent
CLASSES = {  # architectures[0] -> the class of transformers
    "LLaDAModelLM": "Llama",
    "DreamModel": "Qwen2",
    "DreamForCausalLM": "Qwen3",
    "StableDiffcoderForCausalLM": "Llama",
    "Fast_dLLM_QwenForCausalLM": "Qwen2",
    "SDARForCausalLM": "Qwen3",
    "SDARMoeForCausalLM": "Qwen3Moe",
    "LLaDA2MoeModelLM": "Glm4Moe",
    "Qwen3ForCausalLM": "Qwen3",
    "Qwen3MoeForCausalLM": "Qwen3Moe",
    "LlamaForCausalLM": "Llama",
    "ILLaDAForCausalLM": "Llama",
    "A2DLlamaLMHeadModel": "Llama",
    "A2DQwen2LMHeadModel": "Qwen2",
    "Qwen2ForCausalLM": "Qwen2",
    "A2DQwen3LMHeadModel": "Qwen3",
    "LLaDAMoEModelLM": "Qwen3Moe",
}
SAME = (  # config entries that mean the same in both
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
    "n_group",
    "topk_group",
    "routed_scaling_factor",
    "first_k_dense_replace",
)
LLADA_CONFIG = {  # LLaDA's entry -> transformers'
    "embedding_size": "vocab_size",
    "d_model": "hidden_size",
    "mlp_hidden_size": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "max_sequence_length": "max_position_embeddings",
    "weight_tying": "tie_word_embeddings",
    "activation_type": "hidden_act",
}
LLADA_MOE_CONFIG = {
    "dense_intermediate_size": "intermediate_size",
    "expert_intermediate_size": "moe_intermediate_size",
}
LLADA_NAMES = (
    (r"^model\.transformer\.wte\.", "model.embed_tokens."),
    (r"^model\.transformer\.ln_f\.", "model.norm."),
    (r"^model\.transformer\.ff_out\.", "lm_head."),
    (r"^model\.transformer\.blocks\.(\d+)\.", r"model.layers.\1."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ff_norm\.", ".post_attention_layernorm."),
    (r"\.attn_out\.", ".self_attn.o_proj."),
    (r"\.([qkv])_proj\.", r".self_attn.\1_proj."),
    (r"\.ff_proj\.", ".mlp.gate_proj."),
    (r"\.up_proj\.", ".mlp.up_proj."),
    (r"\.ff_out\.", ".mlp.down_proj."),
)
LLADA2_NAMES = (
    (r"word_embeddings", "embed_tokens"),
    (r"\.attention\.", ".self_attn."),
    (r"query_layernorm", "q_norm"),
    (r"key_layernorm", "k_norm"),
    (r"self_attn\.dense", "self_attn.o_proj"),
    (r"expert_bias", "e_score_correction_bias"),
)


def network(folder: Path) -> Any:
    """The checkpoint in the class of transformers that computes its family, in float32."""
    published = json.loads((folder / "config.json").read_text())
    name = CLASSES[published["architectures"][0]]
    state = named_for(name, published, load_file(folder / "model.safetensors"))
    config = getattr(transformers, name + "Config")(**config_for(name, published))
    config._attn_implementation = "eager"
    model = getattr(transformers, name + "ForCausalLM")(config).float().eval()
    missing, unexpected = model.load_state_dict(state, strict=False)
    tied = ["lm_head.weight"] if config.tie_word_embeddings else []
    if unexpected or missing != tied:
        raise ValueError(f"{folder.name}: {missing=} {unexpected=}; mend the names above")
    model.tie_weights()
    return model


def config_for(name: str, published: dict[str, Any]) -> dict[str, Any]:
    """The published facts as the class's config takes them."""
    names = LLADA_CONFIG | LLADA_MOE_CONFIG
    renamed = {names.get(key, key): value for key, value in published.items()}
    config = {key: renamed[key] for key in SAME if key in renamed}
    if "moe_layer_freq" in published:  # LLaDA-MoE, whose class never norms
        dense = [i for i, flag in enumerate(published["moe_layer_freq"]) if not flag]
        head = {"head_dim": published["hidden_size"] // published["num_attention_heads"]}
        config |= head | {"mlp_only_layers": dense, "norm_topk_prob": False}
    rope = dict(published.get("rope_scaling") or {"rope_type": "default"})
    rope["rope_theta"] = float(published["rope_theta"])
    if name == "Glm4Moe":
        share = published["rotary_dim"] / published["head_dim"]
        rope["partial_rotary_factor"] = config["partial_rotary_factor"] = share
        config["n_routed_experts"] = config.pop("num_experts")
        config["n_shared_experts"] = published["num_shared_experts"]
        config["use_qk_norm"] = True
        if published.get("expert_capacity"):
            config |= {"n_group": 1, "topk_group": 1}
    return {**config, "rope_parameters": rope}


def named_for(
    name: str, published: dict[str, Any], tensors: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The tensors under the class's names: fused projections cut up, experts packed."""
    table = {"LLaDAModelLM": LLADA_NAMES, "LLaDA2MoeModelLM": LLADA2_NAMES}
    state = {}
    for key, tensor in tensors.items():
        for pattern, to in table.get(published["architectures"][0], ()):
            key = re.sub(pattern, to, key)
        state[key] = tensor
    for key in [key for key in state if "query_key_value" in key]:
        sizes = (published["num_attention_heads"], *2 * (published["num_key_value_heads"],))
        parts = state.pop(key).split([n * published["head_dim"] for n in sizes])
        for letter, part in zip("qkv", parts, strict=True):
            state[key.replace("query_key_value", letter + "_proj")] = part
    return with_packed_experts(state) if name in ("Glm4Moe", "Qwen3Moe") else state


def with_packed_experts(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A layer's experts in two tensors, as transformers holds them: [E, 2 F, D] and [E, D, F]."""
    packed = {key: tensor for key, tensor in state.items() if ".experts." not in key}
    for at in {key.split("experts.")[0] for key in state if ".experts." in key}:
        numbers = {int(key.split(".")[5]) for key in state if key.startswith(at + "experts.")}
        gate_up, down = [], []
        for e in sorted(numbers):
            gate, up, out = (
                state[f"{at}experts.{e}.{m}_proj.weight"] for m in ("gate", "up", "down")
            )
            gate_up.append(torch.cat([gate, up]))
            down.append(out)
        packed[at + "experts.gate_up_proj"] = torch.stack(gate_up)
        packed[at + "experts.down_proj"] = torch.stack(down)
    return packed


def blocked(kind: str) -> Tensor:
    """What is added to the scores: nothing where a query sees a key, else the least float."""
    sees = {
        "full": lambda query, key: True,
        "causal": lambda query, key: key <= query,
        "block_causal": lambda query, key: key // BLOCK <= query // BLOCK,
    }[kind]
    rows = [
        [0.0 if sees(i, j) else torch.finfo().min for j in range(LENGTH)] for i in range(LENGTH)
    ]
    return torch.tensor(rows)[None, None]


def main() -> None:
    arrays = {}
    for seed, name in enumerate(CASES):
        with tempfile.TemporaryDirectory() as folder:
            model = network(write_case(name, Path(folder) / name))
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, model.config.vocab_size, (1, LENGTH), generator=generator)
        arrays[f"{name}/ids"] = ids[0].numpy().astype(np.int32)
        for kind in MASKS:
            with torch.no_grad():
                out = model(input_ids=ids, attention_mask=blocked(kind), use_cache=False)
            arrays[f"{name}/{kind}"] = out.logits[0].numpy()
        print(f"{name:20} {type(model).__name__:20} spread {arrays[f'{name}/full'].std():.2f}")
    np.savez_compressed(HERE / "families.npz", **arrays)


if __name__ == "__main__":
    main()
