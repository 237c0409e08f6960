"""Sums over devices of one host by stores to each other's memory; see layer/mosaic_reduce.py."""

import functools
import operator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu.utils import llvm
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, memref, scf, vector
from jaxtyping import Array

THREADS, VECTOR_BYTES = 128, 16  # threads of a warpgroup; bytes that a thread stores at once
BLOCKS = 128  # below the 132 multiprocessors: all run at once, since a block waits for its peer
TURNS = 3
SLICE_BYTES = 16 * 1024  # per block, turn and sending device
HEADER_BYTES = VECTOR_BYTES * BLOCKS  # a block's number of launches, and the bytes of the last
NOTHING = 0xFFFFFFFF  # marks a word not yet received: two 16-bit NaNs, or one of 32 bits
_SOMETHING = NOTHING - 1  # sent in place of data equal to NOTHING; a NaN as well
_MOST_AWAITED = 16  # vectors that one loop waits for: they occupy registers


def exchange(peers: Any, own: list[Array], block: Array, num_devices: int) -> list[Array]:
    """Sum a block's rows over the devices, in float32 and in the order of the devices.

    Args:
        own: This device's rows, in the type in which they are sent.
    """
    width, kind = own[0].shape[0], own[0].dtype
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=VECTOR_BYTES // kind.itemsize)
    run = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT, *[layout] * len(own)),
        return_type=[plgpu.ShapeDtypeStruct((width,), jnp.float32, layout=layout)] * len(own),
    )(functools.partial(_exchange, num_devices=num_devices))
    return run(peers, block, *own)


def _exchange(_, peers, block, *own, num_devices):
    """The code of `exchange`, for a warpgroup."""
    size = own[0].registers.size  # vectors of a row in a thread
    link, count = _Link(peers, block, num_devices), size * len(own)
    for device in range(num_devices):
        link.send(device, [one for row in own for one in row.registers])
    link.clear()
    parts = link.receive(count, own[0].registers[0].type)
    link.end(count)
    return [_added([part[i * size : (i + 1) * size] for part in parts]) for i in range(len(own))]


class _Link:
    """Emits code that exchanges a thread's vectors with the same thread of the other devices.

    Vector i of thread t is stored at (128 i + t) x 16 bytes of its block's slice.
    """

    def __init__(self, peers, block, num_devices):
        i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
        self._i32, self._i64, self._devices = i32, i64, range(num_devices)
        self._block = arith.extui(i64, block.registers.flat[0])
        self._thread = arith.remui(mgpu.utils.thread_idx(), mgpu.c(THREADS, i32))
        self._lane = self._times(arith.extui(i64, self._thread), VECTOR_BYTES)

        def word(i):
            return arith.extui(i64, memref.load(peers, [mgpu.c(i, ir.IndexType.get())]))

        self._inboxes = [
            arith.ori(word(2 * device), arith.shli(word(2 * device + 1), mgpu.c(32, i64)))
            for device in self._devices
        ]
        self._rank = word(2 * num_devices)
        self._inbox = self._inboxes[0]
        for device in self._devices[1:]:
            is_me = arith.cmpi(arith.CmpIPredicate.eq, self._rank, mgpu.c(device, i64))
            self._inbox = arith.select(is_me, self._inboxes[device], self._inbox)
        self._state = arith.addi(self._inbox, self._times(self._block, VECTOR_BYTES))
        text = "ld.relaxed.gpu.global.v2.b32 {$0, $1}, [$2];"
        self._count, self._before = _asm(text, "=r,=r,l", [self._state], 2)

    def _times(self, value, factor):
        return arith.muli(value, mgpu.c(factor, self._i64))

    def _slice(self, behind, device):
        """Offset of the slice that `device` fills for this block in a later launch."""
        turn = arith.addi(self._count, mgpu.c(behind, self._i32))
        turn = arith.extui(self._i64, arith.remui(turn, mgpu.c(TURNS, self._i32)))
        number = arith.addi(self._times(turn, len(self._devices)), device)
        number = arith.addi(self._times(number, BLOCKS), self._block)
        return arith.addi(self._times(number, SLICE_BYTES), mgpu.c(HEADER_BYTES, self._i64))

    def send(self, device, vectors):
        """Store vectors in a device's inbox."""
        four, words = ir.VectorType.get((4,), self._i32), []
        for one in vectors:
            one = vector.bitcast(four, one)
            for i in range(4):
                each = vector.extract(one, dynamic_position=[], static_position=[i])
                words.append(arith.minui(each, mgpu.c(_SOMETHING, self._i32)))
        to = arith.addi(self._slice(0, self._rank), self._lane)
        to = arith.addi(self._inboxes[device], to)
        for i in range(0, len(words), 16):
            some, text = words[i : i + 16], ""
            for j in range(0, len(some), 4):
                names = ", ".join(f"${j + k}" for k in range(1, 5))
                offset = (i + j) // 4 * THREADS * VECTOR_BYTES
                text += f"st.relaxed.sys.global.v4.b32 [$0+{offset}], {{{names}}}; "
            _asm(text, "l" + ",r" * len(some), [to, *some], 0)

    def clear(self):
        """Reset the slices of the previous launch to `NOTHING`."""
        index, nothing = ir.IndexType.get(), mgpu.c(-1, self._i32)
        lane = arith.index_cast(index, self._lane)
        end = arith.index_cast(index, arith.extui(self._i64, self._before))
        firsts = [
            arith.addi(self._inbox, self._slice(TURNS - 1, mgpu.c(device, self._i64)))
            for device in self._devices
        ]
        loop = scf.ForOp(lane, end, mgpu.c(THREADS * VECTOR_BYTES, index))
        with ir.InsertionPoint(loop.body):
            at = arith.index_cast(self._i64, loop.induction_variable)
            text = "st.relaxed.sys.global.v4.b32 [$0], {$1, $1, $1, $1};"
            for first in firsts:
                _asm(text, "l,r", [arith.addi(first, at), nothing], 0)
            scf.yield_([])

    def receive(self, count, kind):
        """Wait for `count` vectors from each device and return them."""
        froms = [
            arith.addi(
                arith.addi(self._inbox, self._slice(0, mgpu.c(device, self._i64))), self._lane
            )
            for device in self._devices
        ]
        places = [(address, i * THREADS * VECTOR_BYTES) for address in froms for i in range(count)]
        four, vectors = ir.VectorType.get((4,), self._i32), []
        for i in range(0, len(places), _MOST_AWAITED):
            words = _wait(places[i : i + _MOST_AWAITED])
            for j in range(0, len(words), 4):
                one = vector.from_elements(four, words[j : j + 4])
                vectors.append(vector.bitcast(kind, one))
        return [vectors[i : i + count] for i in range(0, len(vectors), count)]

    def end(self, count):
        """Record the end of a launch, and the number of vectors that it used in each slice."""
        mgpu.utils.warpgroup_barrier()  # every thread has read the state
        is_first = arith.cmpi(arith.CmpIPredicate.eq, self._thread, mgpu.c(0, self._i32))
        with mgpu.utils.when(is_first):
            following = arith.addi(self._count, mgpu.c(1, self._i32))
            used = mgpu.c(count * THREADS * VECTOR_BYTES, self._i32)
            text = "st.relaxed.gpu.global.v2.b32 [$0], {$1, $2};"
            _asm(text, "l,r,r", [self._state, following, used], 0)


def _added(parts):
    """Add up lists of vectors in float32, in their order."""
    [length] = ir.VectorType(parts[0][0].type).shape
    shape = (len(parts[0]) * THREADS * length,)
    layout = mgpu.WGStridedFragLayout(shape, length)
    addends = []
    for part in parts:
        registers = np.empty(len(part), dtype=object)
        registers[:] = part
        one = mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)
        addends.append(one.astype(ir.F32Type.get()))
    return functools.reduce(operator.add, addends)


def _wait(places):
    """Wait until the words at these addresses and offsets have all arrived, and return them."""
    count = 4 * len(places)
    text = "{ .reg .pred p; .reg .b32 t; again: "
    for i, (_, offset) in enumerate(places):
        names = ", ".join(f"${4 * i + j}" for j in range(4))
        text += f"ld.relaxed.sys.global.v4.b32 {{{names}}}, [${count + i}+{offset}]; "
    text += "mov.b32 t, $0; " + "".join(f"max.u32 t, t, ${i}; " for i in range(1, count))
    text += f"setp.eq.u32 p, t, {NOTHING}; @p bra again; }}"
    constraints = ",".join(["=&r"] * count + ["l"] * len(places))
    return _asm(text, constraints, [address for address, _ in places], count)


def _asm(text, constraints, operands, num_results):
    """Emit PTX; its results, if any, are 32-bit words."""
    i32 = ir.IntegerType.get_signless(32)
    kind = llvm.StructType.get_literal([i32] * num_results)
    kind = kind if num_results else ir.Type.parse("!llvm.void")
    constraints += ",~{memory}"
    out = llvm.inline_asm(kind, operands, text, constraints, has_side_effects=True)
    return [llvm.extractvalue(i32, out, [i]) for i in range(num_results)]
