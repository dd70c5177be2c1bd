"""The case table: a covering design in which every pair of values and features meets, shared by tests and benchmarks.

`CASES` is read from cases.csv, which `python tests/cases.py` writes (deterministic, in seconds).
`make_inputs(case)` builds NumPy arrays; `problem(case, x)` states the case for the oracle and `arguments(case, x)` for
`jattn.attention`, each from its own description of the rule.
"""

import csv
import dataclasses
import itertools
import pathlib
import zlib

import ml_dtypes
import numpy as np
import oracle

SIZES = (0, 1, 2, 17, 63, 64, 65, 127, 129, 255, 1000, 4092)
FACTORS = dict(
    T=SIZES,
    S=SIZES,
    G=(1, 3, 4, 8),
    K=(1, 2),
    H=(16, 40, 64, 80, 96, 128, 192, 256),
    D=("same", "less", "more"),
    dtype=("bfloat16", "float16", "float32", "float64"),
    batch=("", "1", "2", "1x2"),
    mask=("", "causal", "window", "segments", "prefix", "lengths", "blocks", "dense", "predicate", "tree", "or", "not"),
    is_causal=(False, True),
    window=("", "7", "16,0", "None,3", "40,-2", "-1,None"),
    segments=("", "sorted", "unsorted"),
    query_lengths=(False, True),
    key_lengths=(False, True),
    offset=("0", "5", "-3", "array", "end"),
    bias=("", "BNTS", "1NTS", "B1TS", "TS", "1N1S", "BNT1", "N11"),
    bias_dtype=("query", "float32"),
    minus_inf=(False, True),
    soft_cap=("", "5", "50"),
    score_mod=("", "plain", "aux", "alibi", "relative"),
    sinks=(False, True),
    dropout=("0", "0.1", "0.5"),
    scale=("", "0.3", "traced"),
    dlse=(False, True),
    heavy=(False, True),
    poison=(False, True),
)
_LESS = {16: 8, 40: 16, 64: 40, 80: 64, 96: 32, 128: 64, 192: 128, 256: 192}
_MORE = {16: 64, 40: 128, 64: 128, 80: 96, 96: 128, 128: 256, 192: 256}
Case = dataclasses.make_dataclass(
    "Case", [(name, type(values[0]), values[0]) for name, values in FACTORS.items()], frozen=True
)
Case.__doc__ = "One row of the table; a field left at its first value is a feature not used."


def case_id(case):
    """Readable and unique: sizes, then the features in use."""
    sizes = f"T{case.T}-S{case.S}-G{case.G}K{case.K}-H{case.H}{case.D}-{case.dtype}-batch{case.batch or 0}"
    rest = list(FACTORS)[list(FACTORS).index("mask") :]
    used = [
        f"{n}={getattr(case, n)}" if getattr(case, n) is not True else n
        for n in rest
        if getattr(case, n) != FACTORS[n][0]
    ]
    return "-".join([sizes, *used])


def batch_shape(case):
    return tuple(int(x) for x in case.batch.split("x") if x)


def flat_batch(case):
    return int(np.prod(batch_shape(case), dtype=int))


def value_dim(case):
    return {"same": {}, "less": _LESS, "more": _MORE}[case.D].get(case.H, case.H)


def static_window(case):
    """The `local_window_size` argument."""
    if not case.window:
        return None
    bounds = [None if x == "None" else int(x) for x in case.window.split(",")]
    return bounds[0] if len(bounds) == 1 else tuple(bounds)


def feasible(case):
    """Whether the fields can go together (definitions, and the size of a dense oracle on a small machine)."""
    B, area = flat_batch(case), case.T * case.S
    work = B * case.G * case.K * area
    return not (
        (case.D == "more" and case.H == 256)
        or work > 2**24 + 2**16
        or (work > 2**21 and (case.H > 64 or case.D == "more" or case.dropout != "0"))
        or (work > 2**23 and (case.dtype == "float64" or case.bias not in ("", "TS", "N11") or case.score_mod))
        or B * (case.G + 1) * case.K * (case.T + case.S) * case.H > 2**22
        or (case.mask == "tree" and (case.offset not in ("0", "5") or case.T > 255))
        or (case.minus_inf and case.bias in ("", "BNT1", "N11"))
        or (case.bias_dtype != "query" and not case.bias)
        or (case.poison and not (case.query_lengths or case.key_lengths))
        or (case.score_mod == "plain" and case.minus_inf)  # sin(−inf) has no value
    )


def _rng(case, what=""):
    return np.random.default_rng(zlib.crc32((case_id(case) + what).encode()))


def _draw(rng, case, shape):
    """Gaussian, or Student-t with 3 degrees of freedom under per-channel scales."""
    if not case.heavy:
        return rng.standard_normal(shape)
    return np.clip(rng.standard_t(3, shape), -30, 30) / np.sqrt(3) * np.exp(0.5 * rng.standard_normal(shape[-1:]))


def make_inputs(case):
    """Dict of NumPy arrays. Keys: query, key, value, bias, sinks, scale, aux (tuple), rule (dict), dout, dlse, and
    poisoned_* copies of query, key, value and bias with NaN and Inf where the contract promises that nobody looks."""
    rng, B = _rng(case), flat_batch(case)
    batch, N, T, S, H, D = batch_shape(case), case.G * case.K, case.T, case.S, case.H, value_dim(case)
    dtype = ml_dtypes.bfloat16 if case.dtype == "bfloat16" else np.dtype(case.dtype)
    x = dict(
        query=_draw(rng, case, (B, T, N, H)),
        key=_draw(rng, case, (B, S, case.K, H)),
        value=_draw(rng, case, (B, S, case.K, D)),
        dout=rng.standard_normal((B, T, N, D)),
    )
    if case.heavy and S > 2:
        _plant(rng, x, case)
    x = {name: a.reshape(*batch, *a.shape[1:]).astype(dtype) for name, a in x.items()}
    x["dlse"] = rng.standard_normal((*batch, T, N)).astype(np.float64 if case.dtype == "float64" else np.float32)
    x["scale"] = np.asarray(0.25, np.float32) if case.scale == "traced" else None
    x["sinks"] = (rng.standard_normal(N) + 1).astype(np.float32) if case.sinks else None
    x["bias"] = _bias(rng, case, batch, dtype)
    x["aux"] = _aux(rng, case, batch)
    x["rule"] = _rule(case)
    for name in ("query", "key", "value", "bias"):
        x["poisoned_" + name] = x[name]
    if case.poison:
        _poison(case, x)
    return x


def _plant(rng, x, case):
    """A few keys that some query meets at a logit of +40."""
    scale = {"": case.H**-0.5, "0.3": 0.3, "traced": 0.25}[case.scale]
    for _ in range(min(3, case.T // 8)):
        b, t, s, n = (rng.integers(m) for m in (flat_batch(case), case.T, case.S, case.G * case.K))
        q = x["query"][b, t, n]
        x["key"][b, s, n // case.G] = q * (40 / scale / (q @ q))


def _bias(rng, case, batch, dtype):
    if not case.bias:
        return None
    sizes = dict(N=case.G * case.K, T=case.T, S=case.S)
    shape = []
    for letter in case.bias:
        shape += list(batch) if letter == "B" else [sizes.get(letter, 1)]
    if case.bias[0] == "1":
        shape = [1] * len(batch) + shape[1:]
    bias = 1.5 * rng.standard_normal(shape)
    if case.minus_inf:
        bias[rng.random(shape) < 0.1] = -np.inf
    return bias.astype(dtype if case.bias_dtype == "query" else np.float32)


def _aux(rng, case, batch):
    N = case.G * case.K
    if case.score_mod == "aux":
        score_dtype = (
            np.float64 if case.dtype == "float64" else np.float32
        )  # strict promotion: fn computes in the scores' dtype
        return (
            rng.uniform(0.5, 1.5, (N, 1, 1)).astype(score_dtype),
            rng.standard_normal((*batch, 1, 1, case.S)).astype(score_dtype),
        )
    if case.score_mod == "alibi":
        return (rng.uniform(0.005, 0.2, N).astype(np.float32),)
    if case.score_mod == "relative":
        return (rng.standard_normal((N if case.H % 32 else 1, 33)).astype(np.float32),)
    return ()


def _rule(case):
    """Arrays of the visibility rule: lengths, offsets, ids, parents and whatever the Mask needs."""
    rng, B, T, S = _rng(case, "rule"), flat_batch(case), case.T, case.S
    batch = batch_shape(case)
    r = {}
    if case.offset == "array":
        r["offset"] = rng.integers(-2, S // 2 + 3, batch).astype(np.int32)
    if case.query_lengths:
        r["query_lengths"] = rng.integers(T // 2, T + 1, batch).astype(np.int32)
    if case.key_lengths:
        r["key_lengths"] = rng.integers(S // 2, S + 1, batch).astype(np.int32)
    for name in ("segments",) * bool(case.segments) + ("mask_segments",) * (case.mask in ("segments", "or")):
        order = np.sort if name == "mask_segments" or case.segments == "sorted" else (lambda a, axis: a)
        r[name + "_query"] = order(rng.integers(-1, 2, (*batch, T)), axis=-1).astype(np.int32)
        r[name + "_key"] = order(rng.integers(-1, 2, (*batch, S)), axis=-1).astype(np.int32)
        if name == "segments" and T == S and rng.random() < 0.5:
            r[name + "_key"] = r[name + "_query"]
    N = case.G * case.K
    if case.mask == "lengths":
        r["mask_lengths"] = rng.integers(S // 3, S + 1, batch).astype(np.int32)
    if case.mask == "prefix":
        r["prefix"] = rng.integers(0, S // 2 + 2, batch).astype(np.int32)
    if case.mask == "blocks":
        r["blocks"] = rng.random((1, 1 if case.H % 32 else N, -(-T // 16), -(-S // 32))) < 0.6
    if case.mask == "dense":
        r["dense"] = rng.random([(B, N, T, S), (1, 1, T, S), (B, 1, 1, S), (1, N, T, 1)][(case.H + T) % 4]) < 0.7
    if case.mask == "predicate":
        r["stride"] = np.asarray(rng.integers(2, 5), np.int32)
    if case.mask == "tree":
        r["parents"] = np.array([rng.integers(-1, t) for t in range(T)], np.int32)
    return r


def offsets(case, x):
    """Position of query 0, int or [B] (flat batch)."""
    r, B = x["rule"], flat_batch(case)
    if case.offset == "array":
        return r["offset"].reshape(B).astype(np.int64)
    if case.offset == "end":
        ends = [
            r[n].reshape(B).astype(np.int64) if n in r else d
            for n, d in (("key_lengths", case.S), ("query_lengths", case.T))
        ]
        return np.broadcast_to(ends[0] - ends[1], (B,))
    return int(case.offset)


def visible(case, x):
    """Which entries the rule shows: bool [B, N, T, S], without query lengths and without −inf bias."""
    r, B, N, T, S = x["rule"], flat_batch(case), case.G * case.K, case.T, case.S
    b, n, t, s = np.ogrid[:B, :N, :T, :S]
    t = t + np.broadcast_to(offsets(case, x), (B,))[:, None, None, None]
    causal, ok = s <= t, np.ones((B, N, T, S), bool)

    def same(name):
        return r[name + "_query"].reshape(B, 1, T, 1) == r[name + "_key"].reshape(B, 1, 1, S)

    if case.is_causal:
        ok &= causal
    if case.window:
        left, right = (lambda w: w if isinstance(w, tuple) else (w, w))(static_window(case))
        ok &= True if left is None else s >= t - left
        ok &= True if right is None else s <= t + right
    if case.segments:
        ok &= same("segments")
    if case.key_lengths:
        ok &= s < r["key_lengths"].reshape(B, 1, 1, 1)
    if case.mask == "causal":
        ok &= causal
    elif case.mask == "window":
        ok &= (s >= t - 20) & (s <= t + 9)
    elif case.mask == "segments":
        ok &= same("mask_segments")
    elif case.mask == "prefix":
        ok &= causal | (s < np.reshape(r["prefix"], (B, 1, 1, 1)))
    elif case.mask == "lengths":
        ok &= s < np.reshape(r["mask_lengths"], (B, 1, 1, 1))
    elif case.mask == "blocks":
        ok &= r["blocks"][:, :, np.arange(T) // 16][..., np.arange(S) // 32]
    elif case.mask == "dense":
        ok &= r["dense"]
    elif case.mask == "predicate":
        ok &= (t + 2 * s + n + b) % r["stride"] != 0
    elif case.mask == "tree":
        ok &= (s < offsets(case, x)) | _ancestors(r["parents"], T, S, offsets(case, x))
    elif case.mask == "or":
        ok &= causal | same("mask_segments")
    elif case.mask == "not":
        ok &= causal & ~((s >= t - 3) & (s <= t))
    return ok


def _ancestors(parents, T, S, offset):
    seen = np.zeros((T, S), bool)
    for t in range(T):
        node = t
        while node >= 0:
            if offset + node < S:
                seen[t, offset + node] = True
            node = parents[node]
    return seen


def jattn_mask(case, x):
    """The same rule as `visible`'s `mask` part, in jattn's words."""
    from jattn import masks

    r = x["rule"]
    return {
        "": lambda: None,
        "causal": lambda: masks.causal(),
        "window": lambda: masks.window(20, 9),
        "segments": lambda: masks.segments(r["mask_segments_query"], r["mask_segments_key"]),
        "prefix": lambda: masks.prefix(r["prefix"]),
        "lengths": lambda: masks.lengths(r["mask_lengths"]),
        "blocks": lambda: masks.blocks(r["blocks"].reshape(_unflat(case, r["blocks"].shape)), (16, 32)),
        "dense": lambda: r["dense"].reshape(_unflat(case, r["dense"].shape)),
        "predicate": lambda: masks.predicate(_strided, r["stride"]),
        "tree": lambda: masks.tree(r["parents"]),
        "or": lambda: masks.causal() | masks.segments(r["mask_segments_query"], r["mask_segments_key"]),
        "not": lambda: masks.causal() & ~masks.window(3, 0),
    }[case.mask]()


def _unflat(case, shape):
    """[B, …] or [1, …] with the case's own leading batch dims."""
    batch = batch_shape(case)
    return (*(batch if shape[0] != 1 else (1,) * len(batch)), *shape[1:])


def _strided(b, n, t, s, stride):
    return (t + 2 * s + n + b) % stride != 0


# Score modifiers: for jattn and the baseline in jnp, for the oracle as value and derivatives.


def _jnp_plain(score, b, n, t, s):
    import jax.numpy as jnp

    return score + 0.5 * jnp.sin(score) + 0.1 * (n - b).astype(score.dtype) + 0.01 * (s - t).astype(score.dtype)


def _jnp_aux(score, b, n, t, s, gain, shift):
    return score * gain + shift


def _jnp_alibi(score, b, n, t, s, slope):
    return score - slope * abs(t - s).astype(score.dtype)


def _relative_index(t, s, L):
    return np.clip(s - t + L // 2, 0, L - 1)


def jattn_score_mod(case, aux):
    from jattn import mods

    return {
        "": lambda: None,
        "plain": lambda: _jnp_plain,
        "aux": lambda: mods.score_mod(_jnp_aux, *aux),
        "alibi": lambda: mods.alibi(*aux),
        "relative": lambda: mods.relative_bias(*aux),
    }[case.score_mod]()


def baseline_score_mod(case, x, aux):
    """(fn, aux broadcasting to [B, N, T, S]) for the dense baseline; aux flattened to one batch axis."""
    import jax.numpy as jnp

    if case.score_mod == "aux":
        return _jnp_aux, (aux[0], aux[1].reshape(flat_batch(case), 1, 1, case.S))
    if case.score_mod == "alibi":
        return _jnp_alibi, (_cast(case, aux[0][:, None, None]),)
    if case.score_mod == "relative":
        index = _relative_index(*_positions(case, x), aux[0].shape[1])
        return (lambda score, b, n, t, s, r: score + r), (_cast(case, jnp.moveaxis(aux[0][:, index], 0, 1)),)
    return (_jnp_plain if case.score_mod else None), ()


def _cast(case, a):
    return a.astype(np.float64) if case.dtype == "float64" else a


def _positions(case, x):
    """t [B, T, 1] and s [S] as positions on the key axis."""
    t = np.arange(case.T)[:, None] + np.broadcast_to(offsets(case, x), (flat_batch(case),))[:, None, None]
    return t, np.arange(case.S)


def oracle_score_mod(case, x):
    """(ScoreMod, aux) of the oracle. A relative table enters as the [B, N, T, S] array it means."""
    if case.score_mod == "plain":
        return oracle.ScoreMod(
            lambda score, b, n, t, s: score + 0.5 * np.sin(score) + 0.1 * (n - b) + 0.01 * (s - t),
            lambda score, b, n, t, s: 1 + 0.5 * np.cos(score),
        ), ()
    if case.score_mod == "aux":
        gain, shift = x["aux"]
        return oracle.ScoreMod(
            lambda score, b, n, t, s, gain, shift: score * gain + shift,
            lambda score, b, n, t, s, gain, shift: gain,
            lambda score, b, n, t, s, gain, shift: (score, np.ones_like(score)),
        ), (gain, shift.reshape(flat_batch(case), 1, 1, case.S))
    if case.score_mod == "alibi":
        return oracle.ScoreMod(
            lambda score, b, n, t, s, slope: score - slope * abs(t - s),
            lambda score, b, n, t, s, slope: np.ones_like(score),
            lambda score, b, n, t, s, slope: (-abs(t - s) + 0 * score,),
        ), (x["aux"][0][:, None, None],)
    if case.score_mod == "relative":
        table = x["aux"][0]
        dense = np.moveaxis(table[:, _relative_index(*_positions(case, x), table.shape[1])], 0, 1)
        return oracle.ScoreMod(
            lambda score, b, n, t, s, r: score + r,
            lambda score, b, n, t, s, r: np.ones_like(score),
            lambda score, b, n, t, s, r: (np.ones_like(score),),
        ), (dense,)
    return None, ()


def table_gradient(case, x, ddense):
    """Gradient of a relative table [N or 1, L] from that of the dense array it stands for."""
    table = x["aux"][0]
    ddense = np.asarray(ddense, np.float64)
    index = np.broadcast_to(_relative_index(*_positions(case, x), table.shape[1])[:, None], ddense.shape)
    heads = np.arange(ddense.shape[1])[:, None, None] if table.shape[0] > 1 else np.zeros((1, 1, 1), int)
    total = np.zeros(table.shape)
    np.add.at(total, (np.broadcast_to(heads, ddense.shape), index), ddense)
    return total


DROPOUT_SEED = 20


def problem(case, x):
    """The case for the oracle, its leading batch dims flattened to one."""
    B, N = flat_batch(case), case.G * case.K
    flat = {n: x[n].reshape(B, *x[n].shape[len(batch_shape(case)) :]) for n in ("query", "key", "value")}
    mod, aux = oracle_score_mod(case, x)
    keep, p = None, 1.0
    if case.dropout != "0":
        keep, p = oracle.dropout_keep((0, DROPOUT_SEED), float(case.dropout), B, N, case.T, case.S, offsets(case, x))
    return oracle.Problem(
        **flat,
        bias=_flat_bias(case, x["bias"]),
        mask=visible(case, x),
        scale=_scale(case, x),
        offset=offsets(case, x),
        query_lengths=x["rule"]["query_lengths"].reshape(B) if case.query_lengths else None,
        soft_cap=float(case.soft_cap) if case.soft_cap else None,
        score_mod=mod,
        aux=aux,
        sinks=x["sinks"],
        keep=keep,
        keep_probability=p,
    )


def _scale(case, x):
    return {"": None, "0.3": 0.3, "traced": x["scale"]}[case.scale]


def _flat_bias(case, bias):
    if bias is None or bias.ndim <= 3 and case.bias[0] not in "B1":
        return bias
    k = len(batch_shape(case))
    return bias.reshape(int(np.prod(bias.shape[:k], dtype=int)), *bias.shape[k:])


def arguments(case, x, poisoned=True):
    """Keyword arguments of `jattn.attention` for the case; every array may be replaced in x by a traced one."""
    r, prefix = x["rule"], "poisoned_" if poisoned else ""
    kwargs = {n: x[prefix + n] for n in ("query", "key", "value", "bias")}
    kwargs.update(
        mask=jattn_mask(case, x),
        is_causal=case.is_causal,
        local_window_size=static_window(case),
        sinks=x["sinks"],
        score_mod=jattn_score_mod(case, x["aux"]),
        scale=_scale(case, x),
        return_residual=True,
    )
    if case.segments:
        pair = r["segments_query"], r["segments_key"]
        kwargs["segment_ids"] = pair[0] if pair[0] is pair[1] else pair
    if case.query_lengths:
        kwargs["query_seq_lengths"] = r["query_lengths"]
    if case.key_lengths:
        kwargs["key_value_seq_lengths"] = r["key_lengths"]
    kwargs["query_offset"] = (
        {"array": r.get("offset"), "end": "end"}.get(case.offset)
        if case.offset in ("array", "end")
        else int(case.offset)
    )
    if case.soft_cap:
        kwargs["logits_soft_cap"] = float(case.soft_cap)
    if case.dropout != "0":
        import jax

        kwargs.update(dropout_rate=float(case.dropout), dropout_key=jax.random.key(DROPOUT_SEED))
    return kwargs


def _poison(case, x):
    """NaN and Inf beyond the lengths, in keys, values, queries and bias."""
    r, B, batch = x["rule"], flat_batch(case), batch_shape(case)
    for lengths, names in (("key_lengths", ("key", "value")), ("query_lengths", ("query",))):
        for name in names if lengths in r else ():
            a = x[name].copy().reshape(B, *x[name].shape[len(batch) :])
            for b, length in enumerate(r[lengths].reshape(B)):
                a[b, length:] = np.nan
                a[b, length::2] = np.inf
            x["poisoned_" + name] = a.reshape(x[name].shape)
    if case.bias in ("BNTS", "B1TS") and "key_lengths" in r:
        bias = x["bias"].copy().reshape(B, *x["bias"].shape[len(batch) :])
        for b, length in enumerate(r["key_lengths"].reshape(B)):
            bias[b, ..., length:] = np.nan
        x["poisoned_bias"] = bias.reshape(x["bias"].shape)


def qkv(B=2, T=17, S=23, N=4, K=2, H=16, D=None, dtype="float32", seed=0):
    """Gaussian query [B, T, N, H], key [B, S, K, H], value [B, S, K, D or H] for tests outside the table."""
    rng = np.random.default_rng(seed)
    dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, H if D is None else D)
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


# The covering design.


def _pairs(values):
    return {(i, j, values[i], values[j]) for i, j in itertools.combinations(range(len(values)), 2)}


def _lively(case):
    """Empty inputs, or some row with two visible keys: else every dq is a cancellation and says nothing."""
    if not case.T * case.S:
        return True
    x = dict(rule=_rule(case))
    ok = visible(case, x)
    if case.query_lengths:
        ok = ok & (np.arange(case.T)[:, None] < x["rule"]["query_lengths"].reshape(-1, 1, 1, 1))
    enough = 2 if case.S > 1 and not case.dlse and not case.sinks else 1
    if case.bias == "BNT1" and not (case.dlse or case.sinks):
        return False
    return ok.sum(-1).max() >= enough and ok.mean() > 0.02 and (case.S > 1 or case.dlse or case.sinks)


def _complete(rng, fixed, names):
    """A random case with some fields fixed; many of the free features stay off, so that cases stay readable."""
    values = dict(fixed)
    for name in names:
        if name not in values:
            choices = FACTORS[name]
            quiet = list(FACTORS).index(name) >= list(FACTORS).index("mask") and rng.random() < 0.4
            values[name] = choices[0] if quiet else choices[rng.integers(len(choices))]
    return Case(**values)


def generate():
    """Greedy covering design: of 600 random cases with an uncovered pair, the one that covers most."""
    rng, names = np.random.default_rng(2026), list(FACTORS)
    wanted = {
        (i, j, a, b)
        for i, j in itertools.combinations(range(len(names)), 2)
        for a in FACTORS[names[i]]
        for b in FACTORS[names[j]]
    }
    order = sorted(wanted, key=repr)
    cases, dead = [], set()
    while wanted:
        left = [p for p in order if p in wanted]
        best, gain = None, 0
        for attempt in range(600):
            i, j, a, b = left[rng.integers(len(left))] if attempt else left[0]
            case = _complete(rng, {names[i]: a, names[j]: b}, names)
            if feasible(case):
                new = len(_pairs(dataclasses.astuple(case)) & wanted)
                if new > gain and _lively(case):
                    best, gain = case, new
        if best is None:
            i, j, a, b = left[0]
            tries = (_complete(rng, {names[i]: a, names[j]: b}, names) for _ in range(50_000))
            best = next((c for c in tries if feasible(c) and _lively(c)), None)
            if best is None:
                dead.add(left[0])
                wanted.discard(left[0])
                continue
        cases.append(best)
        wanted -= _pairs(dataclasses.astuple(best))
    return cases, dead


def _read(path):
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            yield Case(
                **{n: {bool: lambda v: v == "True", int: int, str: str}[type(FACTORS[n][0])](v) for n, v in row.items()}
            )


_TABLE = pathlib.Path(__file__).with_name("cases.csv")
CASES = tuple(_read(_TABLE)) if _TABLE.exists() else ()

if __name__ == "__main__":
    table, impossible = generate()
    with open(_TABLE, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(FACTORS)
        writer.writerows(dataclasses.astuple(c) for c in table)
    print(len(table), "cases;", len(impossible), "pairs that cannot meet:")
    for i, j, a, b in sorted(impossible, key=repr):
        print(" ", list(FACTORS)[i], a, "·", list(FACTORS)[j], b)
