"""Linear attention against the recurrence in float64: every op, both modes, all gradients."""

import ml_dtypes
import pytest
from linear_cases import check, problem

MODEL = dict(qk_l2norm=True, beta_activation="sigmoid2")
CASES = {
    "kda bounded": ("kda", dict(gate="bounded", **MODEL)),
    "kda softplus": ("kda", dict(gate="softplus", **MODEL)),
    "kda any decay": ("kda", dict(gates="mixed", K=4)),
    "gated_delta_rule": ("gated_delta_rule", dict(gate="softplus", **MODEL)),
    "delta_rule": ("delta_rule", dict(**MODEL)),
    "gla": ("gla", dict(gates="forgetting")),
    "simple_gla": ("simple_gla", dict(gates="mixed")),
    "linear_attention": ("linear_attention", dict(scale=0.1)),
}


@pytest.mark.parametrize("name", CASES)
def test_is_the_recurrence(name):
    op, options = CASES[name]
    check(op, problem(op, **options))


@pytest.mark.parametrize("op", ["kda", "gated_delta_rule"])
def test_bfloat16(op):
    check(op, problem(op, dtype=ml_dtypes.bfloat16, gate="bounded", **MODEL), modes=("chunk",))
