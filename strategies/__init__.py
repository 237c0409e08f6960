"""Decoding strategies: pure step functions over immutable block-buffer state."""

import os

__path__ = [os.path.realpath(folder) for folder in __path__]  # not through a link: ADR 0016

if __name__ == "strategies":  # the same modules under the folder's name
    from dllm_jax.short_names import share_modules

    share_modules(__name__, "dllm_jax.strategies")

from . import testing
from .ar import AR
from .block_diffusion import BlockDiffusion
from .core import blocks, random, sampling
from .core.needs import Needs, PromptMode
from .core.protocol import (
    Conditioned,
    Forward,
    ForwardOutput,
    Knob,
    PerSlot,
    PrefillChunk,
    SlotSpec,
    Soft,
    Strategy,
    Taps,
    TokenMix,
    TokenStats,
    knob,
)
from .core.resolve import as_strategy, load_strategy, strategy_names
from .core.state import (
    BlockBuffer,
    Carry,
    DecodeState,
    Limits,
    Sampling,
    StepInfo,
    put_slot,
    take_slot,
)
from .d2f import D2F
from .dflash import DFlash
from .diffusion_gemma import DiffusionGemma
from .dmax import DMax
from .edit import Edit
from .edit_indel import EditIndel
from .entropy_blocks import EntropyBlocks
from .fast_dllm_v2 import FastDLLMV2
from .full_sequence import FullSequence
from .multi_bd import MultiBD

__all__ = [
    "AR",
    "D2F",
    "BlockBuffer",
    "BlockDiffusion",
    "Carry",
    "Conditioned",
    "DFlash",
    "DMax",
    "DecodeState",
    "DiffusionGemma",
    "Edit",
    "EditIndel",
    "EntropyBlocks",
    "FastDLLMV2",
    "Forward",
    "ForwardOutput",
    "FullSequence",
    "Knob",
    "Limits",
    "MultiBD",
    "Needs",
    "PerSlot",
    "PrefillChunk",
    "PromptMode",
    "Sampling",
    "SlotSpec",
    "Soft",
    "StepInfo",
    "Strategy",
    "Taps",
    "TokenMix",
    "TokenStats",
    "as_strategy",
    "blocks",
    "knob",
    "load_strategy",
    "put_slot",
    "random",
    "sampling",
    "strategy_names",
    "take_slot",
    "testing",
]
