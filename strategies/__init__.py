"""Decoding strategies: pure step functions over immutable block-buffer state."""

from strategies import testing
from strategies.ar import AR
from strategies.block_diffusion import BlockDiffusion
from strategies.d2f import D2F
from strategies.dflash import DFlash
from strategies.dmax import DMax
from strategies.edit import Edit
from strategies.fast_dllm_v2 import FastDLLMV2
from strategies.full_sequence import FullSequence
from strategies.multi_bd import MultiBD
from strategies.protocol import (
    Forward,
    ForwardOutput,
    Knob,
    Needs,
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
from strategies.resolve import as_strategy, load_strategy, strategy_names
from strategies.state import (
    BlockBuffer,
    Carry,
    DecodeState,
    Limits,
    Sampling,
    StepInfo,
    put_slot,
    take_slot,
)

__all__ = [
    "AR",
    "D2F",
    "BlockBuffer",
    "BlockDiffusion",
    "Carry",
    "DFlash",
    "DMax",
    "DecodeState",
    "Edit",
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
    "Sampling",
    "SlotSpec",
    "Soft",
    "StepInfo",
    "Strategy",
    "Taps",
    "TokenMix",
    "TokenStats",
    "as_strategy",
    "knob",
    "load_strategy",
    "put_slot",
    "strategy_names",
    "take_slot",
    "testing",
]
