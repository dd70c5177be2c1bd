import sys, time, traceback
sys.path[:0] = [".", "tests"]
import functools, numpy as np, jax, jax.numpy as jnp
from benchmarks import gpu as bench
bench.prepare()
from jattn._linear import RULES
from jattn.linear._call import describe
from jattn.pallas import linear_chunk as mosaic
from jattn.pallas.hopper import linear_channel_prepare as prep, linear_channel_backward_scan as scan, linear_channel_backward_chunk as chunk

def make(op, B, T, K, N, H, D):
    k = iter(jax.random.split(jax.random.key(0), 12))
    n = lambda *s: jax.random.normal(next(k), s, jnp.float32).astype(jnp.bfloat16)
    g = -jax.nn.softplus(jax.random.normal(next(k), (B, T, N, H)))
    beta = jax.nn.sigmoid(jax.random.normal(next(k), (B, T, N))) if op == "kda" else None
    call = describe(RULES[op], n(B, T, K, H), n(B, T, K, H), n(B, T, N, D), g, beta, **(dict(qk_l2norm=True) if op == "kda" else {}))
    plan = mosaic._plan(call.arrays, call.options, 132, stages=2)
    S = n(B, plan.chunks, N, H, D)
    return plan, mosaic._inputs(call.arrays), n(B, T, N, D), jax.random.normal(next(k), (B, N, H, D)), S

import dataclasses, collections, concurrent.futures
import test_hopper_linear_channels as tests
from linear_cases import cotangents
from jattn._linear import Context
from jattn.pallas.hopper import linear_channel_backward as back
mosaic._BACKWARDS = (None, back)

def both(options, processors, arrays, dout, dfinal):
    out, rest = mosaic.forward(arrays, Context(), options, rest=True, multiprocessors=processors)
    return out[:2], mosaic.backward(arrays, Context(), options, rest, (dout, dfinal, None), multiprocessors=processors)


CASES = {
    "two warpgroups": (functools.partial(tests.make, T=200, N=2, K=2, D=128), 1),
    "softplus, groups, narrow": (lambda: tests.CASES["softplus, groups, narrow"][0], 132),
    "without the delta rule": (lambda: tests.CASES["without the delta rule"][0], 132),
}
NAMES = ("query", "key", "value", "g", "beta", "initial_state", "A_log", "dt_bias")

def case(name):
    p, processors = CASES[name]
    p = p(); call = tests.described(p)
    dout, dfinal = cotangents(p)
    return (name,), jax.jit(functools.partial(both, call.options, processors)), (call.arrays, jnp.asarray(dout), jnp.asarray(dfinal))

def judge(name, got):
    known, line = np.load("expected.npz"), []
    for n in NAMES:
        if f"{name}/{n}" not in known: continue
        t, (limit, size, yard) = known[f"{name}/{n}"], known[f"{name}/{n}/limit"]
        e = np.abs(np.asarray(getattr(got, n)).astype(np.float64) - t).max()
        line.append(f"{n} {e / size:.1e}/{yard / size:.1e}" + ("" if e <= limit else " FAIL"))
    print(name, "|", "; ".join(line), flush=True)

def timed(op, *shape):
    plan, inp, do, df, S = make(op, *shape)
    call_arrays = mosaic.dataclasses.replace(tests.empty_call(op, 1, 64, 1, N=1).arrays, query=inp.query, key=inp.key, value=inp.value, g=inp.g, beta=inp.beta, initial_state=None)
    return ("time", op, shape), jax.jit(functools.partial(both, plan.options, 132)), (call_arrays, do, df)

def attempt(fn, *args):
    try: return fn(*args)
    except Exception: traceback.print_exc(); print(args, "failed", flush=True)

t0 = time.time()
jobs = [attempt(case, n) for n in CASES]
jobs += [attempt(timed, "kda", *s) for s in ((1, 8192, 32, 32, 128, 128), (4, 4096, 32, 32, 128, 128), (1, 65536, 16, 16, 128, 128))]
jobs = [j for j in jobs if j]
lowered = [attempt(lambda j=j: j[1].lower(*j[2])) for j in jobs]
print("lowered", time.time() - t0, flush=True)
with concurrent.futures.ThreadPoolExecutor(8) as pool:
    compiled = list(pool.map(lambda l: None if l is None else attempt(l.compile), lowered))
print("compiled", time.time() - t0, flush=True)
for (key, _, args), f in zip(jobs, compiled):
    if f is None: continue
    if key[0] != "time": attempt(lambda: judge(key[0], jax.block_until_ready(f(*args))[1])); continue
    def times():
        first = jax.block_until_ready(f(*args))
        print(key, "repeats", all(all(bool(jnp.array_equal(a, b)) for a, b in zip(jax.tree.leaves(f(*args)), jax.tree.leaves(first))) for _ in range(3)), "finite", all(bool(jnp.isfinite(x.astype(jnp.float32)).all()) for x in jax.tree.leaves(first)))
        runs = bench.named_launches(f, args, 4)
        total = collections.defaultdict(list)
        for r in runs:
            for k, ms in r: total[k[:60]].append(ms)
            total["ALL"].append(sum(ms for _, ms in r))
        for k, v in sorted(total.items(), key=lambda x: -max(x[1])): print("   ", k, [round(x, 4) for x in v][:8], flush=True)
    attempt(times)
print("took", time.time() - t0, flush=True)
