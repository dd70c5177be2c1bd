"""`./run bench linear`: linear attention and its decoding steps, beside jla where that can be imported; and
`./run bench scaling`: one sequence of it, longer and longer, beside softmax attention.

On a GPU bfloat16 and kernel times by CUPTI, elsewhere float32, small shapes and wall time. Every call is first held
against the recurrence, token by token, and with the first shape of each kind its gradients too. Times are set beside
two limits, at the bandwidth of a copy measured in the same run: the bytes that this implementation's plan moves, and
those of one kernel that reads its inputs and writes out.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import gpu, providers, timing
from benchmarks.shapes import selected
from jattn import attention, linear

AGREEMENT = {"float32": 1e-4, "bfloat16": 3e-2}  # largest max|x - y| / max|y| from the recurrence
BOUND = -5  # the log of the strongest decay of a token
JLA = {"kda": "kda", "gated_delta_rule": "gated_deltanet"}


@dataclasses.dataclass(frozen=True)
class Shape:
    """One call. Of a step, B is the number of sequences; gate="bounded": the op makes the decays of bfloat16 numbers;
    gate="clipped": it clips the log decays of the call without a gate, which changes none of them; `sequences` of all
    lengths are packed into one row."""

    op: str
    B: int
    T: int
    N: int
    H: int = 128
    step: bool = False
    gate: str | None = None
    sequences: int | None = None

    def __str__(self):
        more = {None: "", "bounded": " from gates", "clipped": " clipped"}[self.gate]
        more += "" if self.sequences is None else f" packed {self.sequences}"
        return f"{self.op}{'_step' if self.step else ''} B{self.B} T{self.T} N{self.N} H{self.H}{more}"

    @property
    def options(self):
        return dict(qk_l2norm=True) | (dict(gate=self.gate, lower_bound=BOUND) if self.gate else {})

    def attend(self, *inputs, recurrent=False, **options):
        """The op on what `inputs` returns; or the recurrence, of a step too."""
        op = getattr(linear, f"{self.op}_step" if self.step and not recurrent else self.op)
        options |= dict(mode="recurrent") if recurrent else {}
        if self.sequences is None:
            return op(*inputs, **self.options, **options)
        return op(*(x[0] for x in inputs), cu_seqlens=self.offsets(), **self.options, **options)[None]

    def offsets(self):
        """Where packed sequences begin, at random."""
        cuts = np.sort(np.random.default_rng(0).choice(np.arange(1, self.T), self.sequences - 1, replace=False))
        return np.array([0, *cuts, self.T])

    @property
    def raw(self):
        """Whether g is what decays are made of."""
        return self.gate == "bounded"

    @property
    def by_channel(self):
        return self.op in ("kda", "gla")

    @property
    def token_heads(self):
        return self.B * self.T * self.N

    def inputs(self, dtype):
        """query, key, value, log decay and beta; of a step also the states."""
        keys = jax.random.split(jax.random.key(0), 6)
        tokens = (self.B, self.T, self.N)
        q, k, v = (jax.random.normal(key, (*tokens, self.H), jnp.float32).astype(dtype) for key in keys[:3])
        raw = jax.random.normal(keys[3], (*tokens, self.H) if self.by_channel else tokens, jnp.float32)
        beta = jax.nn.sigmoid(jax.random.normal(keys[4], tokens, jnp.float32))
        gates = 2 * raw - 2
        x = (q, k, v, gates.astype(dtype) if self.raw else BOUND * jax.nn.sigmoid(gates), beta)
        return (*x, jax.random.normal(keys[5], (self.B, self.N, self.H, self.H), jnp.float32)) if self.step else x

    def least_bytes(self, dtype, backward):
        """Of one kernel that reads each input and writes each output once; backward: also dout in, gradients out."""
        size, H = jnp.dtype(dtype).itemsize, self.H
        if self.step:
            return self.B * self.N * 8 * H * H
        gate = (size if self.raw else 4) * (H if self.by_channel else 1) + 4
        forward = 4 * size * H + gate
        return self.token_heads * (forward + (7 * size * H + 2 * gate if backward else 0))

    def plan_bytes(self, dtype, backward):
        """Of the plan by kernels, each of which reads and writes matrices [64, H], m, [64, 64], square, and states:
        forward prepare and scan; backward prepare, scan and chunk, and scores for decays by channel."""
        if self.step:
            return self.least_bytes(dtype, backward)
        size = jnp.dtype(dtype).itemsize
        m, square, states = size * self.H, size * 64, size * self.H * self.H // 64
        gate = (size if self.raw else 4) * self.H
        if self.by_channel:
            forward = (5 * m + gate + 2 * square) + (5 * m + 2 * square)
            prepare, scan = 5 * m + gate, 5 * m + 2 * square + states
            chunk, scores = 8 * m + 3 * square + 2 * states, 7 * m + 2 * gate + 2 * square
        else:
            forward = (2 * m + 2 * square) + (4 * m + 2 * square)
            prepare, scan = 2 * m + square, 5 * m + 2 * square + states
            chunk, scores = 7 * m + square + 2 * states, 0
        backwards = states + prepare + scan + chunk + scores if backward else 0
        if self.sequences is not None:  # tokens are moved to chunks of their sequence, and results back
            moved = 3 * m + (4 * self.H if self.by_channel else 0)
            forward += 2 * moved + 2 * m
            backwards += 2 * moved + 2 * moved + 2 * m if backward else 0
        return self.token_heads * (forward + backwards)


GPU = (
    Shape("kda", 1, 8192, 32), Shape("kda", 4, 4096, 32), Shape("kda", 1, 65536, 16),
    Shape("gated_delta_rule", 1, 8192, 32), Shape("gated_delta_rule", 4, 4096, 32),
    Shape("gated_delta_rule", 1, 8192, 8), Shape("kda", 1, 8192, 32, gate="bounded"),
    Shape("kda", 1, 8192, 32, gate="clipped"), Shape("kda", 4, 4096, 32, gate="clipped"),
    Shape("kda", 1, 65536, 16, gate="clipped"),
    Shape("kda", 1, 8192, 32, sequences=16), Shape("gated_delta_rule", 1, 8192, 32, sequences=16),
    Shape("kda", 64, 1, 96, step=True), Shape("kda", 256, 1, 128, step=True), Shape("kda", 1, 1, 96, step=True),
)  # fmt: skip
CPU = (
    Shape("kda", 1, 1024, 4, 64), Shape("gated_delta_rule", 1, 1024, 4, 64), Shape("kda", 16, 1, 4, 64, step=True),
    Shape("kda", 1, 1024, 4, 64, gate="bounded"), Shape("kda", 1, 1024, 4, 64, gate="clipped"),
    Shape("kda", 1, 1024, 4, 64, sequences=5),
)  # fmt: skip
SCALING_GPU = tuple(Shape("kda", 1, 1024 << i, 16) for i in range(8))
SCALING_CPU = tuple(Shape("kda", 1, 256 << i, 4, 64) for i in range(6))


def scaling(arguments):
    """Linear attention and causal softmax attention of one sequence, against its length."""
    on_gpu = jax.default_backend() == "gpu"
    dtype = "bfloat16" if on_gpu else "float32"
    for shape in selected(SCALING_GPU if on_gpu else SCALING_CPU, arguments):
        for backward in (False, True):
            calls = {}
            for op in ("kda", "gated_delta_rule"):
                one = dataclasses.replace(shape, op=op)
                inputs = one.inputs(dtype)
                mine = {("jattn", backward): built(one, backward, False)["jattn"]}
                calls[op] = agreeing(one, mine, inputs, dtype)["jattn", backward], inputs
            softmax = jax.jit(passes(functools.partial(attention, is_causal=True), backward))
            jax.block_until_ready(softmax(*inputs[:3]))
            for name, ms in times(calls | {"attention": (softmax, inputs[:3])}, arguments.repeats, on_gpu).items():
                yield {
                    "shape": f"B1 T{shape.T} N{shape.N} H{shape.H}",
                    "dtype": dtype,
                    "pass": "fwd+bwd" if backward else "fwd",
                    "length": shape.T,
                    "implementation": name,
                    "ms": round(ms, 4),
                    "us_token": round(1e3 * ms / shape.T, 3),
                }


def linear_suite(arguments):
    """Forward, forward and backward, and steps of linear attention against jla and the roofline."""
    on_gpu = jax.default_backend() == "gpu"
    dtype = "bfloat16" if on_gpu else "float32"
    rate = copy_rate(on_gpu)
    print(f"copy {rate / 1e9:.0f} GB/s", flush=True)
    held = set()
    for shape in selected(GPU if on_gpu else CPU, arguments):
        inputs, passes = shape.inputs(dtype), (False,) if shape.step else (False, True)
        functions = {(name, of): f for of in passes for name, f in built(shape, of, on_gpu).items()}
        kind = shape.op, shape.gate, shape.sequences is None
        gradients = not shape.step and kind not in held  # they take long to compile
        functions = agreeing(shape, gpu.compiled(functions, inputs), inputs, dtype, gradients)
        held |= {kind} if gradients else set()
        for backward in passes:
            calls = {name: (f, inputs) for (name, of), f in functions.items() if of == backward}
            yield from rows(shape, dtype, backward, times(calls, arguments.repeats, on_gpu), rate)


def built(shape, backward, on_gpu):
    """name -> compiled function of the inputs."""
    functions = {"jattn": functools.partial(shape.attend, implementation="mosaic" if on_gpu else None)}
    if on_gpu and shape.op in JLA and not (shape.step or shape.raw or shape.sequences):
        functions["jla"] = gpu.attempt("jla", lambda: jla(shape.op))
    return {name: jax.jit(passes(f, backward)) for name, f in functions.items() if f is not None}


def jla(op):
    package = providers._module("jla.ops")

    def attention(q, k, v, g, beta):
        out, _ = package.linear_attention(JLA[op], q, k, v, g=g, beta=beta, use_qk_l2norm=True)
        return out

    return attention


def passes(function, backward):
    """out alone, or (out, gradients of all inputs) with out as its own cotangent."""
    if not backward:
        return function

    def both(*inputs):
        out, pull = jax.vjp(function, *inputs)
        return out, *pull(out)

    return both


def agreeing(shape, functions, inputs, dtype, gradients=False):
    """The functions, by name and pass, that compute the recurrence, called once; a peer that does not is left out,
    jattn stops the run.

    Args:
        gradients: hold these against the recurrence too; else of a pass with gradients its output alone.
    """

    def recurrent(*x):
        states = dict(initial_state=x[5]) if shape.step else {}
        return shape.attend(*x[:5], recurrent=True, **states)

    attend = passes(recurrent, gradients)
    truth, found = jax.tree.leaves(jax.jit(attend)(*inputs)), {}
    for (name, of), function in functions.items():
        result = gpu.attempt(name, lambda f=function: jax.block_until_ready(f(*inputs)))
        if result is None:
            continue
        pairs = zip(jax.tree.leaves(result), truth, strict=False)
        off = float(np.max([_apart(x, y) for x, y in (pairs if gradients else [next(pairs)])]))  # NaN too
        if off <= AGREEMENT[dtype]:
            found[name, of] = function
        elif name == "jattn":
            raise SystemExit(f"{shape}: jattn differs from the recurrence by {off:.1e}; nothing was timed")
        else:
            print(f"  {name} differs from the recurrence by {off:.1e}: not timed", flush=True)
    return found


@jax.jit
def _apart(x, truth):
    """max|x − y| / max|y|."""
    x, truth = x.astype(jnp.float32), truth.astype(jnp.float32)
    return jnp.abs(x - truth).max() / jnp.abs(truth).max()


def times(calls, repeats, on_gpu):
    """name -> milliseconds, of name -> (function, inputs)."""
    if on_gpu:
        return {name: taken.total for name, taken in gpu.measured(calls, repeats).items()}
    taken = timing.interleaved({name: functools.partial(f, *inputs) for name, (f, inputs) in calls.items()}, repeats)
    return {name: 1e3 * seconds for name, seconds in taken.items()}


def copy_rate(on_gpu):
    """Bytes a second, read and written, of a copy."""
    x = jnp.zeros((1 << 30 if on_gpu else 1 << 26) // 4, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    jax.block_until_ready(copy(x))
    return 2e3 * x.nbytes / times({"copy": (copy, (x,))}, 3, on_gpu)["copy"]


def rows(shape, dtype, backward, ms, rate):
    for name, taken in ms.items():
        limits = {"plan": shape.plan_bytes(dtype, backward), "fused": shape.least_bytes(dtype, backward)}
        yield {
            "shape": str(shape),
            "dtype": dtype,
            "pass": "step" if shape.step else "fwd+bwd" if backward else "fwd",
            "implementation": name,
            "ms": round(taken, 4),
            "ns_token_head": round(1e6 * taken / shape.token_heads, 3),
            **{f"percent_of_{limit}": round(1e5 * size / rate / taken, 1) for limit, size in limits.items()},
            "times_jla": round(taken / ms["jla"], 4) if "jla" in ms else "",
        }
