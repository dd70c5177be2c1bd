"""Backward of softmax attention on compute capability 9.0 (H100, H200): dq, dk and dv in one kernel, five products.

A thread block owns a tile of keys of one key/value head and walks the query blocks that see them:

    sᵀ = k · q[block]ᵀ          dpᵀ = v · dout[block]ᵀ                        (tensor core, both at once)
    pᵀ = exp(sᵀ − lse)          dsᵀ = pᵀ · (dpᵀ − delta)
    dv += pᵀ · dout[block]      dk += dsᵀ · q[block]       dq[block] += ds · k

Everything is kept transposed. One warpgroup copies (`backward_producer`), two compute: with tiles of 128 keys, which
they divide (`backward_narrow`), or for wide heads of 64 keys, of which they divide the columns (`backward_wide`).

dq is summed over key tiles in float32 by TMA reductions in L2, in an order that changes from run to run, and its last
bits with it. A deterministic plan counts additions: a tile waits until those behind it have added to the block of dq.
Sources: FlashAttention-2 and -3 (Dao, 2023; Shah et al., 2024).
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax import lax

from jattn.pallas._compat import kernel_in_place, mapped_in_turn, pl, plgpu
from jattn.pallas.hopper import backward_narrow, backward_wide
from jattn.pallas.hopper.backward_plan import Inputs, Plan
from jattn.pallas.hopper.backward_producer import produce


def _kernel(
    plan: Plan,
    inputs: Inputs,
    # outputs (HBM); what is added to comes first
    dq,  # float32 [B, T, N, H]
    added,  # int32 [B · N · query blocks · warpgroups]: how often has been added to parts of dq; None: in any order
    dk,  # [B, S, K, H]
    dv,  # [B, S, K, D]
    **scratch,  # shared memory and barriers: see `scratch` of producer and consumer
):
    x = SimpleNamespace(
        plan=plan, **vars(inputs), dq=dq, added=added, dk=dk, dv=dv, **scratch, block=lax.axis_index("block"),
        warpgroup=lax.axis_index("warpgroup"),
    )  # fmt: skip
    rounds, consumers = x.table.shape[0] - 2, plan.config.WARPGROUPS
    x.items, x.zero = x.table[rounds, x.block], x.table[rounds + 1, x.block]

    @pl.when(x.warpgroup == consumers)
    def _():
        plgpu.set_max_registers(24, action="decrease")
        produce(x)

    @pl.when(x.warpgroup < consumers)
    def _():
        plgpu.set_max_registers(240, action="increase")
        _consumer(plan).consume(x)


def _consumer(plan):
    return backward_wide if plan.wide else backward_narrow


def launch(plan: Plan, inputs: Inputs, *, interpret=False):
    """Runs the kernel: `(dq [B, T, N, H], dk [B, S, K, H], dv [B, S, K, D])`."""

    def run(inputs):
        dq, dk, dv = _launch(plan, inputs, interpret)
        scale = plan.scale if inputs.scale is None else inputs.scale
        return (dq * scale).astype(plan.result_dtype), dk, dv

    return mapped_in_turn(run, unrolled=bool(interpret))(inputs)


def _launch(plan, inputs, interpret):
    """dq is float32 and unscaled."""
    consumers = plan.config.WARPGROUPS
    operands, structure = jax.tree.flatten(inputs)

    def body(*refs, **allocations):
        read, (dq, *added, dk, dv) = jax.tree.unflatten(structure, refs[: len(operands)]), refs[len(operands) :]
        _kernel(plan, read, dq, added[0] if added else None, dk, dv, **allocations)

    adders = (plan.tiles * consumers,) if interpret else ()
    buffers = [jnp.zeros((*adders, plan.B, plan.T, plan.N, plan.H), jnp.float32)]
    if plan.deterministic:
        buffers.append(jnp.zeros(plan.B * plan.N * plan.query_blocks * consumers, jnp.int32))
    results = kernel_in_place(
        body,
        name="jattn_attention_backward",
        out_type=tuple(jax.ShapeDtypeStruct((plan.B, plan.S, plan.K, n), plan.result_dtype) for n in (plan.H, plan.D)),
        scratch=_consumer(plan).scratch(plan),
        grid={"block": inputs.table.shape[1]},
        warpgroups=consumers + 1,
        interpret=interpret,
        approximate=plan.mod is None and plan.rule is None,
    )(operands, buffers)
    return results[0].sum(0) if interpret else results[0], *results[-2:]
