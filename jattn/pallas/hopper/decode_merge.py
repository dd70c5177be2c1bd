"""Merges the parts of a tile's result over the splits of its keys, by whoever wrote the last of them.

The arithmetic is that of `jattn.merge`, in float32 and in the order of the splits, so that it does not matter who does
it. A warpgroup reads the parts in units of four columns, eight splits at a time.
"""

import jax.numpy as jnp
from jax import lax

from jattn.pallas._compat import arith, interpreting, ir, llvm, pl, plgpu, scf, utils
from jattn.pallas.hopper import memory, ptx
from jattn.pallas.hopper.decode_plan import LOG2E
from jattn.pallas.hopper.lists import i32
from jattn.pallas.hopper.ptx import SCALAR, integer

_FIRST_BARRIER = 5  # of the 16 hardware barriers, one a warpgroup
_AT_ONCE = 8
_COLUMNS = 4


def arrive(counters, entry, count, warpgroup):
    """Announces, by one warpgroup, that all it has written is there; whether it was the last of `count` to do so, in
    which case all that the others had written can be read. `counters` int32 `[n]` in HBM begin at 0.

    The emulation has no atomic additions, and there nobody is the last.
    """
    if interpreting():
        return jnp.bool_(False)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR, SCALAR), return_type=ptx.scalar_type())
    def announce(_, ref, entry, count, warpgroup):
        text = "{ .reg .pred p, q; .reg .b32 n; bar.sync $4, 128; setp.eq.u32 p, $3, 0; mov.b32 n, -1;"
        text += " @p fence.acq_rel.gpu; @p atom.relaxed.gpu.global.add.u32 n, [$1], 1; @p fence.acq_rel.gpu;"
        text += " add.s32 n, n, 1; setp.eq.and.s32 q, n, $2, p; bar.red.or.pred q, $4, 128, q; selp.b32 $0, 1, 0, q; }"
        thread = arith.remui(ptx.thread_index(), integer(128))
        barrier = arith.addi(warpgroup.registers[()], integer(_FIRST_BARRIER))
        operands = [memory._counter(ref, entry), count.registers[()], thread, barrier]
        return ptx.scalar_array(llvm.inline_asm(ptx.i32(), operands, text, "=r,l,r,r,r", has_side_effects=True))

    return announce(counters, *(jnp.asarray(x, jnp.int32) for x in (entry, count, warpgroup))) != 0


def merge(parts, part_lse, sinks, out, lse, *, part, count, batch, head, token, tokens: int, queries) -> None:
    """Merges parts `[part, part + count)` of tokens `[token, token + tokens)`, by one warpgroup; what lies past T is
    left out.

    Args:
        parts, part_lse: float32 `[X, T, K, G, D]` and `[X, T, K, G]` in HBM.
        sinks: float32 `[1, K · G]` or None; they join the denominator of tokens before `queries`.
        out, lse: `[B, T, K, G, D]`, of 16 bits, and float32 `[B, T, K, G]`.
    """
    if interpreting():
        return _emulated(parts, part_lse, sinks, out, lse, part, count, batch, head, token, tokens, queries)
    references = (parts, part_lse, out, lse) + (() if sinks is None else (sinks,))
    scalars = [jnp.asarray(x, jnp.int32) for x in (part, count, batch, head, token, queries)]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(references) + (SCALAR,) * len(scalars))
    def run(_, *operands):
        references, scalars = operands[:-6], operands[-6:]
        _Merge(references, [x.registers[()] for x in scalars], tokens).run()

    run(*references, *scalars)


class _Merge:
    """What one thread does of a `merge`."""

    def __init__(self, references, scalars, tokens):
        (self.parts, self.part_lse, self.out, self.lse), self.sinks = references[:4], references[4:]
        self.part, self.count, self.batch, self.head, self.token, self.queries = scalars
        _, self.T, self.K, self.G, self.D = ir.MemRefType(self.parts.type).shape
        self.units = tokens * self.G * self.D // _COLUMNS
        self.element = ir.MemRefType(self.out.type).element_type

    def run(self):
        thread = arith.remui(ptx.thread_index(), integer(128))
        index = ir.IndexType.get()
        bounds = [arith.constant(index, n) for n in (0, -(-self.units // 128), 1)]
        loop = scf.ForOp(*bounds)
        with ir.InsertionPoint(loop.body):
            turn = arith.index_cast(ptx.i32(), loop.induction_variable)
            unit = arith.addi(thread, arith.muli(turn, integer(128)))
            row, column = (f(unit, integer(self.D // _COLUMNS)) for f in (arith.divui, arith.remui))
            t = arith.addi(self.token, arith.divui(row, integer(self.G)))
            exists = arith.andi(_less(unit, integer(self.units)), _less(t, integer(self.T)))
            branch = scf.IfOp(exists)
            with ir.InsertionPoint(branch.then_block):
                self.one_unit(t, arith.remui(row, integer(self.G)), arith.muli(column, integer(_COLUMNS)))
                scf.yield_([])
            scf.yield_([])

    def one_unit(self, t, g, column):
        """Four columns of one row."""
        lse_kind, parts_kind = (ir.MemRefType(x.type) for x in (self.part_lse, self.parts))
        lse_base, parts_base = (utils.memref_ptr(x) for x in (self.part_lse, self.parts))
        first = memory._flat(lse_kind, (self.part, t, self.head, g))
        rows = self.T * self.K * self.G  # from split to split

        def places(step):
            """Row of each split of a step, and whether there is such a split."""
            for i in range(_AT_ONCE):
                split = arith.addi(step, integer(i))
                exists = _less(split, self.count)
                split = arith.select(exists, split, arith.subi(self.count, integer(1)))
                yield arith.addi(first, arith.muli(memory._wide(split), memory._int64(rows))), exists

        def lse_of(place):
            return _ld_global(memory._element_pointer(lse_base, ir.F32Type.get(), place), 1)[0]

        def top(step, values):
            found = [lse_of(place) for place, _ in places(step)]
            for x in found:
                values = [ptx.fmax(values[0], x)]
            return values

        (m,) = self.over_splits(top, [ptx.constant(-float("inf"))])
        sink = self.sink(t, g)
        m = m if sink is None else ptx.fmax(m, sink)
        empty = arith.cmpf(arith.CmpFPredicate.OEQ, m, ptx.constant(-float("inf")))
        shift = arith.select(empty, ptx.constant(0.0), m)

        def weight(x):
            return ptx.ex2(ptx.mul(ptx.sub(x, shift), ptx.constant(LOG2E)))

        def add(step, state):
            total, *sums = state
            mine = list(places(step))
            loaded = [
                (lse_of(place), _ld_global(self.pointer(parts_kind, parts_base, place, column), _COLUMNS))
                for place, _ in mine
            ]
            for (x, values), (_, exists) in zip(loaded, mine, strict=True):
                w = arith.select(exists, weight(x), ptx.constant(0.0))
                total = ptx.add(total, w)
                values = [arith.select(exists, value, ptx.constant(0.0)) for value in values]
                sums = [ptx.fma(w, value, y) for value, y in zip(values, sums, strict=True)]
            return [total, *sums]

        total, *sums = self.over_splits(add, [ptx.constant(0.0)] * (1 + _COLUMNS))
        total = total if sink is None else ptx.add(total, weight(sink))
        self.write(t, g, column, m, total, sums)

    def pointer(self, kind, base, row, column):
        at = arith.addi(arith.muli(row, memory._int64(self.D)), memory._wide(column))
        return memory._element_pointer(base, kind.element_type, at)

    def over_splits(self, body, state):
        """Folds `body(first split, state)` over the steps."""
        steps = arith.divui(arith.addi(self.count, integer(_AT_ONCE - 1)), integer(_AT_ONCE))
        index = ir.IndexType.get()
        loop = scf.ForOp(
            arith.constant(index, 0), arith.index_cast(index, steps), arith.constant(index, 1), iter_args=state
        )
        with ir.InsertionPoint(loop.body):
            step = arith.index_cast(ptx.i32(), loop.induction_variable)
            scf.yield_(body(arith.muli(step, integer(_AT_ONCE)), list(loop.inner_iter_args)))
        return list(loop.results)

    def sink(self, t, g):
        if not self.sinks:
            return None
        (sinks,) = self.sinks
        head = memory._wide(arith.addi(arith.muli(self.head, integer(self.G)), g))
        found = llvm.load(ir.F32Type.get(), memory._element_pointer(utils.memref_ptr(sinks), ir.F32Type.get(), head))
        return arith.select(_less(t, self.queries), found, ptx.constant(-float("inf")))

    def write(self, t, g, column, m, total, sums):
        seen = arith.cmpf(arith.CmpFPredicate.OGT, total, ptx.constant(0.0))
        inverse = arith.select(seen, ptx._instruction("rcp.approx.ftz.f32 $0, $1;", total), ptx.constant(0.0))
        sums = [ptx.mul(x, inverse) for x in sums]
        convert = f"cvt.rn.{'bf16x2' if self.element == ir.BF16Type.get() else 'f16x2'}.f32 $0, $2, $1;"
        words = [llvm.inline_asm(ptx.i32(), pair, convert, "=r,f,f") for pair in (sums[:2], sums[2:])]
        row = memory._flat(ir.MemRefType(self.lse.type), (self.batch, t, self.head, g))
        yes = arith.constant(ir.IntegerType.get_signless(1), 1)
        target = self.pointer(ir.MemRefType(self.out.type), utils.memref_ptr(self.out), row, column)
        memory._store_if(yes, target, 0, words)
        log = ptx.fma(ptx._instruction("lg2.approx.ftz.f32 $0, $1;", total), ptx.constant(1 / LOG2E), m)
        log = arith.select(seen, log, ptx.constant(-float("inf")))
        first = arith.cmpi(arith.CmpIPredicate.eq, column, integer(0))
        place = memory._element_pointer(utils.memref_ptr(self.lse), ir.F32Type.get(), row)
        memory._store_if(first, place, 0, [log])


def _less(x, y):
    return arith.cmpi(arith.CmpIPredicate.slt, x, y)


def _ld_global(pointer, count: int) -> list:
    """One or four float32 from L2, where other multiprocessors have written them (`ld.global.cg`)."""
    if count == 1:
        text, kinds, kind = "ld.global.cg.f32 $0, [$1];", "=f,l", ir.F32Type.get()
        return [llvm.inline_asm(kind, [pointer], text, kinds, has_side_effects=True)]
    text, kinds = "ld.global.cg.v4.f32 {$0, $1, $2, $3}, [$4];", "=f,=f,=f,=f,l"
    kind = llvm.StructType.get_literal([ir.F32Type.get()] * 4)
    four = llvm.inline_asm(kind, [pointer], text, kinds, has_side_effects=True)
    return [llvm.extractvalue(ir.F32Type.get(), four, [i]) for i in range(4)]


def _emulated(parts, part_lse, sinks, out, lse, part, count, batch, head, token, tokens, queries):
    """`merge` in interpret mode."""
    group = parts.shape[3]

    def one_token(t, _):
        def lse_of(s):
            return part_lse[part + s, t, head]

        m = lax.fori_loop(0, count, lambda s, m: jnp.maximum(m, lse_of(s)), jnp.full((group,), -jnp.inf, jnp.float32))
        sink = None
        if sinks is not None:
            sink = jnp.where(t < queries, sinks[0, pl.ds(head * group, group)], -jnp.inf)
            m = jnp.maximum(m, sink)
        shift = jnp.where(m == -jnp.inf, 0.0, m)

        def add(s, state):
            total, accumulator = state
            w = jnp.exp(lse_of(s) - shift)
            return total + w, accumulator + w[:, None] * parts[part + s, t, head]

        zeros = jnp.zeros((group,), jnp.float32), jnp.zeros(parts.shape[3:], jnp.float32)
        total, accumulator = lax.fori_loop(0, count, add, zeros)
        total = total if sink is None else total + jnp.exp(sink - shift)
        seen = total > 0
        out[batch, t, head] = (accumulator * jnp.where(seen, 1 / total, 0.0)[:, None]).astype(out.dtype)
        lse[batch, t, head] = jnp.where(seen, m + jnp.log(total), -jnp.inf)

    lax.fori_loop(token, jnp.minimum(token + tokens, i32(parts.shape[1])), one_token, None)
