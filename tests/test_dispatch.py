"""Which implementation runs: the first that can, or the named one, or none with every reason."""

import re
import types

import jax.numpy as jnp
import pytest

import jattn
from jattn import _dispatch

X = jnp.ones((1, 4, 2, 8))


def implementation(reason=None, config="theirs"):
    """A stand-in with a why_not that gives `reason`, and results that name it."""

    def forward(arrays, context, options, *, unrounded=False):
        assert options.config == config
        return jnp.full_like(arrays.query, 7), jnp.zeros(arrays.query.shape[:3]), None

    return types.SimpleNamespace(
        PLATFORM=None, why_not=lambda problem: reason, why_not_here=lambda: None, choose=lambda problem, given: config,
        forward=forward,
    )


@pytest.fixture
def table(monkeypatch):
    """Sets the implementations of `attention`, in order of preference; "xla" is the real one."""
    real = _dispatch.module

    def put(**modules):
        monkeypatch.setitem(_dispatch._TABLE, "attention", dict.fromkeys(modules, "somewhere"))
        found = {name: module or real("ragged_attention", name) for name, module in modules.items()}
        monkeypatch.setattr(_dispatch, "module", lambda op, name: found[name])

    return put


def test_the_first_that_can_run_runs(table):
    table(fast=implementation(), xla=None)
    assert (jattn.attention(X, X, X) == 7).all()
    told = jattn.explain(X, X, X)
    assert (told.implementation, told.config, told.refused) == ("fast", "theirs", {"xla": "fast is preferred"})


def test_one_that_cannot_is_passed_over_and_says_why(table):
    table(fast=implementation("needs a Hopper GPU"), xla=None)
    assert (jattn.attention(X, X, X) == 1).all()
    told = jattn.explain(X, X, X)
    assert (told.implementation, told.refused) == ("xla", {"fast": "needs a Hopper GPU"})
    assert "runs on xla" in repr(told) and "not fast: needs a Hopper GPU" in repr(told)


def test_a_named_implementation_never_falls_back(table):
    table(fast=implementation("needs a Hopper GPU"), xla=None)
    sentence = "no implementation of jattn.attention can run this call: fast: needs a Hopper GPU"
    with pytest.raises(NotImplementedError, match=f"^{re.escape(sentence)}$"):
        jattn.attention(X, X, X, implementation="fast")
    assert (jattn.attention(X, X, X, implementation="xla") == 1).all()
    told = jattn.explain(X, X, X, implementation="fast")
    assert told.implementation is None and "cannot run" in repr(told)


def test_when_none_can_run_every_reason_is_given(table):
    table(fast=implementation("needs a Hopper GPU"), wide=implementation("needs H = 512"))
    with pytest.raises(NotImplementedError, match="fast: needs a Hopper GPU; wide: needs H = 512"):
        jattn.attention(X, X, X)


def test_an_unknown_name_lists_the_known_ones(table):
    table(fast=implementation(), xla=None)
    with pytest.raises(ValueError, match="implementation='cudnn' is unknown; choose from 'fast', 'xla' or None"):
        jattn.attention(X, X, X, implementation="cudnn")
