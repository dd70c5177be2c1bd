"""Which implementation runs a call: one table, one rule.

An implementation is a module with

    PLATFORM: str | None                           the only platform it lowers for, as `lax.platform_dependent` names it
    why_not(problem) -> str | None                 why it cannot run this call, anywhere
    why_not_here() -> str | None                   why it cannot run on this machine
    choose(problem, config) -> config
    forward(arrays, context, options, *, unrounded=False) -> (out, lse, rest)
    why_not_backward(problem) -> str | None        why its backward cannot run this call
    backward(arrays, context, options, out, lse, rest, dout, dlse) -> gradients
    SUMS: bool                                     whether those of scale, bias and the modifier's arrays are among them

where `rest` is whatever its forward hands to its backward, and `unrounded` asks for out in the accumulator's dtype. One
without a backward for the call, or without such gradients, borrows the next one's in the table, after the last the
first one's. A module that cannot be imported is a reason like any other.
Over a cache there are no gradients, and forward(arrays, options) -> (out, lse).

`None` picks the first that can run, and where it lowers for one platform only, the next one for all others; a named one
runs or is refused with the reason.
"""

import dataclasses
import importlib
from typing import Any

import jax

from jattn._problem import Options, Problem

_LINEAR = ("kda", "gated_delta_rule", "delta_rule", "gla", "simple_gla", "linear_attention")
#: op -> implementation name -> module, in order of preference.
_TABLE = {
    "attention": {"mosaic": "jattn.pallas.attention", "xla": "jattn.reference.attention"},
    "ragged_attention": {"mosaic": "jattn.pallas.attention", "xla": "jattn.reference.attention"},
    "decode_attention": {"mosaic": "jattn.pallas.decode", "xla": "jattn.reference.paged"},
    "paged_attention": {"mosaic": "jattn.pallas.decode", "xla": "jattn.reference.paged"},
    "sequence_decode_attention": {"xla": "jattn.reference.spread"},
    "sequence_paged_attention": {"xla": "jattn.reference.spread"},
    **{
        f"linear.{op}": {"mosaic": "jattn.pallas.linear_chunk", "xla": "jattn.reference.linear"} for op in _LINEAR
    },
    **{
        f"linear.{op}_step": {"mosaic": "jattn.pallas.linear_step", "xla": "jattn.reference.linear_step"}
        for op in _LINEAR
    },
}
_BACKENDS = {"cuda": "gpu"}  # platform -> its name as a default backend, where that differs


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Which implementation a call gets, its tile config, whose backward it has, and why the others were refused."""

    problem: Problem
    implementation: str | None
    config: Any
    refused: dict[str, str]
    backward: str | None = None
    sums: str | None = None

    def __repr__(self):
        p = self.problem
        lines = [f"jattn.{p.op}: B={p.B} T={p.T} S={p.S} N={p.N} K={p.K} H={p.H} D={p.D} {p.dtype}"]
        features = (
            "mask", "bias", "score_mod", "soft_cap", "sinks", "dropout", "deterministic", "sequences", "segments",
            "checkpoints", "qk_l2norm", "gate", "beta_activation", "mode",
        )  # fmt: skip
        asked = [f"{f}={value}" for f in features if (value := getattr(p, f, None)) not in (None, False)]
        lines += [f"  with {', '.join(asked)}"] if asked else []
        lines += [f"  runs on {self.implementation}, {self.config}" if self.implementation else "  cannot run"]
        lines += [f"  its backward on {self.backward}"] if self.backward != self.implementation else []
        lines += [f"  gradients of scale, bias and arrays on {self.sums}"] if self.sums != self.backward else []
        return "\n".join(lines + [f"  not {name}: {reason}" for name, reason in self.refused.items()])


def names(op: str) -> tuple[str, ...]:
    return tuple(_TABLE[op])


def module(op: str, name: str):
    return importlib.import_module(_TABLE[op][name])


def why_not(problem: Problem, name: str) -> str | None:
    """Why the implementation cannot run this call on any machine, or None."""
    try:
        found = module(problem.op, name)
    except Exception as error:  # under another jax, anything
        return f"cannot be imported with jax {jax.__version__}: {type(error).__name__}: {error}"
    return found.why_not(problem)


def explain(problem: Problem, implementation: str | None, config) -> Explanation:
    """Resolves `implementation` for `problem` on this machine.

    Raises:
        ValueError: an unknown name; TypeError: a config of another implementation.
    """
    op, known = problem.op, names(problem.op)
    if implementation is not None and implementation not in known:
        choices = ", ".join(map(repr, known))
        raise ValueError(f"implementation={implementation!r} is unknown; choose from {choices} or None")
    refused, chosen = {}, None
    for name in known:
        reason = why_not(problem, name) or module(op, name).why_not_here()
        if implementation not in (None, name):
            reason = reason or f"implementation={implementation!r} was asked for"
        if reason is None and chosen is None:
            chosen = name
        elif reason is None:
            reason = f"{chosen} is preferred"
        if chosen != name:
            refused[name] = reason
    if chosen is None:
        return Explanation(problem, None, None, refused)
    picked = module(op, chosen).choose(problem, config)
    pair = _with_backward(problem, chosen)
    return Explanation(problem, chosen, picked, refused, pair, _with_sums(problem, pair))


def resolve(problem: Problem, options: Options, implementation: str | None, config) -> Options:
    """`options` with the implementation that runs, or NotImplementedError with each one's reason."""
    found = explain(problem, implementation, config)
    name = found.implementation
    if name is None and implementation is not None and _is_for_another_machine(problem, implementation):
        name = implementation
    if name is None:
        wanted = [implementation] if implementation else list(found.refused)
        reasons = "; ".join(f"{name}: {found.refused[name]}" for name in wanted)
        raise NotImplementedError(f"no implementation of jattn.{problem.op} can run this call: {reasons}")
    elsewhere = None
    if implementation is None and module(problem.op, name).PLATFORM is not None:
        elsewhere = _options(problem, options, _anywhere(problem, name), None)
    return dataclasses.replace(_options(problem, options, name, config), elsewhere=elsewhere)


def _options(problem, options, name, config):
    pair = _with_backward(problem, name)
    return dataclasses.replace(
        options, implementation=name, config=module(problem.op, name).choose(problem, config),
        backward=None if pair == name else _options(problem, options, pair, None),
        sums=None if _with_sums(problem, name) == name else _options(problem, options, _with_sums(problem, name), None),
    )


def _with_backward(problem, name):
    """The first implementation from `name` on, and around, whose backward runs this call."""
    at = names(problem.op).index(name)
    rest = names(problem.op)[at:] + names(problem.op)[:at]
    return next((other for other in rest if _why_not_backward(problem, other) is None), name)


def _with_sums(problem, name):
    """The first implementation from `name` on that has the gradients which sum over rows, where there are any."""
    if name is None or not (problem.traced_scale or problem.bias or problem.score_mod):
        return name
    rest = names(problem.op)[names(problem.op).index(name) :]
    return next((other for other in rest if getattr(module(problem.op, other), "SUMS", True)), name)


def _why_not_backward(problem, name):
    found = module(problem.op, name)
    return found.why_not_backward(problem) if hasattr(found, "why_not_backward") else "has none"


def _anywhere(problem, name):
    """The first implementation after `name` that runs this call on every platform."""
    rest = names(problem.op)[names(problem.op).index(name) + 1 :]
    return next(n for n in rest if why_not(problem, n) is None and module(problem.op, n).PLATFORM is None)


def _is_for_another_machine(problem, name):
    """Whether all that is missing is the platform: a program may be traced here and lowered for that platform."""
    platform = None if why_not(problem, name) else module(problem.op, name).PLATFORM
    return platform is not None and _BACKENDS.get(platform, platform) != jax.default_backend()
