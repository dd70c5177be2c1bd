"""`python -m jattn`: versions, devices, which implementation a call gets and why, and a check of attention on them."""

import dataclasses
import importlib.metadata
import platform
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np

import jattn


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    dtype: str
    T: int
    S: int
    N: int
    K: int
    H: int
    options: dict

    def arrays(self):
        """query, key, value and the cotangent of the output, rounded to the case's dtype."""
        rng = np.random.default_rng(0)
        shapes = [(1, self.T, self.N, self.H), (1, self.S, self.K, self.H), (1, self.S, self.K, self.H)]
        return [jnp.asarray(rng.standard_normal(shape), self.dtype) for shape in [*shapes, shapes[0]]]

    def visible(self):
        """bool `[T, S]`"""
        t, s = np.arange(self.T)[:, None], np.arange(self.S)
        left, right = self.options.get("local_window_size", (self.S, self.S))
        return (t - left <= s) & (s <= t + (0 if self.options.get("is_causal") else right))


CASES = (
    Case("full", "float32", 129, 200, 2, 2, 64, {}),
    Case("causal, window (40, 0)", "float32", 200, 200, 2, 1, 40, {"is_causal": True, "local_window_size": (40, 0)}),
    Case("causal, 4 heads to one", "bfloat16", 257, 257, 4, 1, 64, {"is_causal": True}),
)


def dense(case):
    """Output and gradients by the definition, in float64 with the whole score matrix."""
    query, key, value, dout = (np.asarray(x[0], np.float64) for x in case.arrays())
    group = case.N // case.K
    scale = case.H**-0.5
    key_of, value_of = np.repeat(key, group, 1), np.repeat(value, group, 1)
    scores = np.where(case.visible(), scale * np.einsum("tnh,snh->nts", query, key_of), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = np.einsum("nts,snh->tnh", weights, value_of)
    dweights = np.einsum("tnh,snh->nts", dout, value_of)
    dscores = weights * (dweights - (weights * dweights).sum(-1, keepdims=True))
    dkey = scale * np.einsum("nts,tnh->snh", dscores, query)
    dvalue = np.einsum("nts,tnh->snh", weights, dout)
    over_group = [x.reshape(case.S, case.K, group, case.H).sum(2) for x in (dkey, dvalue)]
    return out, scale * np.einsum("nts,snh->tnh", dscores, key_of), *over_group


def errors(function, case, truth, **options):
    """max|x - truth| / max|truth| of the output and the three gradients."""
    *inputs, dout = case.arrays()
    out, pullback = jax.vjp(lambda *inputs: function(*inputs, **case.options, **options), *inputs)
    got = [np.asarray(x[0], np.float64) for x in (out, *pullback(dout))]
    return [float(np.max(np.abs(x - y)) / np.max(np.abs(y))) for x, y in zip(got, truth, strict=True)]


def explanation(case, **options):
    return jattn.explain(*case.arrays()[:3], **case.options, **options)


def implementations(case):
    """The names of those that can run the case."""
    told = explanation(case)
    names = filter(None, [told.implementation, *told.refused])
    return [name for name in names if explanation(case, implementation=name).implementation]


def check(case):
    """A row per implementation; True when every error is at most twice the dense jnp computation's, plus 2 eps."""
    truth = dense(case)
    eps = float(jnp.finfo(case.dtype).eps)
    with jax.numpy_dtype_promotion("standard"):  # jax.nn needs it for bfloat16
        limits = [2 * error + 2 * eps for error in errors(jax.nn.dot_product_attention, case, truth)]
    names = implementations(case)
    good = bool(names)
    for name in names:
        found = errors(jattn.attention, case, truth, implementation=name)
        right = all(error <= limit for error, limit in zip(found, limits, strict=True))
        row = f"  {f'{case.dtype} {case.name}':<35}{name:<10}" + "".join(f"{error:9.1e}" for error in found)
        print(row, "  ok" if right else "  FAILED")
        good &= right
    return good


def installed(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def describe():
    print(f"jattn {jattn.__version__} on {platform.system()} {platform.machine()}, Python {platform.python_version()}")
    print("  " + ", ".join(f"{name} {installed(name)}" for name in ("jax", "jaxlib", "numpy", "flax")))
    print("devices")
    for kind, count in Counter((device.platform, device.device_kind) for device in jax.devices()).items():
        print(f"  {count} x {kind[1]} ({kind[0]})")
    print(explanation(CASES[-1]))


def main():
    describe()
    print(f"{'self-check, relative error':<47}" + "".join(f"{name:>9}" for name in ("out", "dq", "dk", "dv")))
    if not all([check(case) for case in CASES]):
        print("attention is wrong on this machine", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
