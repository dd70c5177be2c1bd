"""The caches that `decode` and `paged` read: how many sequences, how long, in which pages and which dtype."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import jattn

STORED = {"int8": "int8", "fp8": "float8_e4m3fn"}
TOKENS = ("equal", "uniform", "tail")
PAGES = (16, 64, 128)
_DISTINCT = 16  # sequences with numbers of their own; more repeat them, in memory of their own
_CHECKED = 4  # sequences that are computed densely


@dataclasses.dataclass(frozen=True)
class Case:
    """B sequences of at most S tokens. `page` None is a contiguous cache, `stored` "" one in the query's dtype."""

    B: int
    S: int
    N: int
    K: int
    H: int
    page: int | None = None
    tokens: str = "equal"
    stored: str = ""

    def __str__(self):
        page = "" if self.page is None else f"p{self.page}"
        tokens = "" if self.tokens == "equal" else self.tokens
        return " ".join(filter(None, [f"B{self.B} S{self.S} N{self.N}/{self.K} H{self.H}", page, tokens, self.stored]))

    @property
    def op(self):
        return "decode_attention" if self.page is None else "paged_attention"

    @property
    def lengths(self):
        """Tokens of each sequence: all S; any number up to it; or mostly few, with a long tail. The last one has S."""
        rng = np.random.default_rng(0)
        u = (rng.permutation(self.B) + rng.random(self.B)) / self.B
        share = {"equal": np.ones(self.B), "uniform": u, "tail": u**4}[self.tokens]
        share[-1] = 1
        return np.maximum(np.ceil(share * self.S), 1).astype(np.int32)

    def bytes(self, dtype):
        """Of the keys and values of these tokens, with a scale a token and head where they are quantised."""
        head = self.H + 4 if self.stored else self.H * jnp.dtype(dtype).itemsize
        return 2 * self.K * head * int(self.lengths.sum(dtype=np.int64))

    def varied(self, **axes):
        """The case with each value of each axis in turn."""
        return [dataclasses.replace(self, **{name: value}) for name, values in axes.items() for value in values]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Data:
    """The arrays of a case: the cache as it is stored, contiguous, and if it is paged also as pages."""

    query: jax.Array  # [B, 1, N, H]
    key: object  # [B, S, K, H], in the query's dtype or a Quantized
    value: object
    lengths: jax.Array  # [B]
    cache: jattn.PagedCache | None

    @property
    def contiguous(self):
        return self.query, self.key, self.value, self.lengths

    @property
    def inputs(self):
        """What jattn's op takes."""
        return self.contiguous if self.cache is None else (self.query, self.cache)


def data(case, dtype):
    keys = jax.random.split(jax.random.key(0), 3)
    query = jax.random.normal(keys[0], (case.B, 1, case.N, case.H), jnp.float32).astype(dtype)
    dense = dataclasses.replace(case, page=None, tokens="equal")  # one program for every page size and length
    key, value = (_numbers(key, dense, dtype) for key in keys[1:])
    lengths = jnp.asarray(case.lengths)
    if case.page is None:
        return Data(query, key, value, lengths, None)
    tables = np.random.default_rng(1).permutation(case.B * -(-case.S // case.page)).astype(np.int32)
    paged = functools.partial(_paged, order=np.argsort(tables), page=case.page)
    pools = (jax.tree.map(paged, x) for x in (key, value))
    return Data(query, key, value, lengths, jattn.PagedCache(*pools, jnp.asarray(tables.reshape(case.B, -1)), lengths))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _numbers(key, case, dtype):
    x = jax.random.normal(key, (min(case.B, _DISTINCT), case.S, case.K, case.H), jnp.float32)
    x = jattn.quantize(x, STORED[case.stored]) if case.stored else x.astype(dtype)
    return jax.tree.map(lambda x: jnp.tile(x, (-(-case.B // _DISTINCT), *[1] * (x.ndim - 1)))[: case.B], x)


@functools.partial(jax.jit, static_argnames="page")
def _paged(x, order, page):
    """`[B, S, ...]` as pages, in another order."""
    return x.reshape(-1, page, *x.shape[2:])[order]


def disagreement(case, found, out):
    """The largest max|out - y| / max|y| over some sequences, y dense and in float32; the shortest is among them."""
    chosen = {int(case.lengths.argmin()), *np.linspace(0, case.B - 1, _CHECKED).astype(int).tolist()}
    dense = dataclasses.replace(found, cache=None)
    return np.max([_apart(dense, out, b) for b in sorted(chosen)])  # NaN if one is


@jax.jit
def _apart(found, out, b):
    wanted = _dense(found, b)
    return jnp.abs(out[b, 0].astype(jnp.float32) - wanted).max() / jnp.abs(wanted).max()


def _dense(found, b):
    """`[N, H]`: the result of sequence b."""
    key, value = (jax.tree.map(lambda x: x[b], x) for x in (found.key, found.value))
    key, value = (
        jattn.dequantize(x) if isinstance(x, jattn.Quantized) else x.astype(jnp.float32) for x in (key, value)
    )
    query = found.query[b, 0].astype(jnp.float32).reshape(key.shape[1], -1, key.shape[2])
    exists = jnp.arange(key.shape[0], dtype=jnp.int32) < found.lengths[b]
    with jax.default_matmul_precision("highest"):
        score = jnp.einsum("kgh,skh->kgs", query, key) * key.shape[2] ** -0.5
        weights = jax.nn.softmax(jnp.where(exists, score, -jnp.inf), axis=-1)
        return jnp.einsum("kgs,skh->kgh", weights, value).reshape(-1, value.shape[2])


def parts(name):
    """("B64 S8192 N32/8 H128", page size or None) of a case's name."""
    words = name.split()
    page = next((int(word[1:]) for word in words[4:] if word[0] == "p"), None)
    return " ".join(words[:4]), page


def _with_features(case):
    return [*case.varied(tokens=TOKENS), *case.varied(stored=STORED)]


def _with_dtypes(case):
    return [case, *case.varied(stored=STORED)]


_SHAPES = [Case(64, 8192, 32, 8, 128), Case(8, 8192, 32, 8, 128), Case(1, 131072, 32, 8, 128),
           Case(128, 1024, 64, 8, 128)]  # fmt: skip
_ALONE = [Case(1, 8192, 32, 8, 128), Case(1, 128, 32, 8, 128)]  # for the latency: one sequence, and one page or less
_UNIFORM = _SHAPES[0].varied(tokens=("uniform",))
_QUANTISED = [x for case in _SHAPES for x in case.varied(stored=STORED)]
_TABLES = {
    "targets": [*_SHAPES, *_QUANTISED, *_UNIFORM, *_ALONE],
    "sweep": [*(x for B in (1, 4, 16, 64, 256) for tokens in Case(B, 8192, 32, 8, 128).varied(tokens=TOKENS)
                for x in _with_dtypes(tokens)), *(x for case in _SHAPES[1:] for x in _with_dtypes(case)), _ALONE[1]],
    "small": [*_with_features(Case(4, 512, 8, 2, 64)), Case(1, 2048, 8, 2, 64)],
}  # fmt: skip
# Every page size where that is what is asked, else one: a program takes seconds to compile, and each size has its own.
_PAGED_TARGETS = [x for case in _SHAPES for x in case.varied(page=PAGES)] + [
    dataclasses.replace(x, page=64) for x in (*_SHAPES[0].varied(stored=STORED), *_UNIFORM, *_ALONE)
]


def table(suite, name):
    """The cases of "decode" or "paged"; "small" are for a CPU."""
    if (suite, name) == ("paged", "targets"):
        return _PAGED_TARGETS
    pages = (None,) if suite == "decode" else PAGES
    return [x for case in _TABLES[name] for x in case.varied(page=pages)]
