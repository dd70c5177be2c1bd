"""Hopper instructions that Pallas does not offer, or not in the form that a kernel at full speed needs.

Each wrapper is named after its instruction and has an equivalent in plain jnp for interpret mode. Two rules that
nothing checks:

* A value returned by `wgmma_ss` or `wgmma_rs` is *in flight*: the tensor core is still writing its registers. Only
  `wgmma_wait_group` may take it, and returns the value that can be read.
* Between the issue of a product and its wait no branch may diverge within the warpgroup: ptxas answers by running every
  product of the kernel one after the other (warning C7518).

All arrays are in the WGMMA layout: thread `lane` of warp `w` holds, of each 8-column group, columns
`2·(lane % 4) + {0, 1}` of rows `16·w + lane // 4 + {0, 8}`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jattn.pallas._compat import arith, fragmented_array, interpreting, ir, llvm, nvvm, pl, plgpu, utils, vector

WGMMA = plgpu.Layout.WGMMA
ROW = plgpu.Layout.WGMMA.reduce(1)
SCALAR = plgpu.Layout.WG_SPLAT
TILE_ROWS = 64  # rows of every wgmma product
SLAB = 64  # columns of a slab, see `slabs`
_ATOM_BYTES = 8 * 2 * SLAB  # 8 rows of a slab, the period of the swizzle


# --- shared memory matrices -------------------------------------------------------------------------------------------


def slabs(columns: int) -> int:
    """Slabs of a matrix in shared memory, which is kept as `[slabs, rows, 64]`: swizzled rows of 128 bytes.

    A copy of a slab starts at any row of the array in HBM and ends anywhere; matrices tiled by 8 rows would need row
    counts and offsets that are multiples of 8.
    """
    return -(-columns // SLAB)


TRANSFORMS = (plgpu.SwizzleTransform(2 * SLAB),)


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A 16-bit `[rows, columns]` matrix in shared memory, one of several equal slots, as an operand of wgmma.

    `word` is the low half of its matrix descriptor. It is built once (`matrix`) and advanced by one addition per slot:
    building 64-bit descriptors at each product costs 4% at head dim 64.
    """

    ref_of: Callable[[Any], Any]  # slot -> [slabs, rows, 64]
    slot: Any
    rows: int
    columns: int
    slabs_apart: int  # from one slot to the next
    word: Any
    height: int  # rows of the slabs it lies in, of which it may be a part
    first_column: Any = 0  # in interpret mode

    HIGH_WORD = (_ATOM_BYTES >> 4) | (1 << 30)  # from 8 rows to the next 8; 128-byte swizzle

    def at(self, slot) -> "Matrix":
        """The matrix in another slot (from a matrix that is in slot 0)."""
        if interpreting():
            return dataclasses.replace(self, slot=slot)
        step = self.slabs_apart * self._slab_bytes >> 4
        return dataclasses.replace(self, slot=slot, word=self.word + slot * step)

    def part(self, number, *, rows: int) -> "Matrix":
        """The `number`-th `rows` rows, a multiple of 8."""
        cut = dataclasses.replace(self, rows=rows)
        if interpreting():
            ref_of = self.ref_of
            return dataclasses.replace(cut, ref_of=lambda slot: ref_of(slot).at[:, pl.ds(number * rows, rows)])
        return dataclasses.replace(cut, word=self.word + number * (rows * 2 * SLAB >> 4))

    def slab(self, number) -> "Matrix":
        """The 64 columns of one slab; for matrices in a single slot."""
        cut = dataclasses.replace(self, columns=SLAB)
        if interpreting():
            ref_of = self.ref_of
            return dataclasses.replace(cut, ref_of=lambda slot: ref_of(slot).at[pl.ds(number, 1)])
        return dataclasses.replace(cut, word=self.word + number * (self._slab_bytes >> 4))

    def columns_from(self, first, *, columns: int) -> "Matrix":
        """Columns from `first` on, a multiple of 32; of an operand contracted over its rows. At most 64 if they begin
        within a slab, whose end they may then not pass."""
        cut = dataclasses.replace(self, columns=columns)
        if interpreting():
            return dataclasses.replace(cut, first_column=first)
        slab, inside = lax.div(first, np.int32(SLAB)), lax.rem(first, np.int32(SLAB))
        return dataclasses.replace(cut, word=self.word + slab * (self._slab_bytes >> 4) + inside * 2 // 16)

    def read(self) -> jax.Array:
        """All of it, in interpret mode, ordered like the asynchronous read it stands for."""
        ref = self.ref_of(self.slot)
        value = jnp.concatenate([ref[i] for i in range(ref.shape[0])], axis=1)
        value = lax.dynamic_slice_in_dim(value, self.first_column, self.columns, axis=1)
        plgpu.commit_smem()
        return value

    @property
    def _slab_bytes(self) -> int:
        return self.height * SLAB * 2

    def offsets_along_columns(self) -> list[int]:
        """Descriptor offsets of the 16-wide steps along the columns."""
        return [((i % 4) * 32 + (i // 4) * self._slab_bytes) >> 4 for i in range(-(-self.columns // 16))]

    def offsets_along_rows(self) -> list[int]:
        """Descriptor offsets of the 16-high steps along the rows."""
        return [(2 * _ATOM_BYTES * i) >> 4 for i in range(self.rows // 16)]


def matrix(ref_of: Callable, rows: int, columns: int, *, along_rows: bool = False, slots_apart: int = 1) -> Matrix:
    """The matrix in slot 0 of `ref_of(slot)`, whose slots are `slots_apart` matrices apart.

    `along_rows=True`: a right operand contracted over its rows (V); else contraction is over the columns (Q, K).
    """
    result = Matrix(ref_of, 0, rows, columns, slabs(columns) * slots_apart, None, rows)
    if interpreting():
        return result

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(TRANSFORMS),), return_type=scalar_type())
    def descriptor_word(_, ref):
        address = llvm.ptrtoint(i32(), utils.memref_ptr(ref))
        word = llvm.lshr(llvm.and_(address, _int(0x3FFFF)), _int(4))
        if along_rows:
            word = llvm.or_(word, _int(result._slab_bytes >> 4 << 16))  # from 64 columns to the next 64
        return scalar_array(word)

    return dataclasses.replace(result, word=descriptor_word(ref_of(0)))


@dataclasses.dataclass(frozen=True)
class Stack:
    """A 16-bit matrix of 64 columns in shared memory, `[parts, slabs, 64, 64]`: 64 rows of each part, of the slab that
    `number` says. A left operand of `wgmma_tt`."""

    ref: Any
    number: Any
    word: Any

    def read(self) -> jax.Array:
        parts = [self.ref[i, pl.ds(self.number, 1)][0] for i in range(self.ref.shape[0])]
        plgpu.commit_smem()
        return jnp.concatenate(parts, axis=0)

    def offsets_along_rows(self) -> list[int]:
        parts, count, rows, _ = self.ref.shape
        part_bytes = count * rows * 2 * SLAB
        return [(part * part_bytes + 2 * _ATOM_BYTES * i) >> 4 for part in range(parts) for i in range(rows // 16)]


def stack(ref, base, slot, number) -> Stack:
    """The matrix in `ref[slot]`, `[slots, parts, slabs, 64, 64]`; `base` is the address word of slot 0 (`address`)."""
    if interpreting():
        return Stack(ref.at[slot], number, None)
    _, parts, count, rows, _ = ref.shape
    slab_words = rows * 2 * SLAB >> 4
    return Stack(ref.at[0], number, base + (slot * (parts * count) + number) * slab_words)


def address(ref):
    """The low word of a matrix descriptor at the start of `ref`, or None in interpret mode."""
    if interpreting():
        return None

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(TRANSFORMS),), return_type=scalar_type())
    def word(_, ref):
        start = llvm.ptrtoint(i32(), utils.memref_ptr(ref))
        return scalar_array(llvm.lshr(llvm.and_(start, _int(0x3FFFF)), _int(4)))

    return word(ref)


# --- wgmma ------------------------------------------------------------------------------------------------------------


def wgmma_ss(a: Matrix, b: Matrix, dtype) -> jax.Array:
    """`a @ b.T` as float32 `[64, b.rows]`, in flight (`wgmma.mma_async`, both operands in shared memory)."""
    if interpreting():
        return lax.dot_general(a.read(), b.read(), (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)

    @plgpu.inline_mgpu(arg_types=(SCALAR, SCALAR), return_type=_array_type(b.rows))
    def issue(_, a_word, b_word):
        steps = zip(a.offsets_along_columns(), b.offsets_along_columns(), strict=True)
        return _mma_async(
            n=b.rows, dtype=dtype, accumulator=None, a_word=a_word.registers[()], b_word=b_word.registers[()],
            steps=list(steps), b_along_rows=False,
        )  # fmt: skip

    return issue(a.word, b.word)


def wgmma_nn(accumulator, a: Matrix, b: Matrix, dtype) -> jax.Array:
    """`accumulator + a @ b`, in flight (`wgmma.mma_async`, both operands in shared memory)."""
    if interpreting():
        return accumulator + jnp.dot(a.read(), b.read(), preferred_element_type=jnp.float32)

    @plgpu.inline_mgpu(arg_types=(WGMMA, SCALAR, SCALAR), return_type=_array_type(b.columns))
    def issue(_, accumulator, a_word, b_word):
        accumulator = accumulator.to_layout(fragmented_array.WGMMA_LAYOUT_ACC_32BIT)
        accumulator = fragmented_array.optimization_barrier(accumulator)
        return _mma_async(
            n=b.columns, dtype=dtype, accumulator=list(accumulator.registers.flat), a_word=a_word.registers[()],
            b_word=b_word.registers[()], b_along_rows=True,
            steps=list(zip(a.offsets_along_columns(), b.offsets_along_rows(), strict=True)),
        )  # fmt: skip

    return issue(accumulator, a.word, b.word)


def wgmma_rs(accumulator, a, b: Matrix) -> jax.Array:
    """`accumulator + a @ b` for 16-bit `a [64, b.rows]` in registers, in flight (`wgmma.mma_async`)."""
    if interpreting():
        return accumulator + jnp.dot(a, b.read(), preferred_element_type=jnp.float32)
    dtype = a.dtype

    @plgpu.inline_mgpu(arg_types=(WGMMA, WGMMA, SCALAR), return_type=_array_type(b.columns))
    def issue(_, accumulator, a, b_word):
        accumulator = accumulator.to_layout(fragmented_array.WGMMA_LAYOUT_ACC_32BIT)
        accumulator, a = fragmented_array.optimization_barrier(accumulator, a)
        return _mma_async(
            n=b.columns, dtype=dtype, accumulator=list(accumulator.registers.flat), a_registers=pairs(a),
            b_word=b_word.registers[()], steps=[(None, o) for o in b.offsets_along_rows()], b_along_rows=True,
        )  # fmt: skip

    return issue(accumulator, a, b.word)


def wgmma_rs_nt(a, b: Matrix, accumulator=None) -> jax.Array:
    """`accumulator + a @ b.T` (None: 0) as float32 `[64, b.rows]` for 16-bit `a [64, b.columns]` in registers, in
    flight (`wgmma.mma_async`). With columns that are no multiple of 16, a has zeros up to the next one."""
    if interpreting():
        kept = a[:, : b.columns]
        product = lax.dot_general(kept, b.read(), (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        return product if accumulator is None else accumulator + product
    dtype, onto = a.dtype, [] if accumulator is None else [accumulator]

    @plgpu.inline_mgpu(arg_types=(WGMMA, SCALAR, *[WGMMA] * len(onto)), return_type=_array_type(b.rows))
    def issue(_, a, b_word, *onto):
        onto = [x.to_layout(fragmented_array.WGMMA_LAYOUT_ACC_32BIT) for x in onto]
        barred = fragmented_array.optimization_barrier(a, *onto)
        a, *onto = barred if onto else [barred]
        return _mma_async(
            n=b.rows, dtype=dtype, accumulator=list(onto[0].registers.flat) if onto else None, a_registers=pairs(a),
            b_word=b_word.registers[()], steps=[(None, o) for o in b.offsets_along_columns()], b_along_rows=False,
        )  # fmt: skip

    return issue(a, b.word, *onto)


def wgmma_tt(a: "Stack", b: Matrix, dtype) -> jax.Array:
    """`a.T @ b` as float32 `[64, b.columns]`, in flight (`wgmma.mma_async`, both operands in shared memory)."""
    if interpreting():
        return lax.dot_general(a.read(), b.read(), (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)

    @plgpu.inline_mgpu(arg_types=(SCALAR, SCALAR), return_type=_array_type(b.columns))
    def issue(_, a_word, b_word):
        return _mma_async(
            n=b.columns, dtype=dtype, accumulator=None, a_word=a_word.registers[()], b_word=b_word.registers[()],
            steps=list(zip(a.offsets_along_rows(), b.offsets_along_rows(), strict=True)), a_along_rows=True,
            b_along_rows=True,
        )  # fmt: skip

    return issue(a.word, b.word)


def wgmma_wait_group(pending: int, *arrays) -> tuple[jax.Array, ...]:
    """Waits until at most `pending` products are in flight; returns the arrays, now readable (`wgmma.wait_group`).

    The arrays pass through the instruction, so that nothing which reads them can move before it.
    """
    if interpreting():
        return arrays

    @plgpu.inline_mgpu(
        arg_types=(WGMMA,) * len(arrays), return_type=tuple(_array_type(x.shape[1]) for x in arrays)
    )
    def wait(_, *arrays):
        groups = [list(x.to_layout(fragmented_array.WGMMA_LAYOUT_ACC_32BIT).registers.flat) for x in arrays]
        registers = sum(groups, [])
        registers = _tied(registers, f"wgmma.wait_group.sync.aligned {pending};")
        results = []
        for group in groups:
            results.append(_array(registers[: len(group)]))
            registers = registers[len(group) :]
        return tuple(results)

    return wait(*arrays)


def _mma_async(
    *, n, dtype, accumulator, b_word, steps, b_along_rows, a_word=None, a_registers=(), a_along_rows=False
):  # fmt: skip
    """Fence, one instruction per 16-wide step in a single block, commit. Descriptors are (word + offset, constant)."""
    count = n // 2
    operands = [*(accumulator or ()), *([a_word] if a_word is not None else a_registers), b_word]
    ties = [str(i) for i in range(len(accumulator or ()))]
    first = count + len(ties)
    element = {"bfloat16": "bf16", "float16": "f16"}[np.dtype(dtype).name]
    result = "{" + ",".join(f"${i}" for i in range(count)) + "}"
    text = "{ .reg .pred keep, zero; .reg .b32 la, lb; .reg .b64 da, db;\n"
    text += "setp.ne.b32 zero, 0, 0; setp.ne.b32 keep, 1, 0;\n"
    b_operand = first + (1 if a_word is not None else len(a_registers))
    for i, (a_offset, b_offset) in enumerate(steps):
        text += f"add.s32 lb, ${b_operand}, {b_offset}; mov.b64 db, {{lb, {Matrix.HIGH_WORD}}};\n"
        if a_word is not None:
            text += f"add.s32 la, ${first}, {a_offset}; mov.b64 da, {{la, {Matrix.HIGH_WORD}}};\n"
            a, transposed = "da", f"{int(a_along_rows)}, {int(b_along_rows)}"
        else:
            a, transposed = "{" + ",".join(f"${first + 4 * i + j}" for j in range(4)) + "}", f"{int(b_along_rows)}"
        scale_d = "zero" if accumulator is None and i == 0 else "keep"
        instruction = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{element}.{element}"
        text += f"{instruction} {result}, {a}, db, {scale_d}, 1, 1, {transposed};\n"
    text += "}"
    nvvm.wgmma_fence_aligned()
    kinds = ["r"] * (len(operands) - len(ties))
    outputs = llvm.inline_asm(
        llvm.StructType.get_literal([_vector()] * count), operands, text,
        ",".join(["=f"] * count + ties + kinds), asm_dialect=0, has_side_effects=True,
    )  # fmt: skip
    llvm.inline_asm(ir.Type.parse("!llvm.void"), [], "wgmma.commit_group.sync.aligned;", "", has_side_effects=True)
    return _array([llvm.extractvalue(_vector(), outputs, [i]) for i in range(count)])


# --- named barriers ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class NamedBarriers:
    """`count` of the 16 hardware barriers, from id `first`: `arrivals` warpgroups arrive, one syncs, at each phase.

    Cheaper than an mbarrier for a hand-over between warpgroups (2 to 4% of a forward kernel), but it holds a single
    phase: who arrives must know that the last phase is over. Ids 0 to 4 belong to Mosaic.
    """

    first: int
    count: int
    arrivals: int
    emulated: Any = None

    def __post_init__(self):
        if not 5 <= self.first <= self.first + self.count <= 16:
            raise ValueError(f"named barriers {self.first} to {self.first + self.count - 1} are outside 5 to 15")

    @property
    def emulation(self):
        return plgpu.Barrier(num_arrivals=self.arrivals, num_barriers=self.count)

    def bind(self, emulated) -> "NamedBarriers":
        return dataclasses.replace(self, emulated=emulated)

    def bar_arrive(self, index) -> None:
        """Announces without waiting (`bar.arrive`)."""
        if self.emulated is not None:
            return plgpu.barrier_arrive(self.emulated.at[index])
        _bar("arrive", self.first + index, 128 * (self.arrivals + 1))

    def bar_sync(self, index) -> None:
        """Waits for the announcements (`bar.sync`)."""
        if self.emulated is not None:
            return plgpu.barrier_wait(self.emulated.at[index])
        _bar("sync", self.first + index, 128 * (self.arrivals + 1))


def _bar(operation: str, index, threads: int) -> None:
    @plgpu.inline_mgpu(arg_types=(SCALAR,))
    def bar(_, index):
        text = f"bar.{operation} $0, {threads};"
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [index.registers[()]], text, "r", has_side_effects=True)

    bar(jnp.asarray(index, jnp.int32))


def fence_async_shared() -> None:
    """What this thread wrote to shared memory is seen by products and TMA that a later barrier lets begin
    (`fence.proxy.async`)."""
    if interpreting():
        plgpu.commit_smem()
        return

    @plgpu.inline_mgpu()
    def fence(_):
        text = "fence.proxy.async.shared::cta;"
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [], text, "", has_side_effects=True)

    fence()


def bar_warp_sync() -> None:
    """Keeps what follows behind what precedes in the compiler's order of the instructions (`bar.warp.sync`)."""
    if interpreting():
        return
    plgpu.inline_mgpu()(lambda _: utils.warp_barrier())()


# --- scalar instructions, for use inside `plgpu.inline_mgpu` on the registers of an array -----------------------------


def ex2(x):
    """`ex2.approx.ftz.f32`: two to the power x, relative error 2^-22."""
    return _instruction("ex2.approx.ftz.f32 $0, $1;", x)


def lg2(x):
    """`lg2.approx.ftz.f32`: the logarithm to base two, absolute error 2^-22 near 1, else relative error 2^-22."""
    return _instruction("lg2.approx.ftz.f32 $0, $1;", x)


def fma(a, b, c):
    """`fma.rn.ftz.f32`: a·b + c, rounded once."""
    return _instruction("fma.rn.ftz.f32 $0, $1, $2, $3;", a, b, c)


def add(a, b):
    """`add.ftz.f32`."""
    return _instruction("add.ftz.f32 $0, $1, $2;", a, b)


def sub(a, b):
    """`sub.ftz.f32`."""
    return _instruction("sub.ftz.f32 $0, $1, $2;", a, b)


def mul(a, b):
    """`mul.ftz.f32`."""
    return _instruction("mul.ftz.f32 $0, $1, $2;", a, b)


def fmax(a, b):
    """`max.f32`."""
    return _instruction("max.f32 $0, $1, $2;", a, b)


def mul_hi(a, b):
    """`mul.hi.u32`: the upper 32 bits of the product."""
    return llvm.inline_asm(i32(), [a, b], "mul.hi.u32 $0, $1, $2;", "=r,r,r")


def shfl_bfly(x, mask: int):
    """`shfl.sync.bfly.b32`: the value of the lane whose number differs in the bits of `mask`."""
    return _instruction(f"shfl.sync.bfly.b32 $0, $1, {mask}, 31, -1;", x)


def vote_any(condition):
    """`vote.sync.any`: whether the condition (i1) holds in any lane of the warp, as i1."""
    text = "{ .reg .pred p, q; setp.ne.b32 p, $1, 0; vote.sync.any.pred q, p, -1; selp.b32 $0, 1, 0, q; }"
    found = llvm.inline_asm(i32(), [arith.extui(i32(), condition)], text, "=r,r", has_side_effects=True)
    return arith.cmpi(arith.CmpIPredicate.ne, found, _int(0))


def thread_index():
    """`%tid.x`, read where it stands: what is derived from a hoisted one would stay in registers through the loop."""
    return llvm.inline_asm(i32(), [], "mov.u32 $0, %tid.x;", "=r", has_side_effects=True)


def lane_position():
    """This thread's (first row, first column) in the WGMMA layout, as i32."""
    thread = thread_index()
    lane = arith.remui(thread, _int(32))
    warp = arith.remui(arith.divui(thread, _int(32)), _int(4))
    row = arith.addi(arith.muli(warp, _int(16)), arith.divui(lane, _int(4)))
    return row, arith.muli(arith.remui(lane, _int(4)), _int(2))


# --- registers of arrays ----------------------------------------------------------------------------------------------


def scalars(array) -> list:
    """The registers of a 32-bit array in the WGMMA or ROW layout as scalars. Element `i` of a `[64, n]` array is in row
    `row_of(i)` (0 or 1: the thread's first or second row) and column `column_of(i)` after the thread's first column."""
    if array.layout == fragmented_array.WGMMA_LAYOUT:
        array = array.to_layout(fragmented_array.WGMMA_LAYOUT_ACC_32BIT)
    zero = ir.DenseI64ArrayAttr.get([0])
    return [vector.extract(r, dynamic_position=[], static_position=zero) for r in array.registers.flat]


def row_of(i: int) -> int:
    return (i // 2) % 2


def column_of(i: int) -> int:
    return 8 * (i // 4) + i % 2


def from_scalars(values: list, signed: bool | None = None):
    """The `[64, 2 · len(values)]` 32-bit array in the WGMMA layout whose registers these are (see `scalars`)."""
    return _array([vector.broadcast(ir.VectorType.get((1,), x.type), x) for x in values], signed)


def from_pairs(words: list, element):
    """The 16-bit `[64, 4 · len(words)]` array in the WGMMA layout whose registers these words are (see `pairs`);
    `element` is its MLIR type."""
    layout = fragmented_array.WGMMA_LAYOUT
    values = np.empty(layout.registers_shape((TILE_ROWS, 4 * len(words))), dtype=object)
    for ix, word in zip(np.ndindex(values.shape), words, strict=True):
        one = vector.broadcast(ir.VectorType.get((1,), i32()), word)
        values[ix] = vector.bitcast(ir.VectorType.get((2,), element), one)
    return fragmented_array.FragmentedArray(_registers=values, _layout=layout, _is_signed=None)


def rows_from_scalars(values: list, like, signed: bool | None = None):
    """The 32-bit `[64]` array in the ROW layout whose two registers these are; `like` is any array of that layout."""
    registers = np.empty(like.registers.shape, dtype=object)
    for i, ix in enumerate(np.ndindex(registers.shape)):
        registers[ix] = vector.broadcast(ir.VectorType.get((1,), values[i].type), values[i])
    return fragmented_array.FragmentedArray(_registers=registers, _layout=like.layout, _is_signed=signed)


def zeros(columns: int) -> jax.Array:
    """float32 `[64, columns]`."""
    return plgpu.layout_cast(jnp.zeros((TILE_ROWS, columns), jnp.float32), WGMMA)


def row_numbers() -> jax.Array:
    """0 to 63, int32 in the ROW layout."""
    return plgpu.broadcasted_iota(jnp.int32, (TILE_ROWS,), 0, layout=ROW)


def numbers(first, axis: int, columns: int) -> jax.Array:
    """int32 `[64, columns]`: `first` plus the element's row (axis 0) or column (axis 1). Unlike `first + iota`, whose
    iota the compiler keeps in registers through a loop, it costs an addition where it is used."""
    if interpreting():
        return first + lax.broadcasted_iota(jnp.int32, (TILE_ROWS, columns), axis)

    @plgpu.inline_mgpu(
        arg_types=(SCALAR,), return_type=plgpu.ShapeDtypeStruct((TILE_ROWS, columns), jnp.int32, layout=WGMMA)
    )
    def count(_, first):
        mine = arith.addi(first.registers[()], lane_position()[axis])
        offset = column_of if axis else lambda i: 8 * row_of(i)
        return from_scalars([arith.addi(mine, integer(offset(i))) for i in range(columns // 2)], signed=True)

    return count(jnp.asarray(first, jnp.int32))


def constant(value: float):
    """A float32 constant."""
    return arith.constant(ir.F32Type.get(), ir.FloatAttr.get(ir.F32Type.get(), float(value)))


def integer(value: int):
    """An i32 constant, from its value or its bits."""
    return _int(value - 2**32 if value >= 2**31 else value)


def _array(registers: list, signed: bool | None = None):
    layout = fragmented_array.WGMMA_LAYOUT_ACC_32BIT
    shape = (TILE_ROWS, 2 * len(registers))
    values = np.empty(layout.registers_shape(shape), dtype=object)
    for i, ix in enumerate(np.ndindex(values.shape)):
        values[ix] = registers[i]
    array = fragmented_array.FragmentedArray(_registers=values, _layout=layout, _is_signed=signed)
    return array.to_layout(fragmented_array.WGMMA_LAYOUT)


def _tied(registers: list, text: str) -> list:
    """The registers after an instruction that reads and writes them as far as the compiler knows."""
    count = len(registers)
    outputs = llvm.inline_asm(
        llvm.StructType.get_literal([_vector()] * count), registers, text,
        ",".join(["=f"] * count + [str(i) for i in range(count)]), asm_dialect=0, has_side_effects=True,
    )  # fmt: skip
    return [llvm.extractvalue(_vector(), outputs, [i]) for i in range(count)]


def pairs(array) -> list:
    """The registers of a 16-bit array, two elements to a 32-bit word."""
    words = ir.VectorType.get((1,), i32())
    zero = ir.DenseI64ArrayAttr.get([0])
    return [
        vector.extract(vector.bitcast(words, r), dynamic_position=[], static_position=zero)
        for r in array.registers.flat
    ]


def _instruction(text: str, *operands):
    return llvm.inline_asm(ir.F32Type.get(), list(operands), text, "=f" + ",f" * len(operands))


def i32():
    return ir.IntegerType.get_signless(32)


def _int(value: int):
    return arith.constant(i32(), value)


def _vector():
    return ir.VectorType.get((1,), ir.F32Type.get())


def _array_type(columns: int):
    return plgpu.ShapeDtypeStruct((TILE_ROWS, columns), jnp.float32, layout=WGMMA)


def row_type(dtype=jnp.float32):
    """The type of a `[64]` array in the ROW layout, for `plgpu.inline_mgpu`."""
    return plgpu.ShapeDtypeStruct((TILE_ROWS,), dtype, layout=ROW)


array_type = _array_type


def scalar_type():
    return plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)


def once() -> jax.Array:
    """1, which the compiler does not know: what a loop takes so often is not mixed with what is around it, for which
    there would be no registers."""
    if interpreting():
        return jnp.int32(1)

    @plgpu.inline_mgpu(return_type=scalar_type())
    def one(_):
        return scalar_array(arith.addi(arith.shrui(thread_index(), integer(16)), integer(1)))

    return one()


def again(x) -> jax.Array:
    """The int32 scalar, of which the compiler does not know that it has seen it: what is made of it is made here, not
    kept in registers from before."""
    if interpreting():
        return x

    @plgpu.inline_mgpu(arg_types=(SCALAR,), return_type=scalar_type())
    def move(_, x):
        word = llvm.inline_asm(i32(), [x.registers[()]], "mov.b32 $0, $1;", "=r,r", has_side_effects=True)
        return scalar_array(word)

    return move(jnp.asarray(x, jnp.int32))


def scalar_array(word):
    return fragmented_array.FragmentedArray.splat(word, (), is_signed=True)
