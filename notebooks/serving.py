# %% [markdown]
# # Serving from a paged cache
#
# `./run serve-demo [--requests 16] [--seed 0] [--training-steps 150]`
#
# The language model of `demo.py`, trained for some seconds, answers requests that arrive while others are being
# answered. They share a system prompt, whose pages are computed once; prompts are prefilled in chunks beside the
# decoding of others; some clients leave in the middle. One compiled step of fixed shape does it all: whatever tokens
# there are, packed into its rows, go through `jattn.append` and `jattn.paged_attention`. Then the same with int8 pages.
#
# Three things are checked, and the script exits with 1 if one is not so:
#
# 1. Every request gets the tokens that it gets alone.
# 2. Over float32 pages they are the tokens of the model without any cache, which recomputes the whole sequence.
# 3. When everybody has left, every page is free.

# %%
import argparse
import collections
import dataclasses
import functools
import sys
import time

import demo
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jattn

OUTPUT = demo.OUTPUT
SYSTEM = b"You are a patient reference for the Python language. Answer in the words of its own help topics.\n\n"


@dataclasses.dataclass(frozen=True)
class Config:
    requests: int = 16
    seed: int = 0
    slots: int = 6  # sequences in a step
    rows: int = 32  # tokens in a step
    page_size: int = 16
    pages: int = 44
    longest: int = 256  # tokens of a prompt and its answer
    model: demo.Config = demo.Config(
        steps=150, sequence_length=256, batch=2, width=128, heads=4, kv_heads=2, learning_rate=1e-2
    )


# %% [markdown]
# ## One step of the model
#
# The rows hold the newest tokens of each sequence, packed: one of a sequence that decodes, a chunk of one whose prompt
# is being read. Each layer has pages of its own; the block tables are the same for all.


# %%
def step_of(graphdef):
    """The compiled step: `(params, pools, tables [slots, W], lengths [slots], tokens [rows], positions [rows],
    cu [slots + 1]) -> (pools, token [slots], its logit [slots])`, where lengths are those before the step."""

    @functools.partial(jax.jit, donate_argnums=1)
    def step(params, pools, tables, lengths, tokens, positions, cu):
        model = nnx.merge(graphdef, params)
        x, grown = model.embed(tokens), []
        for block, (keys, values) in zip(model.blocks, pools, strict=True):
            cache = jattn.PagedCache(keys, values, tables, lengths)
            out, cache = attend(block.attention, block.attention_norm(x), cache, positions, cu)
            x = x + out
            x = x + block.down(jax.nn.gelu(block.up(block.mlp_norm(x))))
            grown.append((cache.key_pages, cache.value_pages))
        last = jnp.clip(cu[1:] - 1, 0)  # of a slot without tokens: somebody's, and nobody looks
        logits = model.head(model.norm(x[last]))
        return grown, jnp.argmax(logits, axis=-1), jnp.max(logits, axis=-1)

    return step


def attend(layer, x, cache, positions, cu):
    """The attention layer over a cache that its new tokens join first."""
    query, key, value = layer.query(x), layer.key(x), layer.value(x)
    cache = jattn.append(cache, key, value, cu, rotate=jattn.rope)
    query = jattn.rope(query, positions)
    return layer.out(jattn.paged_attention(query, cache, cu, local_window_size=layer.local_window_size)), cache


# %% [markdown]
# ## The server
#
# A request is let in when there is a slot, and pages for all that it may become: nobody runs out halfway. Pages of the
# prompt that an earlier request left behind are shared. Decoding goes first, one row a sequence, and prompts get the
# rest of the rows, in chunks.


# %%
@dataclasses.dataclass
class Request:
    number: int
    prompt: list
    limit: int  # tokens to generate
    arrival: int  # the step before which it arrives
    leaves: int | None = None  # the step during which its client leaves
    answer: list = dataclasses.field(default_factory=list)
    logits: list = dataclasses.field(default_factory=list)
    pages: list = dataclasses.field(default_factory=list)
    shared: int = 0  # tokens that were in the cache when it was let in
    cached: int = 0  # tokens that are in the cache now
    phases: dict = dataclasses.field(default_factory=dict)  # what -> the step in which it began
    times: list = dataclasses.field(default_factory=list)  # seconds: of its arrival, of each token

    @property
    def tokens(self):
        return self.prompt + self.answer

    @property
    def decodes(self):
        return bool(self.answer)

    @property
    def over(self):
        return "end" in self.phases or "cancelled" in self.phases


class Server:
    """Continuous batching: `step` is the compiled step, `stored` the dtype of the pages."""

    def __init__(self, step, params, config, stored="float32"):
        self.step, self.params, self.config = step, params, config
        self.allocator = jattn.PageAllocator(config.pages, config.page_size)
        self.width = -(-config.longest // config.page_size)
        self.pools = [self.pool(stored) for _ in range(config.model.layers)]
        self.slots, self.waiting = [None] * config.slots, collections.deque()
        self.clock, self.history = 0, []

    def pool(self, stored):
        model = self.config.model
        cache = jattn.PagedCache.zeros(
            self.config.pages, self.config.page_size, model.kv_heads, model.width // model.heads, dtype=stored,
            sequences=self.config.slots, pages_per_sequence=self.width,
        )  # fmt: skip
        return cache.key_pages, cache.value_pages

    @property
    def running(self):
        return [request for request in self.slots if request is not None]

    def submit(self, request):
        request.times.append(time.perf_counter())
        request.phases["waiting"] = self.clock
        self.waiting.append(request)

    def admit(self):
        while self.waiting and None in self.slots:
            request = self.waiting[0]
            shared = self.allocator.match(request.prompt)
            total = -(-(len(request.prompt) + request.limit) // self.config.page_size)
            try:
                request.pages = shared + self.allocator.allocate(total - len(shared))
            except jattn.OutOfPages:
                self.allocator.release(shared)
                return
            request.shared = request.cached = len(shared) * self.config.page_size
            request.phases["prefill"] = self.clock
            self.slots[self.slots.index(None)] = self.waiting.popleft()

    def counts(self):
        """How many tokens each slot brings to the next step."""
        counts = np.array([r is not None and r.decodes for r in self.slots], np.int32)
        room = self.config.rows - counts.sum()
        reading = [r for r in self.running if not r.decodes]
        for request in sorted(reading, key=lambda r: r.number):
            left = len(request.prompt) - request.cached
            # Chunks start at multiples of 8: there a prompt has the same bits however it is cut.
            taken = left if left <= room else room // 8 * 8
            counts[self.slots.index(request)] = taken
            room -= taken
        return counts

    def advance(self):
        """One step: launched, then those who leave, then its tokens."""
        self.allocator.collect()
        self.admit()
        counts = self.counts()
        found = self.launch(counts)
        decoding = sum(r.decodes for r in self.running)
        pages = self.allocator.used, self.allocator.idle
        self.history.append((self.clock, *pages, int(counts.sum()) - decoding, decoding))
        self.drop_leavers(found[0])
        tokens, logits = (np.asarray(x) for x in found)
        for slot, request in enumerate(self.slots):
            if counts[slot] and request is not None:
                request.cached += int(counts[slot])
                self.allocator.publish(request.tokens[: request.cached], request.pages)
                if request.cached == len(request.tokens):
                    self.give(slot, request, int(tokens[slot]), float(logits[slot]))
        self.clock += 1

    def launch(self, counts):
        cu = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        tokens, positions = np.zeros((2, self.config.rows), np.int32)
        tables, lengths = np.full((self.config.slots, self.width), -1, np.int32), np.zeros(self.config.slots, np.int32)
        for slot, request in enumerate(self.slots):
            if request is not None:
                rows, new = slice(cu[slot], cu[slot + 1]), slice(request.cached, request.cached + counts[slot])
                tokens[rows], positions[rows] = request.tokens[new], np.arange(new.start, new.stop)
                tables[slot, : len(request.pages)], lengths[slot] = request.pages, request.cached
        self.pools, *found = self.step(self.params, self.pools, tables, lengths, tokens, positions, cu)
        return found

    def give(self, slot, request, token, logit):
        request.phases.setdefault("decode", self.clock + 1)
        request.times.append(time.perf_counter())
        request.answer.append(token)
        request.logits.append(logit)
        if len(request.answer) == request.limit:
            request.phases["end"] = self.clock
            self.slots[slot] = None
            self.allocator.release(request.pages)

    def drop_leavers(self, launched):
        """The running step may still read the pages of who leaves: they are free when `launched` is there."""
        for request in [*self.running, *self.waiting]:
            if request.leaves is not None and request.leaves <= self.clock:
                request.phases["cancelled"] = self.clock
                if request in self.waiting:
                    self.waiting.remove(request)
                else:
                    self.slots[self.slots.index(request)] = None
                    self.allocator.release(request.pages, after=launched)


def serve(server, requests, show=lambda *_: None):
    """Serves all requests, each from its arrival on; `show(server, requests)` is called after every step."""
    coming = collections.deque(sorted(requests, key=lambda r: r.arrival))
    while not all(r.over for r in requests):
        if not server.running and not server.waiting:
            server.clock = max(server.clock, coming[0].arrival)
        while coming and coming[0].arrival <= server.clock:
            server.submit(coming.popleft())
        server.advance()
        show(server, requests)
    server.allocator.collect(wait=True)


def show_progress(begin, server, requests):
    """A bar that redraws itself on a terminal, a line every now and then elsewhere."""
    over, total = sum(r.over for r in requests), len(requests)
    generated, used = sum(len(r.answer) for r in requests), server.allocator.used
    text = f"{over:3d}/{total} done  {len(server.running)} running  {len(server.waiting):2d} waiting  "
    text += f"pages {used:3d}/{server.allocator.num_pages}  {generated / (time.perf_counter() - begin):6.0f} tokens/s"
    if sys.stdout.isatty():
        filled = 30 * over // total
        print(f"\r  [{'#' * filled}{'.' * (30 - filled)}] {text}", end="" if over < total else "\n", flush=True)
    elif len(server.history) % 20 == 0 or over == total:
        print(f"  step {server.clock:3d}  {text}", flush=True)


# %% [markdown]
# ## Requests


# %%
def requests_of(config):
    """Prompts of different lengths behind one system prompt; every fifth client leaves early."""
    rng = np.random.default_rng(config.seed)
    _, held_out = demo.split_documents()
    arrivals = np.cumsum(rng.integers(0, 5, config.requests))
    found = []
    for i in range(config.requests):
        question = held_out[i % len(held_out)].partition(b"\n\n")[2].strip()[: int(rng.integers(4, 80))]
        limit, arrival = int(rng.integers(8, 40)), int(arrivals[i])
        leaves = arrival + int(rng.integers(1, 12)) if i % 5 == 3 else None
        found.append(Request(i, [demo.START, *SYSTEM, *question], limit, arrival, leaves))
    return found


def fresh(request):
    """The request as it is asked alone: it stays for the tokens that it got."""
    return Request(request.number, request.prompt, len(request.answer), 0)


# %% [markdown]
# ## The checks


# %%
def alone(step, params, config, stored, requests):
    """The answers that each request gets from a server of its own, with empty pages."""
    asked = [fresh(r) for r in requests if r.answer]
    for request in asked:
        serve(Server(step, params, config, stored), [request])
    return {request.number: request.answer for request in asked}


@functools.cache
def whole(graphdef):
    """The compiled model over whole sequences."""
    return jax.jit(lambda params, tokens: nnx.merge(graphdef, params)(tokens, jnp.zeros(tokens.shape, jnp.int32)))


def without_a_cache(graphdef, params, config, requests):
    """number -> the model's own (next tokens, their logits) behind every token of the answer but the last, and behind
    the prompt: greedy generation without a cache gives the answer if and only if it is these tokens."""
    answered = [r for r in requests if r.answer]
    tokens = np.zeros((config.requests, config.longest), np.uint8)
    for row, request in enumerate(answered):
        tokens[row, : len(request.tokens)] = request.tokens
    logits = np.asarray(whole(graphdef)(params, tokens))
    found = {}
    for row, request in enumerate(answered):
        mine = logits[row, len(request.prompt) - 1 : len(request.tokens) - 1]
        found[request.number] = mine.argmax(-1).tolist(), mine.max(-1)
    return found


def check(name, passed):
    print(f"  {'ok' if passed else 'FAILED'}: {name}")
    return passed


# %% [markdown]
# ## What it took


# %%
def percentiles(seconds):
    found = zip((50, 95, 99), 1e3 * np.percentile(seconds, (50, 95, 99)), strict=True)
    return "  ".join(f"p{p} {ms:6.1f}" for p, ms in found)


def report(server, requests, begin):
    seconds, config = time.perf_counter() - begin, server.config
    generated, cancelled = sum(len(r.answer) for r in requests), sum("cancelled" in r.phases for r in requests)
    answered, let_in = [r for r in requests if r.answer], [r for r in requests if r.pages]
    shared, prompts = sum(r.shared for r in let_in), sum(len(r.prompt) for r in let_in)
    used = np.array([used for _, used, *_ in server.history]) / config.pages
    size = sum(x.nbytes for x in jax.tree.leaves(server.pools)) // (config.pages * config.page_size)
    print(
        f"  {len(requests)} requests, {cancelled} of them cancelled, in {len(server.history)} steps of "
        f"{config.rows} rows: {generated / seconds:.0f} tokens/s"
    )
    print(f"  time to first token (ms):   {percentiles([r.times[1] - r.times[0] for r in answered])}")
    print(f"  time per output token (ms): {percentiles(np.concatenate([np.diff(r.times[1:]) for r in answered]))}")
    print(f"  prompt tokens found in the cache: {100 * shared / prompts:.0f} %")
    print(
        f"  pages in use: {100 * used.mean():.0f} % on average, {100 * used.max():.0f} % at most; {size} bytes a token"
    )


def plot(server, requests, path):
    """Who waited, was read and decoded when; whose the pages were; what filled the rows of each step."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(10, 8), layout="constrained")
    top, middle, bottom = figure.subplots(3, 1, sharex=True, height_ratios=(3, 2, 1))
    for request in requests:
        *begun, (last, end) = request.phases.items()
        stops = [*(step for _, step in begun[1:]), end + 1]
        for (phase, start), stop in zip(begun, stops, strict=True):
            top.barh(request.number, stop - start, left=start, color=COLORS[phase], height=0.8)
        if last == "cancelled":
            top.plot(end + 1, request.number, "kx")
    title = f"{len(requests)} requests over {server.allocator.num_pages} pages"
    top.set(ylabel="request (x: its client left)", title=title)
    top.invert_yaxis()
    top.legend(handles=[top.barh(0, 0, color=color, label=phase) for phase, color in COLORS.items()], loc="lower left")
    clock, used, idle, reading, decoding = np.array(server.history).T
    middle.stackplot(clock, used, idle, labels=["in use", "kept to be shared"], colors=["C0", "C9"], step="mid")
    middle.axhline(server.allocator.num_pages, color="k", linestyle="--")
    middle.set(ylabel="pages")
    middle.legend(loc="lower right", framealpha=1)
    bottom.bar(clock, decoding, color=COLORS["decode"], width=1)
    bottom.bar(clock, reading, bottom=decoding, color=COLORS["prefill"], width=1)
    bottom.axhline(server.config.rows, color="k", linestyle="--")
    bottom.set(xlabel="step", ylabel="rows")
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=150)
    print(f"  picture in {path.parent.name}/{path.name}")
    if "ipykernel" in sys.modules:
        from IPython.display import Image, display

        display(Image(path))


COLORS = {"waiting": "lightgray", "prefill": "C1", "decode": "C0"}


# %% [markdown]
# ## All of it


# %%
def trained(config):
    """(graphdef, params) of the demo's model after a few steps."""
    rows = demo.pack(demo.split_documents()[0], config.model.sequence_length)
    graphdef, params = demo.build(demo.jattn_layer, config.model)
    optimizer = demo.optimizer_of(config.model)
    batches = demo.training_batches(rows, config.model)
    params, _ = demo.train(demo.step_of(graphdef, optimizer), params, batches, optimizer, config.model.steps)
    return graphdef, params


def serve_and_check(graphdef, step, params, config, stored, path=None):
    """Serves the requests over pages of one dtype; whether everything is as it should be."""
    Server(step, params, config, stored).advance()  # compiles, with nobody there
    server, requests, begin = Server(step, params, config, stored), requests_of(config), time.perf_counter()
    serve(server, requests, functools.partial(show_progress, begin))
    report(server, requests, begin)
    if path is not None:
        plot(server, requests, path)
    lone = alone(step, params, config, stored, requests)
    own = without_a_cache(graphdef, params, config, requests)
    answered = [r for r in requests if r.answer]
    passed = [
        check("every request got the tokens that it gets alone", all(r.answer == lone[r.number] for r in answered)),
        check("no page has an owner", server.allocator.used == 0),
    ]
    equal = [x == y for r in answered for x, y in zip(r.answer, own[r.number][0], strict=True)]
    apart = max(np.abs(np.array(r.logits) - own[r.number][1]).max() for r in answered)
    if stored == "float32":
        told = f"all {len(equal)} tokens are those of the model without a cache (logits within {apart:.0e})"
        passed.append(check(told, all(equal)))
    else:
        print(f"  {100 * np.mean(equal):.1f} % of the tokens are those of the model without a cache")
    return all(passed), requests


def run(config, output=OUTPUT):
    """The whole demo; 0, or 1 if a check failed."""
    print("Training:")
    graphdef, params = trained(config)
    step, passed = step_of(graphdef), []
    for stored in ("float32", "int8"):
        print(f"\nServing over {stored} pages:")
        path = output / "serving.png" if stored == "float32" else None
        ok, requests = serve_and_check(graphdef, step, params, config, stored, path)
        passed.append(ok)
    longest = max(requests, key=lambda r: len(r.answer))
    question, answer = (bytes(x).decode(errors="replace") for x in (longest.prompt[1 + len(SYSTEM) :], longest.answer))
    print(f"\nThe longest answer: {question!r} -> {answer!r}")
    return 0 if all(passed) else 1


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Continuous batching over a paged cache, checked token by token.")
    parser.add_argument("--requests", type=int, default=Config.requests)
    parser.add_argument("--seed", type=int, default=Config.seed)
    parser.add_argument("--training-steps", type=int, default=Config.model.steps)
    found, begin = parser.parse_args(arguments), time.perf_counter()
    model = dataclasses.replace(Config.model, steps=found.training_steps, seed=found.seed)
    with jax.default_matmul_precision("float32"):  # a GPU's default is TF32: three digits
        status = run(Config(requests=found.requests, seed=found.seed, model=model))
    print(f"\n{time.perf_counter() - begin:.0f} s")
    return status


if __name__ == "__main__":
    if "__file__" in globals():
        sys.exit(main())
    main([])  # in a notebook
