"""Linear attention against the recurrence in float64: every op, both modes, all gradients."""

import ml_dtypes
import pytest
from linear_cases import check, problem

MODEL = dict(qk_l2norm=True, beta_activation="sigmoid2")
BOTH, CHUNK = ("chunk", "recurrent"), ("chunk",)
CASES = {
    "kda bounded": ("kda", BOTH, dict(gate="bounded", **MODEL)),
    "kda clipped": ("kda", BOTH, dict(gate="clipped", **MODEL)),
    "kda any decay": ("kda", CHUNK, dict(gates="mixed", K=4)),
    "gated_delta_rule": ("gated_delta_rule", BOTH, dict(gate="softplus", **MODEL)),
    "gated_delta_rule clipped": ("gated_delta_rule", BOTH, dict(gate="clipped", lower_bound=-0.5)),
    "delta_rule": ("delta_rule", CHUNK, dict(**MODEL)),
    "gla": ("gla", CHUNK, dict(gates="forgetting")),
    "simple_gla": ("simple_gla", BOTH, dict(gates="mixed")),
    "linear_attention": ("linear_attention", CHUNK, dict(scale=0.1)),
}


@pytest.mark.parametrize("name", CASES)
def test_is_the_recurrence(name):
    op, modes, options = CASES[name]
    check(op, problem(op, **options), modes)


@pytest.mark.parametrize("op", ["kda", "gated_delta_rule"])
def test_bfloat16(op):
    check(op, problem(op, dtype=ml_dtypes.bfloat16, gate="bounded", **MODEL), CHUNK)
