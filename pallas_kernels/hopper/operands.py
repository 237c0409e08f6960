"""8-bit operands of the tensor cores, rearranged among threads."""

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.mosaic.gpu.fragmented_array import Tiling
from jax.experimental.mosaic.gpu.utils import arith, ir, nvvm
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from . import load, swizzled, tiled

BOX = 16  # fresh tokens that are transposed at once; a window has a multiple of them


def as_operands(narrow: Array, count: int) -> list[Array]:
    """Turn the sums of a product into left operands of `count` products, splitting the columns.

    A lane holds two adjacent sums of every 8 columns; an 8-bit operand needs four adjacent ones of
    every 16. For each 32 columns a lane sends one word to each of two other lanes.
    """
    shape = narrow.shape[0], narrow.shape[1] // count
    out = plgpu.ShapeDtypeStruct(shape, narrow.dtype, layout=plgpu.Layout.WGMMA_8BIT)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=[out] * count)
    def exchange(_, array):
        i32 = ir.IntegerType.get_signless(32)
        c = lambda number: utils.c(number, i32)  # noqa: E731
        lane = arith.remui(utils.thread_idx(), c(4))
        is_odd = arith.cmpi(arith.CmpIPredicate.eq, arith.andi(lane, c(1)), c(1))
        is_late = arith.cmpi(arith.CmpIPredicate.uge, lane, c(2))
        thread = arith.andi(utils.thread_idx(), c(28))  # the first of four lanes
        # The lane that each of four lanes reads from: 1 3 0 2, then 0 2 1 3.
        near = arith.addi(thread, arith.andi(arith.shrui(c(0x2031), arith.shli(lane, c(2))), c(3)))
        far = arith.addi(thread, arith.andi(arith.shrui(c(0x3120), arith.shli(lane, c(2))), c(3)))
        first = arith.select(is_late, c(0x1054), c(0x5410))
        second = arith.select(is_late, c(0x3276), c(0x7632))

        def heard(word, whom):
            kind = nvvm.ShflKind.idx
            return nvvm.shfl_sync(c(0xFFFFFFFF), word, whom, c(0x1F), kind)

        pairs = array.registers.reshape(-1, 2)  # [groups of 8 columns, groups of 8 rows]
        words = np.empty((len(pairs) // 2, 2), object)
        for at in range(0, len(pairs), 4):
            for half in range(2):
                group = [pairs[at + i, half] for i in range(4)]
                even = utils.bitcast(utils.vector_concat(group[0::2]), i32)
                odd = utils.bitcast(utils.vector_concat(group[1::2]), i32)
                one = heard(arith.select(is_odd, even, odd), near)
                two = heard(arith.select(is_odd, odd, even), far)
                for i, order in enumerate((first, second)):
                    word = utils.prmt(two, one, order)
                    four = ir.VectorType.get((4,), array.mlir_dtype)
                    words[at // 2 + i, half] = utils.bitcast(word, four)
        layout = mgpu.WGMMA_LAYOUT_8BIT
        return [
            mgpu.FragmentedArray(
                _registers=part.reshape(layout.registers_shape(shape)),
                _layout=layout,
                _is_signed=None,
            )
            for part in np.split(words, count)
        ]

    return exchange(narrow)  # pyright: ignore[reportCallIssue]


def turn(sources, target, is_interpreted: bool):
    """Transpose boxes of fresh values [BOX H] in global memory to shared memory [H tokens].

    A thread holds four tokens of each box and H / 32 adjacent columns.
    """
    tokens, head_size = len(sources) * BOX, target.shape[0]
    if is_interpreted:
        for i, source in enumerate(sources):
            target[:, i * BOX : (i + 1) * BOX] = source[...].T
        return
    width = head_size // 32
    as_it_lies = tiled(((BOX, head_size), (BOX, head_size // 4), (4, width)), (-5,), (-4, -3))
    of_target = plgpu.RefType(swizzled(tokens, target.dtype))

    @plgpu.inline_mgpu(arg_types=(of_target, *[as_it_lies] * len(sources)))
    def store(_, ref, *boxes):
        layout = mgpu.TiledLayout(
            Tiling(((head_size, BOX), (head_size // 4, BOX), (width, 4))),
            warp_dims=(-6,),
            lane_dims=(-3, -4),
            vector_dim=-1,
        )
        words = np.empty((len(boxes), width), object)
        for place, box in enumerate(boxes):
            for i in range(width):
                column = [utils.vector_slice(x, slice(i, i + 1)) for x in box.registers.flat]
                words[place, i] = utils.vector_concat(column)
        mgpu.FragmentedArray(
            _registers=words.reshape(layout.registers_shape((head_size, tokens))),
            _layout=layout,
            _is_signed=None,
        ).store_tiled(ref, min(tokens, 128), optimized=False)

    store(target, *[load(source, as_it_lies) for source in sources])  # pyright: ignore[reportCallIssue]
