"""The next 1 to 32 tokens of linear attention on compute capability 9.0 (H100, H200), on states that stay in place.

A thread block owns some columns of one head's state S [H, D], in registers, and walks the tokens:

    S̃ = Diag(exp g) S;   r = kᵀ S̃;   u = β (v − r);   o = qᵀ S̃ + (q · k) u;   S = S̃ + k uᵀ

Both products read S̃, so that a token is one pass over the registers; columns do not know of one another. Everything is
float32. Nothing is staged: blocks of a multiprocessor are in different phases of load, arithmetic and store.

Floor: S once in and once out, 131 kB for each head and sequence of H = D = 128, at the 4.3 TB/s of a copy: 0.125 ms for
4096 of them. Prediction: 0.140 ms (90%), of 64 columns a block, three of them on a multiprocessor, each with 32 kB of
loads in flight; arithmetic is some 1500 cycles of the 7000 that a state takes. Measured on an H200: KDA 0.151 ms (83%),
gated delta rule 0.143 (88%).

Source: the recurrences of Kimi Team, "Kimi Linear" (2025); Yang et al., "Gated Delta Networks" (2024).
"""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jattn.pallas._compat import kernel_in_place, mapped_in_turn, pl, plgpu
from jattn.pallas.hopper import linear_gates as gates
from jattn.pallas.hopper.lists import i32

_WARPS, _VECTOR = 4, 4
_ELEMENTS = 8192  # of a block's part of the state: 64 registers a thread


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is compiled in."""

    B: int
    T: int
    N: int
    K: int
    H: int
    D: int
    places: int  # P
    options: Any  # the call's `Options`
    columns: int  # of D, of a block

    @property
    def by_rows(self) -> bool:
        """Whether states lie in memory as [H, D]; else as [D, H]."""
        return self.options.state_layout == "kv"

    @property
    def parts(self) -> int:
        return self.D // self.columns

    @property
    def layout(self):
        """Of a part, as it lies in memory: rows are 16 bytes a thread, of 64 bytes or more together."""
        tiling, warps = _layout(self.columns if self.by_rows else None)
        return plgpu.Layout.TILED(tiling, warp_dims=(warps,), lane_dims=(-3, -2), vector_dim=-1)

    @property
    def keys(self):
        """Of what there is one of for each of H."""
        return self.layout.reduce(1 if self.by_rows else 0)

    @property
    def values(self):
        """Of what there is one of for each of D."""
        return self.layout.reduce(0 if self.by_rows else 1)


def columns_of(H: int, D: int) -> int:
    """Columns of a block: as many as its registers hold, in equal parts."""
    return next(n for n in (128, 64, 32) if D % n == 0 and (H * n <= _ELEMENTS or n == 32))


def _layout(columns):
    """Tiling of [H, D] whose warps divide the columns, or of [D, H] whose warps divide the rows."""
    if columns is None:
        return plgpu.Tiling(((16, 32), (4, 32), (_VECTOR,))), -5
    mine = columns // _WARPS
    rows = 32 * _VECTOR // mine
    return plgpu.Tiling(((rows, columns), (rows, mine), (_VECTOR,))), -4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """The kernel's inputs in HBM; None where the call has none."""

    query: Any  # [B, T, K, H]
    key: Any  # [B, T, K, H]
    value: Any  # [B, T, N, D]
    g: Any = None  # [B, T, N, H] or [B, T, N]
    beta: Any = None  # [B, T, N]
    scale: Any = None  # float32 [1]
    A_log: Any = None  # float32 [N]
    dt_bias: Any = None  # float32 [N, H] or [N]
    indices: Any = None  # int32 [B]
    lengths: Any = None  # int32 [B]


# --- kernel -----------------------------------------------------------------------------------------------------------


def _kernel(
    plan: Plan,
    inputs: Inputs,
    state,  # [P, N, H, D] or [P, N, D, H]
    out,  # [B, T, N, D]
):
    block = lax.axis_index("block")
    part, rest = lax.rem(block, i32(plan.parts)), lax.div(block, i32(plan.parts))
    head, batch = lax.rem(rest, i32(plan.N)), lax.div(rest, i32(plan.N))
    x = SimpleNamespace(plan=plan, **vars(inputs), out=out, head=head, batch=batch)
    x.columns = pl.ds(part * plan.columns, plan.columns)
    place = batch if inputs.indices is None else inputs.indices[batch]
    tokens = i32(plan.T) if inputs.lengths is None else jnp.clip(inputs.lengths[batch], 0, plan.T)
    tokens = jnp.where((place >= 0) & (place < plan.places), tokens, 0)

    @pl.when(tokens > 0)
    def _():
        here = state.at[place, head]
        here = here.at[:, x.columns] if plan.by_rows else here.at[x.columns]
        S = plgpu.load(here, layout=plan.layout, optimized=False).astype(jnp.float32)
        if plan.T == 1:
            S = _token(x, i32(0), S)
        else:
            S = lax.fori_loop(0, tokens, lambda t, S: _token(x, t, S), S)
        here[...] = S.astype(state.dtype)

    zeros = plgpu.layout_cast(jnp.zeros(plan.columns, out.dtype), plan.values)
    if plan.T == 1:
        pl.when(tokens == 0)(lambda: _write(x, i32(0), zeros))
    else:
        lax.fori_loop(tokens, i32(plan.T), lambda t, _: _write(x, t, zeros), None)


def _token(x, t, S):
    """The state after token t, whose output is written.

    Sums over H of rows that are the same in all columns are taken beside the state as well: the compiler computes them
    once, and the result is already where the others are.
    """
    p, at = x.plan, (x.batch, t)
    options, axis = p.options, 0 if p.by_rows else 1
    key_head = lax.div(x.head, i32(p.N // p.K))
    q, k = (_beside_keys(p, _load(array.at[*at, key_head], p.keys)) for array in (x.query, x.key))
    u = _load(x.value.at[*at, x.head, x.columns], p.values)
    if x.g is not None:
        one, rest = (_beside_keys(p, factor) for factor in gates.decay_factors(_log_decay(x, at)))
        S = one * S + rest * S
    total = lambda a: jnp.sum(a, axis=axis)  # noqa: E731
    q_norm, k_norm = (gates.inverse_norm(total(a * a)) if options.qk_l2norm else None for a in (q, k))
    times = lambda a, norm: a if norm is None else a * norm  # noqa: E731
    if options.rule.delta:
        beta = gates.activated(options, x.beta[*at, x.head].astype(jnp.float32))
        u = beta * (u - times(total(k * S), k_norm))
    u = times(u, k_norm)
    scale = x.scale[0] if options.scale is None else jnp.float32(options.scale)
    out = times((total(q * S) + total(q * k) * u) * scale, q_norm)
    _write(x, t, out.astype(x.out.dtype))
    return S + k * lax.broadcast_in_dim(u, S.shape, [1 - axis])


def _log_decay(x, at):
    """float32 [H], or a number."""
    by_channel = x.plan.options.rule.decay == "channel"
    g = _load(x.g.at[*at, x.head], x.plan.keys) if by_channel else x.g[*at, x.head].astype(jnp.float32)
    A_log = None if x.A_log is None else x.A_log[x.head]
    bias = None
    if x.dt_bias is not None:
        bias = _load(x.dt_bias.at[x.head], x.plan.keys) if by_channel else x.dt_bias[x.head]
    return gates.log_decay(x.plan.options, g, A_log, bias)


def _beside_keys(plan, x):
    """[H] beside the state; a number stays one."""
    if x.ndim == 0:
        return x
    shape = (plan.H, plan.columns) if plan.by_rows else (plan.columns, plan.H)
    return lax.broadcast_in_dim(x, shape, [0 if plan.by_rows else 1])


def _load(ref, layout):
    return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)


def _write(x, t, value):
    x.out[x.batch, t, x.head, x.columns] = value


# --- host -------------------------------------------------------------------------------------------------------------


def launch(plan: Plan, inputs: Inputs, state, *, interpret=False):
    """Runs the kernel: `(out [B, T, N, D], state)`."""

    def run(inputs, state):
        operands, structure = jax.tree.flatten(inputs)

        def body(*refs):
            _kernel(plan, jax.tree.unflatten(structure, refs[: len(operands)]), *refs[len(operands) :])

        state, out = kernel_in_place(
            body,
            name="jattn_linear_step",
            out_type=(jax.ShapeDtypeStruct((plan.B, plan.T, plan.N, plan.D), plan.options.out_dtype),),
            scratch={},
            grid={"block": plan.B * plan.N * plan.parts},
            warpgroups=1,
            interpret=interpret,
            approximate=False,
        )(operands, [state])
        return out, state

    return mapped_in_turn(run, unrolled=bool(interpret))(inputs, state)
