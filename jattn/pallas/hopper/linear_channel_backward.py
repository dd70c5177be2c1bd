"""The backward of KDA and GLA on compute capability 9.0: four kernels in a row.

    linear_channel_prepare             queries and keys decayed, again; A and T are known
    linear_channel_backward_scan       the walk from the last chunk to the first
    linear_channel_backward_chunk      products with states, chunk by chunk
    linear_channel_backward_scores     gradients through scores, sums over tokens, norms

Nothing is left to the caller but the gate and the activation of β, and sums over a group's heads. Measured on an H200
together with the forward, H = D = 128: 1.412 ms for T = 8192 and 32 heads, 2.609 ms for B = 4, T = 4096; of a first
version, predicted 1.95 and 3.7 ms, measured 1.745 and 3.26.
"""

from jattn.pallas.hopper import (
    linear_channel_backward_chunk,
    linear_channel_backward_scan,
    linear_channel_backward_scores,
    linear_channel_prepare,
)
from jattn.pallas.hopper.linear_plan import Gradients, Plan


def launch(plan: Plan, inputs, residuals, dout, dfinal, *, multiprocessors: int, interpret=False) -> Gradients:
    """Gradients of `Inputs`, from the cotangents of the output `[B, T, N, D]` and of the final state, float32 in the
    call's layout."""
    prepared = linear_channel_prepare.launch(
        plan, inputs, multiprocessors=multiprocessors, interpret=interpret, scores=residuals.scores,
        inverse=residuals.inverse,
    )  # fmt: skip
    dz, dinitial, dstates = linear_channel_backward_scan.launch(
        plan, inputs, prepared, dout, dfinal, multiprocessors=multiprocessors, interpret=interpret
    )
    parts, dv = linear_channel_backward_chunk.launch(
        plan, inputs, prepared, residuals.states, dout, dz, dstates, interpret=interpret
    )
    dq, dk, dg, dbeta = linear_channel_backward_scores.launch(plan, inputs, parts, interpret=interpret)
    return Gradients(dq, dk, dz if dv is None else dv, dg, dbeta, dinitial)
