"""Correctness, repeats and times of the chunk kernels: python gpu_gdn.py [group]. Each group in a process of its own."""
import functools, os, subprocess, sys, time
ROOT = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [ROOT, ROOT + "/tests"]
os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false")


def cases():
    import ml_dtypes
    import numpy as np
    from dataclasses import replace
    from linear_cases import problem
    BF16 = ml_dtypes.bfloat16
    make = functools.partial(problem, H=128, D=128, dtype=BF16)
    G = "gated_delta_rule"
    yield G, "plain", make(G, B=1, T=130, K=1, N=1), {}
    yield G, "norm, groups", make(G, B=2, T=64, K=2, N=4, qk_l2norm=True), {}
    yield G, "bounded, sigmoid2, vk", make(G, B=2, T=200, K=2, N=4, qk_l2norm=True, gate="bounded", beta_activation="sigmoid2"), dict(state_layout="vk")
    yield G, "softplus, no h0", make(G, B=2, T=200, K=2, N=4, qk_l2norm=True, gate="softplus", beta_activation="sigmoid", state=False, scale=0.3), {}
    yield "delta_rule", "beta to 2", make("delta_rule", B=1, T=200, K=2, N=2, qk_l2norm=True), {}
    yield G, "bound", make(G, B=1, T=500, K=2, N=2, qk_l2norm=True, gates="bound"), {}
    yield G, "forgetting", make(G, B=1, T=500, K=2, N=2, qk_l2norm=True, gates="forgetting"), {}
    yield G, "slow", make(G, B=1, T=1000, K=2, N=2, qk_l2norm=True, gates="slow"), {}
    yield G, "one token", make(G, B=3, T=1, K=2, N=2, qk_l2norm=True), {}
    yield G, "two warpgroups", make(G, B=4, T=130, K=16, N=32, qk_l2norm=True), {}
    yield G, "vk bf16 state", make(G, B=4, T=70, K=32, N=32, qk_l2norm=True), dict(state_layout="vk")
    for beta in (1.0, 1.99):
        for noise in (0.0, 0.5):
            p = make("delta_rule", B=1, T=256, K=1, N=1, qk_l2norm=True, state=False)
            rng = np.random.default_rng(1)
            key = rng.standard_normal(128) + noise * rng.standard_normal(p.key.shape)
            yield "delta_rule", f"keys alike {noise}, beta {beta}", replace(p, key=key.astype(BF16), beta=np.full_like(p.beta, beta)), {}


def correct():
    import jax, numpy as np
    import baseline_linear, compare, oracle_linear
    from linear_cases import call, cotangents
    cpu = jax.devices("cpu")[0]
    for op, name, p, options in cases():
        t = time.time()
        turn = (lambda a: np.swapaxes(a, -1, -2)) if options.get("state_layout") == "vk" else (lambda a: a)
        x = p.arrays()
        if "initial_state" in x:
            x["initial_state"] = turn(x["initial_state"])
        f = jax.jit(lambda x, p=p, o=options: call(op, p, x, return_final_state=True, implementation="mosaic", **o))
        out, state = map(np.asarray, f(x))
        state = turn(state)
        want, last = oracle_linear.last(p)
        with jax.default_device(cpu):
            yards = list(baseline_linear.gradients(p, *cotangents(p)))
        line = f"{op} {name}:"
        for label, got, truth in (("out", out, want), ("state", state, last)):
            err = lambda a: np.abs(np.asarray(a).astype(np.float64) - truth).max() / np.abs(truth).max()
            line += f" {label} {err(got):.2e} (baseline {max(err(y[label]) for y in yards):.2e})"
            try:
                compare.check(label, got, truth, [y[label] for y in yards], p.query.dtype)
            except AssertionError as e:
                line += f" FAILS {e}"
        print(line, f"{time.time() - t:.1f} s", flush=True)


def big(B, T, N):
    from benchmarks.linear import Shape
    return Shape("gated_delta_rule", B, T, N).inputs("bfloat16")


def repeats():
    import jax, jax.numpy as jnp, jattn
    x = big(4, 1000, 32)
    f = jax.jit(functools.partial(jattn.linear.gated_delta_rule, qk_l2norm=True, return_final_state=True, implementation="mosaic"))
    want = f(*x)
    same = [all(bool(jnp.array_equal(a, b)) for a, b in zip(f(*x), want)) for _ in range(20)]
    print("repeats bit-equal:", all(same), flush=True)
    g = jax.jit(functools.partial(jattn.linear.gated_delta_rule, qk_l2norm=True, return_final_state=True, mode="recurrent"))
    for a, b in zip(want, g(*x)):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        print("  against recurrent xla:", float(jnp.abs(a - b).max() / jnp.abs(b).max()))
    one = f(*(a[2:3, :, :4] for a in x))
    print("batch and heads do not matter:", bool(jnp.array_equal(one[0][0], want[0][2, :, :4])), flush=True)
    loss = lambda impl: jax.jit(jax.grad(lambda *a: jattn.linear.gated_delta_rule(*a, qk_l2norm=True, implementation=impl, residuals="recompute").astype(jnp.float32).sum(), argnums=range(5)))
    y = tuple(a[:1, :200, :4] for a in x)
    print("gradients as xla's:", [bool(jnp.array_equal(a, b)) for a, b in zip(loss("mosaic")(*y), loss("xla")(*y))], flush=True)


def timed():
    import jax, jax.numpy as jnp, statistics
    from benchmarks import gpu, linear as bench
    import jattn
    op = functools.partial(jattn.linear.gated_delta_rule, qk_l2norm=True, implementation="mosaic")
    functions = {"jattn": jax.jit(op)}
    peer = gpu.attempt("jla", lambda: bench.jla("gated_delta_rule"))
    if peer is not None:
        functions["jla"] = jax.jit(peer)
    for shape in ((1, 8192, 32), (4, 4096, 32), (1, 8192, 8), (1, 32768, 16)):
        x = big(*shape)
        outs = {}
        for name, f in functions.items():
            outs[name] = jax.block_until_ready(f(*x))
        if len(outs) == 2:
            a, b = (o.astype(jnp.float32) for o in outs.values())
            print("  jla apart", float(jnp.abs(a - b).max() / jnp.abs(b).max()))
        found = {name: [] for name in functions}
        for _ in range(3):
            for name, f in functions.items():
                found[name] += gpu.named_launches(f, x, 4)
        for name, calls in found.items():
            total = statistics.median(sum(ms for _, ms in c) for c in calls)
            parts = [(k[:40], round(ms, 4)) for k, ms in calls[-1]]
            print(f"{shape} {name} {total:.4f} ms, {1e6 * total / (shape[0] * shape[1] * shape[2]):.3f} ns/th", parts, flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        import jattn
        print(jattn.__file__, flush=True)
        dict(correct=correct, repeats=repeats, timed=timed)[sys.argv[1]]()
    else:
        for group in ("correct", "repeats", "timed"):
            print("==", group, flush=True)
            t = time.time()
            try:
                r = subprocess.run([sys.executable, __file__, group], cwd=ROOT, timeout=80)
                print(f"== {group} rc {r.returncode} in {time.time() - t:.0f} s", flush=True)
            except subprocess.TimeoutExpired:
                print(f"== {group} TIMEOUT", flush=True)
