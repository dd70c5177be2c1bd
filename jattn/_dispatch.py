"""Which implementation runs a call: one table, one rule.

An implementation is a module with

    why_not(problem) -> str | None
    choose(problem, config) -> config
    forward(arrays, context, options) -> (out, lse, rest)
    backward(arrays, context, options, out, lse, rest, dout, dlse) -> gradients

where `rest` is whatever its forward hands to its backward. `None` picks the first that can run; a named one runs or is
refused with the reason.
"""

import dataclasses
import importlib
from typing import Any

from jattn._problem import Problem

#: op -> implementation name -> module, in order of preference.
_TABLE = {
    "attention": {"xla": "jattn.reference.attention"},
    "ragged_attention": {"xla": "jattn.reference.attention"},
}


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Which implementation a call gets, its tile config, and why the others were refused."""

    problem: Problem
    implementation: str | None
    config: Any
    refused: dict[str, str]

    def __repr__(self):
        p = self.problem
        lines = [f"jattn.{p.op}: B={p.B} T={p.T} S={p.S} N={p.N} K={p.K} H={p.H} D={p.D} {p.dtype}"]
        features = ("mask", "bias", "score_mod", "soft_cap", "sinks", "dropout", "deterministic", "sequences")
        asked = [f"{f}={getattr(p, f)}" for f in features if getattr(p, f) not in (None, False)]
        lines += [f"  with {', '.join(asked)}"] if asked else []
        lines += [f"  runs on {self.implementation}, {self.config}" if self.implementation else "  cannot run"]
        return "\n".join(lines + [f"  not {name}: {reason}" for name, reason in self.refused.items()])


def names(op: str) -> tuple[str, ...]:
    return tuple(_TABLE[op])


def module(op: str, name: str):
    return importlib.import_module(_TABLE[op][name])


def explain(problem: Problem, implementation: str | None, config) -> Explanation:
    """Resolves `implementation` for `problem`.

    Raises:
        ValueError: an unknown name; TypeError: a config of another implementation.
    """
    known = names(problem.op)
    if implementation is not None and implementation not in known:
        choices = ", ".join(map(repr, known))
        raise ValueError(f"implementation={implementation!r} is unknown; choose from {choices} or None")
    refused, chosen = {}, None
    for name in known:
        reason = module(problem.op, name).why_not(problem)
        if implementation not in (None, name):
            reason = reason or f"implementation={implementation!r} was asked for"
        if reason is None and chosen is None:
            chosen = name
        elif reason is None:
            reason = f"{chosen} is preferred"
        if chosen != name:
            refused[name] = reason
    picked = module(problem.op, chosen).choose(problem, config) if chosen else None
    return Explanation(problem, chosen, picked, refused)


def resolve(problem: Problem, implementation: str | None, config) -> tuple[str, Any]:
    """`(name, config)` of the implementation that runs, or NotImplementedError with each one's reason."""
    found = explain(problem, implementation, config)
    if found.implementation is None:
        wanted = [implementation] if implementation else list(found.refused)
        reasons = "; ".join(f"{name}: {found.refused[name]}" for name in wanted)
        raise NotImplementedError(f"no implementation of jattn.{problem.op} can run this call: {reasons}")
    return found.implementation, found.config
