"""DMax: filled cells stay soft and are drawn anew until their block no longer changes.

1. A step fills the holes of a block from the left up to the first unsure one, one at least.
2. A filled cell shows a mixture of its token's embedding and the mask's, weighted by how sure the
   model is. It takes the model's new token in every step, so that early mistakes can be mended.
3. A complete block leaves when a step changed nothing, when the model is sure of all of it, or when
   it has had one step for each of its cells. Its keys and values are those of its plain tokens.

Source: DMax (arXiv 2604.08302) and its code, `decode_uniform`; the window of several blocks, the
stability gate and `compat="diffulex"` are Diffulex's.
"""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool

from .core import block_rewrite, blocks, random, sampling, token_merge
from .core.checks import check_one_of, check_whole
from .core.needs import Needs
from .core.protocol import ForwardOutput, Knob, Strategy, TokenMix, TokenStats, knob
from .core.state import Carry, DecodeState

Merge = Literal["dmax_topk", "iter_smooth_topk"]
Compat = Literal["diffulex"]


class DMax(Strategy):
    """Soft parallel decoding with token merge.

    Attributes:
        accept_threshold: The first hole whose token's probability is below it ends the run.
        add_block_threshold: Progress of the last block (>=) at which the next one opens.
        token_stability_threshold: Share of its filled cells (>=) that the last step must have kept.
        commit_confidence: A complete block leaves at once when all its cells have this (>=).
        token_merge_weight: Weight of the mixture in "iter_smooth_topk"; 0 turns either merge off.
        merge: What a filled cell shows. "dmax_topk": its token and the mask, by its probability.
            "iter_smooth_topk": its token, and the likeliest ones on top.
        token_merge_top_k: How many those are.
        renormalize: Scale "dmax_topk" to the weighted mean of its two norms.
        compat: "diffulex": filled cells count as certain, commits are soft, steps have no cap.
    """

    accept_threshold: Knob = knob(0.5)
    add_block_threshold: Knob = knob(0.1)
    token_stability_threshold: Knob = knob(0.0)
    commit_confidence: Knob = knob(0.9)
    token_merge_weight: Knob = knob(1.0)
    merge: Merge = struct.field(pytree_node=False, default="dmax_topk")
    token_merge_top_k: int = struct.field(pytree_node=False, default=1)
    renormalize: bool = struct.field(pytree_node=False, default=True)
    compat: Compat | None = struct.field(pytree_node=False, default=None)
    block_size: int = struct.field(pytree_node=False, default=32)
    buffer_size: int = struct.field(pytree_node=False, default=2)

    def __post_init__(self):
        """Check the fields."""
        super().__post_init__()
        check_one_of("merge", self.merge, get_args(Merge))
        check_one_of("compat", self.compat, (None, *get_args(Compat)))
        check_whole("token_merge_top_k", self.token_merge_top_k, 1)

    @property
    def needs(self) -> Needs:
        """A block-causal prompt; with `compat` pages hold more than their tokens say."""
        return Needs("grid_causal", soft_commits=self.compat == "diffulex")

    @property
    def _num_top(self) -> int:
        return self.token_merge_top_k if self.merge == "iter_smooth_topk" else 0

    def init(self, spec) -> Carry:
        """No mixtures yet, and no stability."""
        if self._num_top:
            check_whole("token_merge_top_k", self._num_top, 1, spec.vocab_size)
        return Carry(
            tokens=token_merge.init(spec, max(self._num_top, 1)),
            blocks={"stability": jnp.zeros((1, 1))},
        )

    def step(self, forward, state):
        """One denoise step of the whole window."""
        stable = state.carry.blocks["stability"] >= self.token_stability_threshold.at_block
        state = blocks.open_next(state, self.add_block_threshold, stable)
        out = forward(state, inputs=self._mixtures(state, forward.mask_id))
        state = out.store(state, blocks.to_cache(state))
        active = blocks.live_cells(state) & ~blocks.to_cache(state)
        stats = out.predict(
            where=active,
            sampling=state.sampling,
            keys=random.step_keys(state),
            confidence="raw",
            num_top=self._num_top,
        )
        judged = self._judged(out, state, stats, active)
        accept = sampling.leftmost_sure(stats, self.accept_threshold, blocks.holes(state))
        # What is filled takes the new token without a threshold.
        changes = accept | block_rewrite.differs(state, stats.token)
        ready = self._ready(state, judged, changes)
        stability = block_rewrite.stability(state, stats.token)
        state, filled = block_rewrite.rewrite(state, stats.token, changes)
        soft = block_rewrite.editable(state) & state.buffer.filled
        if self.merge == "iter_smooth_topk":
            mixtures = token_merge.of_top(judged, soft)
        else:
            mixtures = token_merge.of_token(judged.token, judged.confidence, soft)
        state = token_merge.remember(state, mixtures, active)
        state = state.replace(carry=state.carry.replace(blocks={"stability": stability}))
        return blocks.finish_step(state, filled, ready=ready)

    def _mixtures(self, state: DecodeState, mask_id: int) -> TokenMix:
        """The inputs: mixtures of the last step, and plain tokens in blocks that commit."""
        shown = token_merge.recall(state)
        on = shown.on & (self.token_merge_weight.at_token > 0)
        if self.compat != "diffulex":
            on &= ~blocks.to_cache(state)
        shown = shown.replace(on=on)
        if self.merge == "iter_smooth_topk":
            return token_merge.beside_token(shown, state.buffer.tokens, self.token_merge_weight)
        return token_merge.beside_mask(shown, mask_id, self.renormalize)

    def _judged(
        self, out: ForwardOutput, state: DecodeState, stats: TokenStats, active: Array
    ) -> TokenStats:
        """Statistics of the likeliest token; in the reference, of the one drawn."""
        if self.compat == "diffulex":
            certain = active & state.buffer.filled
            return stats.replace(confidence=jnp.where(certain, 1.0, stats.confidence))
        # Greedy rows need no second readout: their token is the likeliest.
        return jax.lax.cond(
            jnp.any(state.sampling.temperature > 0),
            lambda: out.predict(where=active, confidence="raw", num_top=self._num_top),
            lambda: stats,
        )

    def _ready(
        self, state: DecodeState, judged: TokenStats, changes: Bool[Array, "B K S"]
    ) -> Bool[Array, "B K"]:
        """Blocks that may leave once complete; cells past the request's limit do not count."""
        counts = block_rewrite.editable(state) & block_rewrite.before_limit(state)
        unsure = judged.confidence < self.commit_confidence.at_token
        ready = ~jnp.any(changes & counts, axis=2) | ~jnp.any(unsure & counts, axis=2)
        if self.compat == "diffulex":
            return ready
        return ready | (state.buffer.block_steps + 1 >= self.block_size)


STRATEGY = DMax
