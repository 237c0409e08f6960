"""The full-size configs that `random:NAME` offers give exactly the published checkpoints' sizes.

Parameter trees are built as shapes, without memory. Numbers are those of the published index files
where these were seen (`INDEX`), else counted from the layers by hand.
"""

import math

import jax
import pytest

from dllm_jax.convert.rules import placements, tensor_shapes
from dllm_jax.convert.tensor_names import table_of
from dllm_jax.models.architecture import arch_of
from dllm_jax.models.families import parse_config
from dllm_jax.models.family_table import DRAFTS, FAMILIES
from dllm_jax.models.published import PUBLISHED

# Published: total_size of model.safetensors.index.json, or the number of parameters on the hub.
INDEX = {
    "GSAI-ML/LLaDA-8B-Base": 16031162368,
    "JetLM/SDAR-4B-Chat": 8822848512,
    "JetLM/SDAR-8B-Chat": 16381470720,
    "inclusionAI/LLaDA2.0-mini": 32511286784,
    "inclusionAI/LLaDA2.0-flash": 205779410432,
    "inclusionAI/LLaDA2.1-mini": 32511296512,  # 19 layers of 256 biases of 4 bytes, not of 2
    "inclusionAI/LLaDA2.1-flash": 205779426304,
    "Dream-org/Dream-v0-Base-7B": 2 * 7615616512,
    "Dream-org/DreamReasoner-8B": 2 * 8190735360,
    "Qwen/Qwen3-4B": 2 * 4022468096,
    "Qwen/Qwen3-8B": 2 * 8190735360,
    "meta-llama/Llama-3.1-8B-Instruct": 2 * 8030261248,
}
# Name: elements, bytes of one expert's stored bias, tensors.
SIZES = {
    "GSAI-ML/LLaDA-8B-Base": (8015581184, 0, 291),
    "GSAI-ML/LLaDA-8B-Instruct": (8015581184, 0, 291),
    "GSAI-ML/LLaDA-1.5": (8015581184, 0, 291),
    "Dream-org/Dream-v0-Base-7B": (7615616512, 0, 339),
    "Dream-org/Dream-v0-Instruct-7B": (7615616512, 0, 339),
    "apple/DiffuCoder-7B-Base": (7615616512, 0, 339),
    "apple/DiffuCoder-7B-Instruct": (7615616512, 0, 339),
    "apple/DiffuCoder-7B-cpGRPO": (7615616512, 0, 339),
    "GSAI-ML/iLLaDA-8B-Base": (7615025152, 0, 290),  # tied
    "GSAI-ML/iLLaDA-8B-Instruct": (7615025152, 0, 290),
    "inclusionAI/LLaDA-MoE-7B-A1B-Base": (7356880896, 0, 3219),
    "inclusionAI/LLaDA-MoE-7B-A1B-Instruct": (7356880896, 0, 3219),
    "dllm-hub/Qwen3-0.6B-diffusion-mdlm-v0.1": (596049920, 0, 310),
    "dllm-hub/Qwen3-0.6B-diffusion-bd3lm-v0.1": (596049920, 0, 310),
    "dllm-hub/Qwen2.5-Coder-0.5B-Instruct-diffusion-mdlm-v0.1": (494032768, 0, 290),
    "dllm-hub/Qwen2.5-Coder-0.5B-Instruct-diffusion-bd3lm-v0.1": (494032768, 0, 290),
    "fredzzp/open-dcoder-0.5B": (494032768, 0, 290),
    "Dream-org/DreamReasoner-8B": (8190735360, 0, 399),
    "ByteDance-Seed/Stable-DiffCoder-8B-Base": (8250462208, 0, 291),
    "ByteDance-Seed/Stable-DiffCoder-8B-Instruct": (8250462208, 0, 291),
    "Efficient-Large-Model/Fast_dLLM_v2_1.5B": (1543714304, 0, 338),  # tied
    "Efficient-Large-Model/Fast_dLLM_v2_7B": (7615616512, 0, 339),
    "JetLM/SDAR-1.7B-Chat": (2031739904, 0, 311),
    "JetLM/SDAR-4B-Chat": (4411424256, 0, 399),
    "JetLM/SDAR-8B-Chat": (8190735360, 0, 399),
    "JetLM/SDAR-8B-Chat-b32": (8190735360, 0, 399),
    "JetLM/SDAR-30B-A3B-Chat": (30532122624, 0, 18867),
    "JetLM/SDAR-30B-A3B-Chat-b32": (30532122624, 0, 18867),
    "inclusionAI/LLaDA2.0-mini": (16255643392, 2, 14813),
    "inclusionAI/LLaDA2.0-mini-CAP": (16255643392, 2, 14813),
    "inclusionAI/LLaDA2.0-flash": (102889705216, 2, 24161),
    "inclusionAI/LLaDA2.0-flash-CAP": (102889705216, 2, 24161),
    "inclusionAI/LLaDA2.1-mini": (16255643392, 4, 14813),
    "inclusionAI/LLaDA2.1-flash": (102889705216, 4, 24161),
    "inclusionAI/LLaDA2.2-mini": (16255643392, 4, 14813),
    "inclusionAI/LLaDA2.2-flash": (102889705216, 4, 24161),
    "google/diffusiongemma-26B-A4B-it": (25250986812, 0, 691),  # the text part, tied
    "Zigeng/DMax-16B": (16255643392, 2, 14813),  # counted with one tensor an expert
    "Qwen/Qwen3-0.6B": (596049920, 0, 310),
    "Qwen/Qwen3-1.7B": (1720574976, 0, 310),
    "Qwen/Qwen3-4B": (4022468096, 0, 398),
    "Qwen/Qwen3-8B": (8190735360, 0, 399),
    "Qwen/Qwen3-30B-A3B": (30532122624, 0, 18867),
    "meta-llama/Llama-3.1-8B-Instruct": (8030261248, 0, 291),
    "z-lab/Qwen3-4B-DFlash-b16": (537427200, 0, 58),
    "z-lab/Qwen3-8B-DFlash-b16": (1048626432, 0, 58),
}


def parsed(name):
    return parse_config(PUBLISHED[name], name=name)


def test_every_published_config_is_counted():
    assert SIZES.keys() == PUBLISHED.keys()
    families = {row.name for row in (*FAMILIES, *DRAFTS)} - {"a2d_llama"}  # none is published
    assert {parsed(name).family for name in PUBLISHED} == families


@pytest.mark.parametrize("name", PUBLISHED)
def test_shapes_are_those_of_the_checkpoint(name):
    elements, bias_bytes, _ = SIZES[name]
    config = parsed(name).config
    arch = arch_of(config)
    # As a loader would build it, and still nothing is allocated.
    tree = jax.eval_shape(
        lambda: jax.tree.map(lambda s: jax.numpy.zeros(s.shape, s.dtype), arch.param_shapes(config))
    )
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    assert sum(math.prod(leaf.shape) for _, leaf in leaves) == elements
    stored = sum(
        math.prod(leaf.shape) * (bias_bytes if path[-1].key == "router_bias" else 2)
        for path, leaf in leaves
    )
    assert stored == INDEX.get(name, stored)


@pytest.mark.parametrize("name", sorted({SIZES[n]: n for n in PUBLISHED}.values()))
def test_tensors_have_the_familys_names_and_number(name):
    family, config, *_ = parsed(name)
    shapes = arch_of(config).param_shapes(config)
    tensors = tensor_shapes(placements(table_of(family).rules_for(), shapes))
    elements, _, count = SIZES[name]
    assert len(tensors) == count
    assert sum(map(math.prod, tensors.values())) == elements


# Name: strategy, block, accept threshold, temperature, mask id, stop ids, pad id, alternatives.
DEFAULTS = {
    "GSAI-ML/LLaDA-8B-Instruct": "full_sequence 32 1.0 0.0 126336 126081,126348 126081",
    "Dream-org/Dream-v0-Instruct-7B": "full_sequence 32 1.0 0.2 151666 151643,151645 151643",
    "apple/DiffuCoder-7B-Instruct": "full_sequence 32 1.0 0.3 151666 151643,151645 151643",
    "apple/DiffuCoder-7B-cpGRPO": "full_sequence 32 1.0 0.4 151666 151643,151645 151643",
    "GSAI-ML/iLLaDA-8B-Instruct": "full_sequence 32 1.0 0.0 5 2 1",
    "inclusionAI/LLaDA-MoE-7B-A1B-Instruct": "full_sequence 32 1.0 0.0 156895 156892,156900 156892",
    "dllm-hub/Qwen3-0.6B-diffusion-mdlm-v0.1": (
        "full_sequence 32 1.0 0.0 151669 151643,151645 151643"
    ),
    "dllm-hub/Qwen2.5-Coder-0.5B-Instruct-diffusion-bd3lm-v0.1": (
        "block_diffusion 32 1.0 0.0 151665 151643,151645 151643"
    ),
    "fredzzp/open-dcoder-0.5B": "full_sequence 32 1.0 0.5 151665 151643,151645 151643",
    "Dream-org/DreamReasoner-8B": "multi_bd 32 0.9 0.0 151669 151643,151645 151643",
    "ByteDance-Seed/Stable-DiffCoder-8B-Base": "multi_bd 4 0.95 0.0 5 2 1",
    "Efficient-Large-Model/Fast_dLLM_v2_7B": "fast_dllm_v2 32 0.9 0.0 151665 151643,151645 151643",
    "JetLM/SDAR-8B-Chat": "multi_bd 4 0.95 0.0 151669 151643,151645 151643",
    "JetLM/SDAR-8B-Chat-b32": "multi_bd 32 0.95 0.0 151669 151643,151645 151643",
    "JetLM/SDAR-30B-A3B-Chat-b32": "multi_bd 32 0.95 0.0 151669 151643,151645 151643",
    "inclusionAI/LLaDA2.0-mini": "multi_bd 32 0.95 0.0 156895 156892,156900 156892 edit,dmax",
    "inclusionAI/LLaDA2.0-mini-CAP": "multi_bd 32 0.9 0.0 156895 156892,156900 156892 edit,dmax",
    "inclusionAI/LLaDA2.1-flash": "multi_bd 32 0.95 0.0 156895 156892,156900 156892 edit,dmax",
    "inclusionAI/LLaDA2.2-flash": "edit_indel 32 0.5 0.0 156895 156892,156900 156892",
    "Zigeng/DMax-16B": "multi_bd 32 0.95 0.0 156895 156892,156900 156892 edit,dmax",
    "Qwen/Qwen3-8B": "ar 1 0.95 0.0 -1 151643,151645 151643",
    "Qwen/Qwen3-30B-A3B": "ar 1 0.95 0.0 -1 151643,151645 151643",
    "google/diffusiongemma-26B-A4B-it": "diffusion_gemma 256 0.95 1.0 -1 1,50,106 0",
    "meta-llama/Llama-3.1-8B-Instruct": "ar 1 0.95 0.0 -1 128001,128008,128009 128001",
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_are_those_of_the_card(name):
    _, config, d, _ = parsed(name)
    words = (
        *(d.strategy, d.block_size, d.accept_threshold, d.temperature, config.mask_token_id),
        *(",".join(map(str, d.stop_token_ids)), d.pad_token_id, ",".join(d.alternatives)),
    )
    assert " ".join(map(str, words)).strip() == DEFAULTS[name]


NOTES = {
    "Dream-org/Dream-v0-Base-7B": "max_position_embeddings=131072 is inherited: dream was trained",
    "Dream-org/Dream-v0-Instruct-7B": "trained on texts of 2048 tokens, and longer ones suffer",
    "inclusionAI/LLaDA2.1-mini": "by its name made for the strategy 'edit', which its files do not",
    "inclusionAI/LLaDA2.1-flash": "'multi_bd' is used unless you name another",
    "Zigeng/DMax-16B": "by its name made for the strategy 'dmax'",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_has_the_notes_it_deserves(name):
    notes = parsed(name).notes
    assert len(notes) == (name in NOTES)
    assert NOTES.get(name, "") in " ".join(notes)
