"""The Hopper kernels of linear attention for head dims that are not multiples of 64."""

import compare
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from linear_cases import cotangents, problem
from test_hopper_linear_sequences import described, emulated, hold_with_states, on_gpu

from jattn import linear
from jattn.pallas import linear_chunk as mosaic
from jattn.pallas.linear_widths import resized

GATED, KDA, GLA = "gated_delta_rule", "kda", "gla"


def make(op, H, D, **options):
    options = dict(B=1, T=70, K=1, N=1, dtype=ml_dtypes.bfloat16, qk_l2norm=op != GLA) | options
    return problem(op, H=H, D=D, **options)


CASES = {
    "by head": (GATED, make(GATED, 40, 65)),
    "by channel": (KDA, make(KDA, 24, 72, gate="softplus", beta_activation="sigmoid2")),
}
GPU_CASES = CASES | {
    "by channel, bounded, groups": (KDA, make(KDA, 96, 200, gate="bounded", N=4, K=2)),
    "by channel, without the delta rule": (GLA, make(GLA, 8, 8)),
}


@pytest.mark.parametrize("name, layout", [("by head", "vk"), ("by channel", "kv")])
def test_is_the_recurrence_and_its_gradient(name, layout, capfd):
    op, p = CASES[name]
    turn = (lambda x: np.swapaxes(x, -1, -2)) if layout == "vk" else np.asarray
    arrays = p.arrays() | dict(initial_state=turn(p.initial_state))
    x = described(op, type(p)(**(vars(p) | arrays)), state_layout=layout)
    assert mosaic.why_not(x.problem) is None
    dout, dfinal = cotangents(p)
    (out, state), got = emulated(x, capfd, dout, turn(dfinal))
    got = {name: x.astype(jnp.float32) if name == "initial_state" else x for name, x in got.items()}
    hold_with_states(p, out, turn(state), got | dict(initial_state=turn(got["initial_state"])), dout, dfinal)


def test_resized():
    x = np.arange(6).reshape(2, 3)
    np.testing.assert_array_equal(resized(x, 2), x[:, :2])
    np.testing.assert_array_equal(resized(x, 3, 2), [[0, 1], [3, 4], [0, 0]])
    assert resized(x, 2, 3) is x and resized(None, 4) is None


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_CASES)
def test_every_case_on_a_gpu(name):
    op, p = GPU_CASES[name]
    dout, dfinal = cotangents(p)
    (out, state), got = on_gpu(op, p, p.arrays(), dout, dfinal)
    hold_with_states(p, out, state, got, dout, dfinal)


@pytest.mark.gpu
def test_normalised_on_a_gpu():
    x = jax.nn.softplus(jax.random.normal(jax.random.key(0), (1, 300, 2, 128), jnp.bfloat16))
    run = lambda name: jax.jit(lambda x: linear.linear_attention(x, x, x, normalize=True, implementation=name))(x)  # noqa: E731
    wide = np.asarray(x, np.float64)[0].swapaxes(0, 1)
    weights = np.tril(wide @ wide.swapaxes(1, 2)) / np.sqrt(128)
    truth = (weights @ wide / (weights.sum(-1, keepdims=True) + 1e-10)).swapaxes(0, 1)[None]
    compare.check("out", run("mosaic"), truth, [np.asarray(run("xla"))], ml_dtypes.bfloat16)
