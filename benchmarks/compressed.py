"""`./run bench sparse`, the stages of DeepSeek-V4: compression, CSA and HCA whole, the grouped output projection.

On a GPU the shapes of V4-Flash and V4-Pro; on a CPU small ones, to follow changes by. Every stage is gated by a dense
computation of a small shape. Selection and attention over lists alone are stages of `benchmarks.sparse`. The roofline
is what an H200 needs at least: its operations, or its bytes, every row read once a query.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import sparse
from benchmarks.sparse import AGREEMENT, MEMORY, TENSOR
from jattn.compressed import EntryIndex, EntrySource, csa_attention, grouped_output, hca_attention
from jattn.compressed_cache import CompressedCache
from jattn.compressed_tokens import compress

INDEX_HEADS, INDEX_DIM = 64, 128


@dataclasses.dataclass(frozen=True)
class Stage:
    """One call: T new tokens of B sequences behind `past` others; m tokens a block, N heads of D channels."""

    op: str  # "compress", "csa_attention", "hca_attention" or "grouped_output"
    model: str
    B: int
    T: int
    N: int = 64
    D: int = 512
    m: int = 4
    overlap: bool = True
    past: int = 0
    top_k: int = 512
    window: int = 128
    kv_format: str | None = None
    index_heads: int = INDEX_HEADS
    index_dim: int = INDEX_DIM
    groups: int = 8
    rank: int = 1024
    width: int = 4096
    backward: bool = False

    def __str__(self):
        past = f" past{self.past}" if self.past else ""
        heads = f" N{self.N}" if self.op != "compress" else ""
        kind = f" {self.kv_format}" if self.kv_format else ""
        return f"{self.model}: B{self.B} T{self.T}{past}{heads} D{self.D} m{self.m}{kind}"

    @property
    def rows(self):
        return self.B * self.T

    @property
    def slots(self):
        """Entries that a query attends to, the most of them."""
        entries = (self.past + self.T) // self.m
        return min(self.top_k, entries) if self.op == "csa_attention" else entries

    @property
    def flops(self):
        if self.op == "grouped_output":
            return 2 * self.rows * self.groups * self.rank * (self.N // self.groups * self.D + self.width)
        if self.op == "compress":  # a handful a candidate, on no tensor core
            return 0
        forward = 4 * self.rows * self.N * (self.window + self.slots) * self.D
        if self.op == "csa_attention":
            entries = (self.past + self.T / 2) / self.m
            forward += 2 * self.rows * entries * self.index_heads * self.index_dim
        return forward * (3.5 if self.backward else 1)

    @property
    def bytes(self):
        """Tokens once, rows of lists once a query, index keys once a sequence, weights and outputs once."""
        if self.op == "grouped_output":
            weights = self.groups * self.rank * (self.N // self.groups * self.D + self.width)
            return 2 * (weights + self.rows * (self.N * self.D + self.width))
        channels = self.D * (2 if self.overlap else 1)
        tokens = 2 * 4 * self.rows * channels + 2 * self.rows // self.m * self.D
        if self.op == "compress":
            return tokens * (2 if self.backward else 1)
        row = 584 if self.kv_format else 2 * self.D
        seen = self.rows * (self.window + self.slots) * row + 2 * 2 * self.rows * self.N * self.D
        if self.op == "csa_attention":
            seen += 2 * self.B * (self.past + self.T) // self.m * self.index_dim
        return (tokens + seen) * (3 if self.backward else 1)

    @property
    def roofline(self):
        """Seconds on an H200: (of operations, of bytes)."""
        return self.flops / TENSOR, self.bytes / MEMORY


PRO = dict(N=128, top_k=1024, groups=16, width=7168)
HCA = dict(m=128, overlap=False)
LARGE = (
    Stage("compress", "V4 prefill", 1, 4096),
    Stage("compress", "V4 prefill", 1, 4096, **HCA),
    Stage("compress", "V4 index prefill", 1, 4096, D=INDEX_DIM),
    Stage("compress", "V4 training", 1, 4096, backward=True),
    Stage("compress", "V4 decode", 128, 1, past=4099),
    Stage("compress", "V4 decode", 128, 1, past=4099, **HCA),
    Stage("csa_attention", "V4-Flash prefill", 1, 4096),
    Stage("csa_attention", "V4-Pro prefill", 1, 4096, **PRO),
    Stage("csa_attention", "V4-Flash training", 1, 4096, backward=True),
    Stage("csa_attention", "V4-Flash decode", 32, 1, past=65535),
    Stage("csa_attention", "V4-Flash decode", 32, 1, past=65535, kv_format="v4_584"),
    Stage("csa_attention", "V4-Pro decode", 32, 1, past=65535, **PRO),
    Stage("hca_attention", "V4-Flash prefill", 1, 4096, **HCA),
    Stage("hca_attention", "V4-Pro decode", 32, 1, past=65535, **HCA | PRO),
    Stage("grouped_output", "V4-Flash prefill", 1, 4096),
    Stage("grouped_output", "V4-Pro prefill", 1, 4096, **PRO),
    Stage("grouped_output", "V4-Flash decode", 128, 1),
)
_FEW = dict(N=4, index_heads=4, index_dim=32, top_k=32, window=32, groups=2, rank=64, width=128)
SMALL = (
    Stage("compress", "small prefill", 1, 1024),
    Stage("compress", "small prefill", 1, 1024, **HCA),
    Stage("compress", "small training", 1, 1024, backward=True),
    Stage("compress", "small decode", 8, 1, past=1027),
    Stage("csa_attention", "small prefill", 1, 128, **_FEW),
    Stage("csa_attention", "small training", 1, 128, backward=True, **_FEW),
    Stage("csa_attention", "small decode", 4, 1, past=1023, **_FEW),
    Stage("csa_attention", "small decode", 4, 1, past=1023, kv_format="v4_584", **_FEW),
    Stage("hca_attention", "small prefill", 1, 128, **HCA | _FEW | dict(m=16)),
    Stage("hca_attention", "small decode", 4, 1, past=1023, **HCA | _FEW),
    Stage("grouped_output", "small prefill", 1, 128, **_FEW),
)
TINY = dict(B=2, T=21, N=4, D=80, m=4, past=0, top_k=3, window=6, index_heads=2, index_dim=8, groups=2, rank=3, width=5)


def compressed(arguments):
    """Wall time of every stage, with the roofline of an H200."""
    yield from sparse.timed(SMALL, LARGE, gate, call, arguments)


def call(stage, dtype):
    """The compiled function of a stage and its inputs: first what it is differentiated by."""
    forward, inputs = _BUILD[stage.op](stage, dtype)
    if not stage.backward:
        return jax.jit(forward), inputs

    def both(first, *rest):
        out, pull = jax.vjp(lambda first: forward(first, *rest), first)
        return out, pull(out)

    return jax.jit(both), inputs


def gate(stage, dtype):
    """Raises when a small call of the stage is not what a dense computation gives; caches are gated by the tests."""
    small = dataclasses.replace(stage, **TINY, backward=False, kv_format=None)
    run, inputs = call(small, dtype)
    got, want = (jnp.asarray(x, jnp.float32) for x in (run(*inputs), _DENSE[stage.op](small, *inputs)))
    off = float(jnp.max(jnp.abs(got - want)) / jnp.max(jnp.abs(want)))
    if not off <= AGREEMENT[dtype]:
        raise SystemExit(f"{stage.op} {stage}: differs from the dense computation by {off:.1e}; nothing was timed")


def _normal(number, *shape, dtype="float32"):
    return jax.random.normal(jax.random.key(number), shape).astype(dtype)


def _source(stage, number, c):
    """float32, as checkpoints want the projections of a compressor."""
    width = c * (2 if stage.overlap else 1)
    u, z = (_normal(number + i, stage.B, stage.T, width) for i in (0, 1))
    return EntrySource(u, z, _normal(number + 2, stage.m, width), 1 + _normal(number + 3, c) / 8)


def _compress(stage, dtype):
    source, state = _source(stage, 10, stage.D), None
    if stage.past:
        options = dict(ratio=stage.m, overlap=stage.overlap)
        state = _behind(CompressedCache.zeros(stage.B, 0, stage.D, **options), stage.past).tail
    run = functools.partial(compress, overlap=stage.overlap, dtype=jnp.dtype(dtype))
    return lambda source, state: run(source.u, source.z, source.ape, state, norm=source.norm)[0], (source, state)


def _behind(cache, past):
    """As if `past` tokens had been seen: what they were does not matter to the time."""

    def tail(state):
        return dataclasses.replace(state, z=jnp.zeros_like(state.z), length=state.length + past)

    index = None if cache.index_tail is None else tail(cache.index_tail)
    return dataclasses.replace(cache, tail=tail(cache.tail), index_tail=index)


def _attention(stage, dtype):
    lead = stage.B, stage.T
    layer = [_normal(0, *lead, stage.N, stage.D, dtype=dtype), _normal(1, *lead, stage.D, dtype=dtype)]
    layer.append(_source(stage, 10, stage.D))
    options = dict(scale=stage.D**-0.5, window=stage.window, sinks=_normal(3, stage.N))
    cache = None
    if stage.past:
        cache = CompressedCache.zeros(
            stage.B, stage.past + stage.T, stage.D, ratio=stage.m, overlap=stage.overlap, window=stage.window,
            index_dim=stage.index_dim if stage.op == "csa_attention" else None, dtype=dtype, kv_format=stage.kv_format,
        )  # fmt: skip
        cache = _behind(cache, stage.past)
    if stage.op == "csa_attention":
        query = _normal(4, *lead, stage.index_heads, stage.index_dim, dtype=dtype)
        weights = _normal(5, *lead, stage.index_heads)
        layer.append(EntryIndex(query, weights, _source(stage, 20, stage.index_dim)))
        run = functools.partial(csa_attention, top_k=stage.top_k, **options)
    else:
        run = functools.partial(hca_attention, **options)
    if cache is None:
        return lambda layer, cache: run(*layer), (tuple(layer), cache)
    return lambda layer, cache: run(*layer, cache)[0], (tuple(layer), cache)


def _output(stage, dtype):
    out = _normal(0, stage.B, stage.T, stage.N, stage.D, dtype=dtype)
    inner = stage.N // stage.groups * stage.D
    w_a = _normal(1, stage.groups, inner, stage.rank, dtype=dtype) / np.asarray(inner**0.5, dtype)
    return grouped_output, (out, w_a, _normal(2, stage.groups * stage.rank, stage.width, dtype=dtype))


def _dense_compress(stage, source, state):
    c, C = stage.D, source.u.shape[-1]
    found = []
    for i in range(stage.T // stage.m):
        rows = slice(stage.m * i, stage.m * i + stage.m)
        u, z = source.u[:, rows, C - c :], source.z[:, rows, C - c :] + source.ape[:, C - c :]
        if stage.overlap and i:
            rows = slice(stage.m * (i - 1), stage.m * i)
            u = jnp.concatenate([source.u[:, rows, :c], u], 1)
            z = jnp.concatenate([source.z[:, rows, :c] + source.ape[:, :c], z], 1)
        entry = jnp.sum(jax.nn.softmax(z, 1) * u, 1)
        found.append(entry / jnp.sqrt(jnp.mean(entry**2, -1, keepdims=True) + 1e-6) * source.norm)
    return jnp.stack(found, 1)


def _dense_attention(stage, layer, cache):
    query, kv, source, *index = layer
    entries = _dense_compress(stage, source, None)
    t, E = jnp.arange(stage.T), stage.T // stage.m
    near = (t[:, None] >= t) & (t[:, None] - t < stage.window)
    seen = jnp.arange(E) < (t[:, None] + 1) // stage.m
    seen = jnp.broadcast_to(seen, (stage.B, stage.T, E))
    if index:
        keys = _dense_compress(dataclasses.replace(stage, D=stage.index_dim), index[0].source, None)
        products = jnp.einsum("btjc,bec->btje", index[0].query, keys.astype(query.dtype), precision="highest")
        scores = jnp.einsum("btje,btj->bte", jnp.maximum(products, 0), index[0].weights, precision="highest")
        order = jnp.argsort(jnp.argsort(-jnp.where(seen, scores, -jnp.inf), -1), -1)
        seen &= order < stage.top_k
    rows = jnp.concatenate([kv.astype(jnp.float32), entries], 1)
    seen = jnp.concatenate([jnp.broadcast_to(near, (stage.B, *near.shape)), seen], -1)[:, :, None]
    scores = jnp.einsum("btnd,bsd->btns", query.astype(jnp.float32), rows, precision="highest") * stage.D**-0.5
    sink = jnp.broadcast_to(_normal(3, stage.N)[:, None], (*scores.shape[:-1], 1))
    weights = jax.nn.softmax(jnp.concatenate([jnp.where(seen, scores, -jnp.inf), sink], -1), -1)[..., :-1]
    return jnp.einsum("btns,bsd->btnd", weights, rows, precision="highest")


def _dense_output(stage, out, w_a, w_b):
    heads = np.asarray(out, np.float32).reshape(stage.B, stage.T, stage.groups, -1)
    inner = [heads[:, :, g] @ np.asarray(w_a[g], np.float32) for g in range(stage.groups)]
    return np.concatenate(inner, -1) @ np.asarray(w_b, np.float32)


_BUILD = {
    "compress": _compress, "csa_attention": _attention, "hca_attention": _attention, "grouped_output": _output,
}  # fmt: skip
_DENSE = {
    "compress": _dense_compress, "csa_attention": _dense_attention, "hca_attention": _dense_attention,
    "grouped_output": _dense_output,
}  # fmt: skip
