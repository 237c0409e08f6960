"""The table of model families: how each is recognised, its constants, and how it is decoded.

One row is one family. A family that writes its config in a known dialect needs a row and nothing
else here. Source: config.json, tokenizer files and cards of the published checkpoints named in each
row. The files of a checkpoint take precedence over its row.
"""

from collections.abc import Mapping
from typing import Any

from dllm_jax.convert.config.parsers import Layers
from dllm_jax.models.family import Family, Hint

# Unsupported networks whose files name a family below.
UNO = "Uno, whose adapter is on while it drafts and off while it judges; planned"
DREAMON = (
    "DreamOn: its expand and delete ids change the length of the text while it is written, which "
    "is not supported"
)

_QWEN2 = Layers(qkv_bias=True)
_QWEN3 = Layers(qk_norm=True)
_QWEN_TOKENS: Mapping[str, Any] = {
    "stop_tokens": ((151643, "<|endoftext|>"), (151645, "<|im_end|>")),
    "pad_token_id": 151643,
}
_SDAR_TOKENS: Mapping[str, Any] = {
    "mask_token_id": 151669,
    "mask_tokens": ("<|MASK|>", "<MASK>"),
    **_QWEN_TOKENS,
}
_LLADA2_TOKENS: Mapping[str, Any] = {
    "mask_token_id": 156895,
    "mask_tokens": ("<|mask|>",),
    "stop_tokens": ((156892, "<|endoftext|>"), (156900, "<|role_end|>")),
    "pad_token_id": 156892,
}

# Settings of LLaDA's authors and of models trained like theirs: each forward takes the surest token
# of a block of 32. A threshold of 1 takes no others (Fast-dLLM's is 0.9).
_AS_LLADA: Mapping[str, Any] = {
    "shift": False,
    "attention": "full",
    "strategy": "full_sequence",
    "block_size": 32,
    "buffer_size": 16,
    "accept_threshold": 1.0,
    "remasking": "low_confidence",
    "block_length": 32,
}
# Settings of Dream's authors: the least entropy first, a forward a token, the text as one block.
_AS_DREAM: Mapping[str, Any] = {
    **_AS_LLADA,
    "shift": True,
    "remasking": "entropy",
    "block_length": None,
    "layers": _QWEN2,
    **_QWEN_TOKENS,
}
# An autoregressive model: it has no mask token.
_AS_AR: Mapping[str, Any] = {
    "shift": True,
    "attention": "causal",
    "strategy": "ar",
    "block_size": 1,
    "mask_token_id": None,
}
# dllm's A2D and OPDLM: an autoregressive model turned into a masked or a block diffusion model. The
# files do not state which of the two; the name may.
_BY_BLOCKS: Mapping[str, Any] = {
    "strategy": "block_diffusion",
    "attention": "block_causal",
    "buffer_size": 1,
    "remasking": "static",
    "block_length": None,
    "alternatives": (),
}
_OPDLM = {"block_size": 4, "remasking": "dynamic", "accept_threshold": 0.9}
_A2D: Mapping[str, Any] = {
    **_AS_LLADA,
    "alternatives": ("block_diffusion",),
    "mask_tokens": ("<|mask|>",),
    **_QWEN_TOKENS,
    "hints": (
        Hint(pattern="mdlm", settings={"alternatives": ()}),
        Hint(pattern="bd3lm|opdlm", settings=_BY_BLOCKS),
        Hint(pattern="opdlm", settings=_OPDLM),
    ),
}

FAMILIES = (
    # GSAI-ML/LLaDA-8B-Base, LLaDA-8B-Instruct, LLaDA-1.5
    Family(
        family="llada",
        architecture="LLaDAModelLM",
        model_types=("llada",),
        dialect="llada",
        **_AS_LLADA,
        mask_token_id=126336,
        mask_tokens=("<|mdm_mask|>",),
        stop_tokens=((126081, "<|endoftext|>"), (126348, "<|eot_id|>")),
        pad_token_id=126081,
    ),
    # Dream-org/Dream-v0-Base-7B, -Instruct-7B; apple/DiffuCoder-7B-*, which its config does not
    # tell apart. "Dream" is also the reasoner's model_type, so it identifies neither.
    Family(
        family="dream",
        architecture="DreamModel",
        **_AS_DREAM,
        temperature=0.2,
        top_p=0.95,
        mask_token_id=151666,
        mask_tokens=("<|mask|>",),
        trained_len=2048,
        hints=(
            Hint(pattern="diffucoder", settings={"temperature": 0.3, "trained_len": None}),
            Hint(pattern="diffucoder.*cpgrpo", settings={"temperature": 0.4}),
            Hint(pattern=r"\bdreamon\b", refusal=DREAMON),
        ),
    ),
    # Dream-org/DreamReasoner-8B
    Family(
        family="dream_reasoner",
        architecture="DreamForCausalLM",
        layers=_QWEN3,
        shift=False,
        strategy="multi_bd",
        block_size=32,
        accept_threshold=0.9,
        **_SDAR_TOKENS,
    ),
    # ByteDance-Seed/Stable-DiffCoder-8B-Base, -Instruct; model_type is "llama"
    Family(
        family="stable_diffcoder",
        architecture="StableDiffcoderForCausalLM",
        shift=False,
        strategy="multi_bd",
        block_size=4,
        mask_token_id=5,
        mask_tokens=("<[MASK_TOKEN]>",),
        stop_tokens=((2, "<[end▁of▁sentence]>"),),
        pad_token_id=1,
    ),
    # Efficient-Large-Model/Fast_dLLM_v2_1.5B, _7B. Their top_p of 0.95 does nothing at
    # temperature 0; here it would raise every confidence, which is of the law after top-p.
    Family(
        family="fast_dllm_v2",
        architecture="Fast_dLLM_QwenForCausalLM",
        model_types=("Fast_dLLM_Qwen",),
        layers=_QWEN2,
        shift=True,
        strategy="fast_dllm_v2",
        block_size=32,
        accept_threshold=0.9,
        mask_token_id=151665,
        mask_tokens=("|<MASK>|",),
        **_QWEN_TOKENS,
    ),
    # JetLM/SDAR-*-Chat (a -b8 to -b64 in the name states the block), TraDo
    Family(
        family="sdar",
        architecture="SDARForCausalLM",
        model_types=("sdar",),
        layers=_QWEN3,
        shift=False,
        strategy="multi_bd",
        block_size=4,
        **_SDAR_TOKENS,
        hints=(Hint(pattern=r"\buno\b", refusal=UNO),),
    ),
    # JetLM/SDAR-30B-A3B-Chat
    Family(
        family="sdar_moe",
        architecture="SDARMoeForCausalLM",
        model_types=("sdar_moe",),
        dialect="qwen_moe",
        layers=Layers(qk_norm=True, norm_topk=True),
        shift=False,
        strategy="multi_bd",
        block_size=4,
        **_SDAR_TOKENS,
    ),
    # inclusionAI/LLaDA2.0-*, LLaDA2.1-*, LLaDA2.2-*; Zigeng/DMax-*; MBD-LLaDA2-*
    Family(
        family="llada2",
        architecture="LLaDA2MoeModelLM",
        model_types=("llada2_moe", "llada2_moe_veomni"),
        dialect="llada2",
        shift=False,
        strategy="multi_bd",
        block_size=32,
        alternatives=("edit", "dmax"),
        **_LLADA2_TOKENS,
        edits=("delete_token_id", "split_token_id"),
        hints=(
            Hint(pattern=r"-CAP\b", settings={"accept_threshold": 0.9}),
            Hint(pattern=r"LLaDA2\.1", strategy="edit"),
            Hint(pattern="DMax", strategy="dmax"),
        ),
    ),
    # google/diffusiongemma-26B-A4B-it. A canvas starts as random tokens: there is no mask. The
    # schedule has temperatures of its own; a request's is a factor.
    Family(
        family="diffusion_gemma",
        architecture="DiffusionGemmaForBlockDiffusion",
        model_types=("diffusion_gemma",),
        dialect="diffusion_gemma",
        shift=False,
        attention="causal",
        strategy="diffusion_gemma",
        block_size=256,
        buffer_size=2,
        temperature=1.0,
        mask_token_id=None,
        stop_tokens=((1, "<eos>"), (50, "<|tool_response>"), (106, "<turn|>")),
        pad_token_id=0,
        unread=("image_token_id", "boi_token_id", "eoi_token_id", "video_token_id"),
    ),
    # Qwen/Qwen3-*, the autoregressive targets of drafters
    Family(
        family="qwen3",
        architecture="Qwen3ForCausalLM",
        model_types=("qwen3",),
        layers=_QWEN3,
        **_AS_AR,
        **_QWEN_TOKENS,
    ),
    # Qwen/Qwen3-30B-A3B
    Family(
        family="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        model_types=("qwen3_moe",),
        dialect="qwen_moe",
        layers=_QWEN3,
        **_AS_AR,
        **_QWEN_TOKENS,
    ),
    # meta-llama/Llama-3.1-8B-Instruct
    Family(
        family="llama",
        architecture="LlamaForCausalLM",
        model_types=("llama",),
        **_AS_AR,
        stop_tokens=(
            (128001, "<|end_of_text|>"),
            (128008, "<|eom_id|>"),
            (128009, "<|eot_id|>"),
        ),
    ),
    # GSAI-ML/iLLaDA-8B-Base, -Instruct. No file marks the mask; blocks are appended to the text.
    Family(
        family="illada",
        architecture="ILLaDAForCausalLM",
        model_types=("illada",),
        layers=Layers(rms_only=True),
        **{**_AS_LLADA, "buffer_size": 64},
        append=True,
        mask_token_id=5,
        mask_tokens=("<[MASK]>", "<[MASK_TOKEN]>"),  # the latter as Stable-DiffCoder's files
        stop_tokens=((2, "<[end▁of▁sentence]>"),),
        pad_token_id=1,
    ),
    # inclusionAI/LLaDA-MoE-7B-A1B-Base, -Instruct; their model_type is LLaDA's
    Family(
        family="llada_moe",
        architecture="LLaDAMoEModelLM",
        model_types=("lladamoe", "llada_moe"),
        dialect="llada_moe",
        layers=_QWEN3,
        **_AS_LLADA,
        **_LLADA2_TOKENS,
    ),
    # dllm-hub/Qwen3-0.6B-diffusion-{mdlm,bd3lm}-v0.1, divelab/Qwen3-*-a2d-init (untrained), OPDLM
    Family(
        family="a2d_qwen3",
        architecture="A2DQwen3LMHeadModel",
        model_types=("a2d-qwen3",),
        layers=_QWEN3,
        **_A2D,
        mask_token_id=151669,
    ),
    # dllm-hub/Qwen2.5-Coder-0.5B-Instruct-diffusion-{mdlm,bd3lm}-v0.1
    Family(
        family="a2d_qwen2",
        architecture="A2DQwen2LMHeadModel",
        model_types=("a2d-qwen2",),
        layers=_QWEN2,
        **_A2D,
        mask_token_id=151665,
    ),
    Family(
        family="a2d_llama",
        architecture="A2DLlamaLMHeadModel",
        model_types=("a2d-llama",),
        **{**_A2D, "stop_tokens": (), "pad_token_id": None},
        mask_token_id=None,
    ),
    # fredzzp/open-dcoder-0.5B: a Qwen2 by its class. The card remasks too (P2), which is not here.
    Family(
        family="open_dcoder",
        architecture="Qwen2ForCausalLM",
        **_AS_DREAM,
        temperature=0.5,
        mask_token_id=151665,
        mask_tokens=("[MASK]",),
        is_marked=True,
    ),
)

# Drafters: decoded only with a target. In training they saw features of the text and their own
# block.
DRAFTS = (
    # z-lab/*-DFlash*; meta-models/Muse-Glimmer-30B-assistant. model_type is "qwen3" or the like.
    Family(
        family="dflash",
        architecture="DFlashDraftModel",
        also=("MuseGlimmerAssistantModel",),
        model_types=("muse_glimmer_assistant",),
        dialect="dflash",
        layers=_QWEN3,
        shift=False,
        strategy="dflash",
        block_size=16,
        mask_token_id=None,  # differs by drafter; the config states it
        stop_tokens=(),
    ),
)

# LLaDA2.2: settings of a config with routing blocks; "edit" if it lacks the ids of the edits.
BLOCK_ROUTED: Mapping[str, Any] = {
    "strategy": "edit_indel",
    "accept_threshold": 0.5,
    "edit_threshold": 0.0,
    "alternatives": (),
}

_SPECULATORS = "a drafter in speculators' form has a vocabulary and layer numbers of its own"
_THREE_MODES = "it has three modes in one network; planned"
_HYBRID = "its linear attention keeps a state beside keys and values, which is not run here"
_CONVOLUTIONS = "its short convolutions keep a state beside keys and values, which is not run here"
# Unsupported models that resemble one above, and their differences. Keys are patterns of the whole
# class name or model_type, in any case; for an unknown class also of the folder's name.
RELATIVES = {
    "dflash2draftmodel": "DFlash 2 has convolutions and a selector; use a draft of the first "
    "version",
    "dflashlaguna.*": "its attention has gates that DFlash's first version lacks",
    ".*(speculator|eagle3draftmodel|dsparkdraftmodel)": _SPECULATORS
    + "; planned for DFlash and DSpark; use a draft in z-lab/dflash's form",
    ".*dspark.*": "a DSpark drafter corrects each draft by the one before it; planned",
    "qwen3_?next.*|qwen3_5.*": _HYBRID,
    ".*lfm-?2.*": _CONVOLUTIONS,
    ".*two.?tower.*": "a frozen Mamba-2 tower keeps a state beside keys and values, which is not "
    "run here",
    "nemotron.?labs.?diffusion.*|ministraldiffencoder.*": _THREE_MODES,
    "wedlm.*": "it attends in the order in which cells were filled",
    "qwen2(forcausallm)?": "it is Qwen2.5 unless its config or its tokenizer has a mask token, as "
    "Open-dCoder's has ([MASK])",
    "dream": "that alone does not say whether its layers are Qwen2's or Qwen3's; "
    'add "architectures": ["DreamModel"] or ["DreamForCausalLM"] to config.json',
}
# LLaDA2.0-Uni also reads and draws images; its class has not been published under one name.
UNI = r"llada-?2.*\buni\b"


def family_named(name: str) -> Family:
    """The row of a family.

    Raises:
        ValueError: No family has this name.
    """
    every = (*FAMILIES, *DRAFTS)
    for family in every:
        if family.name == name:
            return family
    known = ", ".join(f.name for f in every)
    raise ValueError(f"family {name!r} is unknown; known are {known}; give another (--family)")
