"""`./run bench sparse`: latent attention, the indexer and attention over lists, stage by stage, beside their roofline.

On a GPU the shapes of DeepSeek-V3.2, V4 and Kimi K3; on a CPU small ones, to follow changes by. Every stage is gated by
a dense computation of a small shape. The roofline is what an H200 needs at least: its operations at 790 TFLOP/s
bfloat16 (fp8 scores 1145), or its bytes, every listed row read once a query, at 4.3 TB/s.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from benchmarks import timing
from jattn.indexer import indexer_dequantize, indexer_logits, indexer_quantize, indexer_select, topk_select
from jattn.mla import mla_decode, pack_latent, unpack_latent
from jattn.sparse import sparse_attention

TENSOR, TENSOR_FP8, MEMORY = 790e12, 1145e12, 4.3e12  # operations and bytes a second of an H200
AGREEMENT = {"float32": 1e-5, "bfloat16": 3e-2}  # largest max|x - y| / max|y| from the dense computation


@dataclasses.dataclass(frozen=True)
class Stage:
    """One call: `rows` queries of N heads, over S keys or lists of L, rows of H channels and values of D."""

    op: str
    model: str
    rows: int
    N: int
    S: int
    H: int
    D: int = 0
    L: int = 0
    batch: int = 1  # of the rows; each item has keys of its own
    stored: str = ""  # "fp8": rows of 656 bytes, or index codes; "fp4": index codes
    backward: bool = False

    def __str__(self):
        lists = f" L{self.L}" if self.L else ""
        width = f" H{self.H}" + (f" D{self.D}" if self.D not in (0, self.H) else "")
        kind = f" {self.stored}" if self.stored else ""
        return f"{self.model}: B{self.batch} T{self.rows // self.batch} S{self.S} N{self.N}{width}{lists}{kind}"

    @property
    def key_bytes(self):
        """Of one stored key."""
        index = {"fp8": self.H + 4, "fp4": self.H // 2 + self.H // 32, "": 2 * self.H}
        return index[self.stored] if self.op.startswith("indexer") else 656 if self.stored else 2 * self.H

    @property
    def flops(self):
        pairs = self.rows * (self.L or self.S) if self.op in ("mla_decode", "sparse_attention") else self.rows * self.S
        forward = {"topk_select": 0}.get(self.op, 2 * pairs * self.N * (self.H + self.D))
        return forward * (3.5 if self.backward else 1)

    @property
    def bytes(self):
        """Keys, as often as they must be read, and results; queries are small."""
        out = 2 * self.rows * self.N * self.D
        if self.op == "sparse_attention":
            return (self.rows * self.L * self.key_bytes + out) * (3 if self.backward else 1)
        if self.op == "topk_select":
            return self.rows * self.S * (2 if self.stored else 4)
        keys = self.batch * self.S * self.key_bytes
        if self.op == "indexer_logits":
            return keys + 4 * self.rows * self.S
        return keys + (4 * self.rows * self.L if self.op == "indexer_select" else out)

    @property
    def roofline(self):
        """Seconds on an H200: (of operations, of bytes)."""
        fp8 = self.op.startswith("indexer") and self.stored == "fp8"
        return self.flops / (TENSOR_FP8 if fp8 else TENSOR), self.bytes / MEMORY


LARGE = (
    Stage("mla_decode", "V3 decode", 128, 128, 4096, 576, 512, batch=128),
    Stage("mla_decode", "V3 decode, 8 devices", 128, 16, 4096, 576, 512, batch=128),
    Stage("mla_decode", "K3 decode", 64, 96, 32768, 576, 512, batch=64),
    Stage("sparse_attention", "V3.2 decode", 256, 128, 65536, 576, 512, L=2048, batch=1, stored="fp8"),
    Stage("sparse_attention", "V4-Flash decode", 128, 64, 65536, 512, 512, L=640),
    Stage("sparse_attention", "V4-Pro decode", 128, 128, 65536, 512, 512, L=1152),
    Stage("sparse_attention", "V3.2 prefill", 4096, 128, 65536, 576, 512, L=2048),
    Stage("sparse_attention", "V4-Flash prefill", 4096, 64, 65536, 512, 512, L=640),
    Stage("sparse_attention", "V4-Pro prefill", 4096, 128, 65536, 512, 512, L=1152),
    Stage("sparse_attention", "V4-Flash training", 4096, 64, 65536, 512, 512, L=640, backward=True),
    Stage("indexer_logits", "V3.2 prefill", 4096, 64, 131072, 128, stored="fp8"),
    Stage("indexer_logits", "V4 prefill", 4096, 64, 32768, 128, stored="fp4"),
    Stage("indexer_logits", "V3.2 decode", 128, 64, 65536, 128, batch=128, stored="fp8"),
    Stage("indexer_logits", "V4 decode", 128, 64, 16384, 128, batch=128, stored="fp4"),
    Stage("topk_select", "V3.2 prefill", 4096, 1, 131072, 0, L=2048),
    Stage("topk_select", "V4 prefill", 4096, 1, 32768, 0, L=1024, stored="bf16"),
    Stage("indexer_select", "V3.2 prefill", 4096, 64, 131072, 128, L=2048, stored="fp8"),
    Stage("indexer_select", "V4 prefill", 4096, 64, 32768, 128, L=1024, stored="fp4"),
)
SMALL = (
    Stage("mla_decode", "small decode", 4, 8, 2048, 576, 512, batch=4),
    Stage("mla_decode", "small decode", 4, 8, 2048, 576, 512, batch=4, stored="fp8"),
    Stage("sparse_attention", "small decode", 4, 8, 2048, 576, 512, L=256, stored="fp8"),
    Stage("sparse_attention", "small prefill", 128, 8, 2048, 576, 512, L=256),
    Stage("sparse_attention", "small training", 128, 8, 2048, 512, 512, L=256, backward=True),
    Stage("indexer_logits", "small prefill", 128, 8, 2048, 128, stored="fp8"),
    Stage("indexer_logits", "small decode", 4, 8, 2048, 128, batch=4, stored="fp4"),
    Stage("topk_select", "small prefill", 128, 1, 8192, 0, L=256),
    Stage("indexer_select", "small prefill", 128, 8, 2048, 128, L=256),
)
TINY = dict(rows=4, N=3, S=96)  # the shape that a stage is gated by


def sparse(arguments):
    """Wall time of every stage, with the roofline of an H200."""
    yield from timed(SMALL, LARGE, gate, call, arguments)


def timed(small, large, gate, call, arguments):
    """A row for each stage, `small` ones on a CPU, that `gate(stage, dtype)` lets pass; `call(stage, dtype)` gives its
    compiled function and inputs."""
    cpu = jax.default_backend() == "cpu"
    dtype = "float32" if cpu else "bfloat16"
    for stage in small if cpu else large:
        if arguments.only not in f"{stage.op} {stage}":
            continue
        gate(stage, dtype)
        run, inputs = call(stage, dtype)
        jax.block_until_ready(run(*inputs))
        taken = timing.interleaved({"stage": functools.partial(run, *inputs)}, arguments.repeats)["stage"]
        compute, memory = stage.roofline
        yield {
            "stage": stage.op.ljust(16),
            "shape": str(stage),
            "dtype": dtype,
            "pass": "fwd+bwd" if stage.backward else "fwd",
            "implementation": "xla",
            "us": round(taken * 1e6, 1),
            "tflops": round(stage.flops / taken / 1e12, 4),
            "gbytes_per_s": round(stage.bytes / taken / 1e9, 2),
            "h200_compute_us": round(compute * 1e6, 2),
            "h200_memory_us": round(memory * 1e6, 2),
            "h200_bound": "compute" if compute > memory else "memory",
            "times_roofline": "" if cpu else round(taken / max(compute, memory), 1),
        }


def call(stage, dtype):
    """The compiled function of a stage and its inputs."""
    function, inputs = _BUILD[stage.op](stage, dtype)
    if stage.backward:
        forward = function

        def function(query, kv, *rest):
            out, pull = jax.vjp(lambda q, k: forward(q, k, *rest), query, kv)
            return out, *pull(out)

    return jax.jit(function), inputs


def gate(stage, dtype):
    """Raises when a small call of the stage is not what a dense computation gives."""
    small = dataclasses.replace(stage, **TINY, batch=min(stage.batch, TINY["rows"]), L=min(stage.L, 40), backward=False)
    run, inputs = call(small, dtype)
    got, want = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (run(*inputs), _DENSE[stage.op](small, *inputs)))
    off = float(jnp.max(jnp.abs(got - want)) / jnp.max(jnp.abs(want)))
    if not off <= AGREEMENT[dtype]:
        raise SystemExit(f"{stage.op} {stage}: differs from the dense computation by {off:.1e}; nothing was timed")


def _normal(number, *shape, dtype="float32"):
    return jax.random.normal(jax.random.key(number), shape).astype(dtype)


def _latents(stage, dtype):
    """Query `[B, T, N, H]` and rows `[B, S, H]`, or one array of rows for all of a single batch item."""
    B = stage.batch
    query = _normal(0, B, stage.rows // B, stage.N, stage.H, dtype=dtype)
    rows = _normal(1, B, stage.S, stage.H, dtype=dtype)
    return query, jax.jit(pack_latent)(rows[..., :512], rows[..., 512:]) if stage.stored == "fp8" else rows


def _mla(stage, dtype):
    run = functools.partial(mla_decode, scale=192**-0.5, latent_dim=stage.D)
    return run, (*_latents(stage, dtype), jnp.full((stage.batch,), stage.S, jnp.int32))


def _sparse(stage, dtype):
    query, rows = _latents(stage, dtype)
    # Ascending and without repetition, as a selection is.
    spread = max(stage.S // stage.L, 1)
    lists = jnp.arange(stage.L, dtype=jnp.int32) * spread
    shift = jax.random.randint(jax.random.key(2), (*query.shape[:2], 1), 0, spread)
    run = functools.partial(sparse_attention, scale=stage.H**-0.5, value_dim=stage.D)
    return run, (query, rows, lists + shift.astype(jnp.int32))


def _index(stage, dtype):
    B, T = stage.batch, stage.rows // stage.batch
    query, key = _normal(0, B, T, stage.N, stage.H, dtype=dtype), _normal(1, B, stage.S, stage.H, dtype=dtype)
    if stage.stored:
        quantize = jax.jit(functools.partial(indexer_quantize, fmt="fp8_row" if stage.stored == "fp8" else "fp4_b32"))
        query, key = quantize(query), quantize(key)
    return query, key, _normal(2, B, T, stage.N)


def _logits(stage, dtype):
    return indexer_logits, _index(stage, dtype)


def _select(stage, dtype):
    return lambda *inputs: indexer_select(*inputs, stage.L)[0], _index(stage, dtype)


def _topk(stage, dtype):
    scores = _normal(0, stage.rows, stage.S, dtype="bfloat16" if stage.stored else "float32")
    return lambda scores: topk_select(scores, stage.L)[0], (scores,)


def _dense_attention(stage, query, rows, lists):
    rows = unpack_latent(rows, query.dtype) if rows.dtype == jnp.uint8 else rows
    keys = jax.vmap(lambda rows, lists: rows[lists])(rows, lists).astype(jnp.float32)
    scale = 192**-0.5 if stage.op == "mla_decode" else stage.H**-0.5
    scores = jnp.einsum("btnh,btlh->btnl", query.astype(jnp.float32), keys, precision="highest") * scale
    return jnp.einsum("btnl,btld->btnd", jax.nn.softmax(scores), keys[..., : stage.D], precision="highest")


def _dense_mla(stage, query, rows, lengths):
    lists = jnp.broadcast_to(jnp.arange(stage.S, dtype=jnp.int32), (*query.shape[:2], stage.S))
    return _dense_attention(stage, query, rows, lists)


def _dense_logits(stage, query, key, weights):
    query, key = (indexer_dequantize(*x) if isinstance(x, tuple) else x.astype(jnp.float32) for x in (query, key))
    products = jnp.einsum("btnh,bsh->btns", query, key, precision="highest")
    return jnp.einsum("btns,btn->bts", jnp.maximum(products, 0), weights, precision="highest")


def _dense_topk(stage, scores):
    return jnp.sort(jax.lax.top_k(scores, stage.L)[1], axis=-1)


def _dense_select(stage, *inputs):
    """By the scores of this library, which have a gate of their own: one rounding decides what is selected."""
    return _dense_topk(stage, jax.jit(indexer_logits)(*inputs))


_BUILD = {
    "mla_decode": _mla, "sparse_attention": _sparse, "indexer_logits": _logits, "topk_select": _topk,
    "indexer_select": _select,
}  # fmt: skip
_DENSE = {
    "mla_decode": _dense_mla, "sparse_attention": _dense_attention, "indexer_logits": _dense_logits,
    "topk_select": _dense_topk, "indexer_select": _dense_select,
}  # fmt: skip
