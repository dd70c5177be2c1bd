"""`PageAllocator` against a simple model of owners, under any order of calls."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

import jattn
from jattn import OutOfPages, PageAllocator

PAGE = 4
#: Few different pages, so that prompts often begin alike.
PROMPTS = st.builds(
    lambda full, rest: [token for token in full for _ in range(PAGE)] + rest,
    st.lists(st.integers(0, 1), max_size=3), st.lists(st.integers(0, 1), max_size=PAGE),
)


class Token:
    """An array that is ready when told so."""

    ready = False

    def is_ready(self):
        return self.ready

    def block_until_ready(self):
        self.ready = True


class Model(RuleBasedStateMachine):
    """Sequences of tokens with the pages that hold them; what is in a page is known at every moment.

    `content[page]` is what the device would hold there. A page is never handed out or written while somebody else, or
    a step that is not ready, can read it: then `content` would differ from what the sequences say.
    """

    sequences = Bundle("sequences")

    @initialize(pages=st.integers(1, 12))
    def start(self, pages):
        self.allocator = PageAllocator(pages, PAGE)
        self.content = {}
        self.live = []  # (tokens, pages), mutable
        self.in_flight = []  # (token, pages, what they hold)

    def owners(self):
        """How many of each page, by sequences and by cancelled ones that a step may still read."""
        held = [pages for _, pages in self.live] + [pages for _, pages, _ in self.in_flight]
        return collections.Counter(page for pages in held for page in pages)

    def write(self, sequence, tokens):
        """Appends tokens; every page written to belongs to this sequence alone."""
        own, pages = sequence
        for token in tokens:
            if len(own) % PAGE == 0:
                pages += self.allocator.allocate(1)
                self.content[pages[-1]] = ()
            elif len(self.content[pages[-1]]) != len(own) % PAGE or self.allocator.owners(pages[-1]) > 1:
                new, old = self.allocator.own(pages[-1])
                assert (new, old) == (pages[-1], None) or old == pages[-1]
                self.content[new] = self.content[pages[-1]][: len(own) % PAGE]
                pages[-1] = new
            assert self.allocator.owners(pages[-1]) == 1
            own.append(token)
            self.content[pages[-1]] += (token,)

    @rule(target=sequences, tokens=PROMPTS, publish=st.booleans())
    def begin(self, tokens, publish):
        pages = self.allocator.match(tokens)
        assert len(pages) * PAGE < max(len(tokens), 1)
        sequence = (list(tokens[: len(pages) * PAGE]), pages)
        self.live.append(sequence)
        try:
            self.write(sequence, tokens[len(pages) * PAGE :])
        except OutOfPages:
            self.live.remove(sequence)
            self.allocator.release(sequence[1])
            return multiple()
        if publish:
            self.allocator.publish(*sequence)
        return sequence

    @rule(sequence=sequences, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def grow(self, sequence, tokens):
        try:
            self.write(sequence, tokens)
        except OutOfPages as error:
            assert "available" in str(error) and self.allocator.available == 0

    @rule(sequence=sequences, count=st.integers(1, 6))
    def rewind(self, sequence, count):
        """Drafts were refused: what comes next is written over them."""
        tokens, pages = sequence
        del tokens[max(len(tokens) - count, 0) :]
        keep = -(-len(tokens) // PAGE)
        self.allocator.release(pages[keep:])
        del pages[keep:]

    @rule(target=sequences, sequence=sequences)
    def fork(self, sequence):
        copy = (list(sequence[0]), self.allocator.share(sequence[1]))
        self.live.append(copy)
        return copy

    @rule(sequence=sequences)
    def publish(self, sequence):
        self.allocator.publish(*sequence)

    @rule(sequence=consumes(sequences))
    def finish(self, sequence):
        self.live = [x for x in self.live if x is not sequence]
        self.allocator.release(sequence[1])

    @rule(sequence=consumes(sequences))
    def cancel(self, sequence):
        """While a step that reads its pages is in flight."""
        token = Token()
        self.live = [x for x in self.live if x is not sequence]
        self.allocator.release(sequence[1], after=token)
        self.in_flight.append((token, list(sequence[1]), [self.content[p] for p in sequence[1]]))

    @rule(index=st.integers(0, 3))
    def becomes_ready(self, index):
        if index < len(self.in_flight):
            token, pages, seen = self.in_flight.pop(index)
            for page, content in zip(pages, seen, strict=True):  # nobody wrote there in between
                assert self.content[page][: len(content)] == content
            token.ready = True
            self.allocator.collect()

    @invariant()
    def owners_agree(self):
        if hasattr(self, "allocator"):
            held = self.owners()
            assert [self.allocator.owners(p) for p in range(self.allocator.num_pages)] == [
                held[p] for p in range(self.allocator.num_pages)
            ]
            assert self.allocator.used == len(held)
            assert self.allocator.available == self.allocator.num_pages - len(held)

    @invariant()
    def every_sequence_reads_its_own_tokens(self):
        for tokens, pages in getattr(self, "live", ()):
            read = [t for page in pages for t in self.content[page]]
            assert len(pages) == -(-len(tokens) // PAGE)
            assert read[: len(tokens)] == tokens

    def teardown(self):
        """Nothing leaks: when all is released, all can be had."""
        if not hasattr(self, "allocator"):
            return
        for _, pages in self.live:
            self.allocator.release(pages)
        self.allocator.collect(wait=True)
        assert self.allocator.used == 0
        assert sorted(self.allocator.allocate(self.allocator.num_pages)) == list(range(self.allocator.num_pages))


TestModel = Model.TestCase
TestModel.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, derandomize=True, database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.quick
def test_prompts_that_begin_alike_share_full_pages():
    allocator = PageAllocator(8, PAGE)
    prompt = list(range(10))
    pages = allocator.allocate(3)
    allocator.publish(prompt, pages)
    assert allocator.match(prompt) == pages[:2] and allocator.match(prompt[:8]) == pages[:1]  # one token is left to run
    assert allocator.match([0, 1, 2, 3, 9, 5, 6, 7, 8]) == pages[:1]
    assert allocator.match([9, *prompt[1:]]) == [] and allocator.match([]) == []
    assert (allocator.hits, allocator.lookups) == (4, 2 + 1 + 2 + 2)
    assert [allocator.owners(p) for p in pages] == [4, 2, 1]


def test_equal_tokens_after_another_beginning_are_other_pages():
    """Keys depend on all that came before: the hash of a page does too."""
    allocator = PageAllocator(8, PAGE)
    allocator.publish([1] * 8, allocator.allocate(2))
    assert allocator.match([2] * 4 + [1] * 5) == []


def test_published_pages_outlive_their_owners_until_there_is_need():
    """Least recently used first, and of one prompt the end before the beginning."""
    allocator = PageAllocator(4, PAGE)
    old, new = allocator.allocate(2), allocator.allocate(2)
    allocator.publish([1] * 8, old)
    allocator.publish([2] * 8, new)
    allocator.release(old)
    allocator.release(new)
    assert allocator.available == allocator.idle == 4 and allocator.used == 0
    assert allocator.match([1] * 9) == old and allocator.idle == 2  # used again: now the younger one
    allocator.release(old)
    assert allocator.allocate(1) == new[1:]
    assert allocator.match([2] * 9) == new[:1]
    assert allocator.allocate(1) == old[1:]
    with pytest.raises(OutOfPages, match="2 pages asked for, 1 of 4 available"):
        allocator.allocate(2)
    assert allocator.match([1] * 9) == old[:1]


def test_a_shared_page_is_copied_before_it_is_written():
    allocator = PageAllocator(3, PAGE)
    page = allocator.allocate(1)
    fork = allocator.share(page)
    new, source = allocator.own(fork[0])
    assert source == page[0] and new != page[0] and allocator.owners(page[0]) == allocator.owners(new) == 1
    assert allocator.own(page[0]) == (page[0], None)
    third = allocator.share([new])
    allocator.allocate(1)
    with pytest.raises(OutOfPages):
        allocator.own(third[0])
    assert allocator.owners(new) == 2


def test_a_published_page_that_is_written_is_published_no_longer():
    allocator = PageAllocator(3, PAGE)
    pages = allocator.allocate(1)
    allocator.publish([1] * 4, pages)
    assert allocator.own(pages[0]) == (pages[0], None)
    assert allocator.match([1] * 5) == []


def test_a_release_waits_for_the_step_that_reads():
    allocator, token = PageAllocator(3, PAGE), Token()
    pages = allocator.allocate(3)
    allocator.release(pages[:2], after=token)
    with pytest.raises(OutOfPages, match="1 pages asked for, 0 of 3 available, 2 wait for deferred releases"):
        allocator.allocate(1)
    with pytest.raises(ValueError, match=f"page {pages[0]} is released 1 times and has 0 owners that did not"):
        allocator.release(pages[:1])
    token.ready = True
    assert sorted(allocator.allocate(2)) == sorted(pages[:2])
    allocator.release(pages[:1], after=Token())
    assert allocator.collect() == 1 and allocator.collect(wait=True) == 0 and allocator.available == 1


def test_a_release_waits_for_a_real_array():
    allocator = PageAllocator(2, PAGE)
    last = jax.jit(lambda x: x @ x)(jnp.ones((64, 64)))
    allocator.release(allocator.allocate(2), after=last)
    last.block_until_ready()
    assert allocator.collect() == 0 and len(allocator.allocate(2)) == 2


def test_a_deferred_release_whose_array_fails_is_not_lost():
    class Broken:
        def is_ready(self):
            raise RuntimeError("deleted")

    allocator, token = PageAllocator(3, PAGE), Token()
    allocator.release(allocator.allocate(1), after=Broken())
    pages = allocator.share([0])
    allocator.release(pages, after=token)
    with pytest.raises(RuntimeError, match="deleted"):
        allocator.collect()
    assert allocator.owners(0) == 2 and len(allocator._deferred) == 2


class Server:
    """Continuous batching in four slots: prompts in chunks of 8 beside decoding, with whatever pages there are."""

    def __init__(self, pages):
        self.allocator, self.slots = PageAllocator(pages, 16), [None] * 4
        self.cache = jattn.PagedCache.zeros(pages, 16, 2, 8, sequences=4, pages_per_sequence=4)

    def admit(self, prompt):
        slot, pages = self.slots.index(None), self.allocator.match(prompt)
        self.slots[slot] = request = dict(tokens=list(prompt), pages=pages, cached=16 * len(pages), results=[])
        return request

    def step(self):
        rows, counts, lengths = np.zeros((4, 8), np.int32), np.zeros(4, np.int32), np.zeros(4, np.int32)
        tables = np.full((4, 4), -1, np.int32)
        for slot, r in enumerate(self.slots):
            if r is None:
                continue
            n = min(8, len(r["tokens"]) - r["cached"])
            try:
                r["pages"] += self.allocator.allocate(-(-(r["cached"] + n) // 16) - len(r["pages"]))
            except OutOfPages:
                continue
            rows[slot, :n], counts[slot], lengths[slot] = r["tokens"][r["cached"] :][:n], n, r["cached"]
            tables[slot, : len(r["pages"])] = r["pages"]
        self.cache = jattn.PagedCache(self.cache.key_pages, self.cache.value_pages, tables, lengths)
        self.cache, self.last = serve(self.cache, rows, counts)
        for slot, r in enumerate(self.slots):
            if r is None:
                continue
            r["cached"] += int(counts[slot])
            self.allocator.publish(r["tokens"][: r["cached"]], r["pages"])
            if counts[slot] and r["cached"] == len(r["tokens"]):
                result = np.asarray(self.last[slot, counts[slot] - 1])
                r["results"].append(result)
                r["tokens"].append(int(result.ravel().argmax()) % 16)

    def finish(self, request):
        """Now, though the last step may still read its pages."""
        self.slots = [None if r is request else r for r in self.slots]
        self.allocator.release(request["pages"], after=self.last)


EMBEDDING = np.random.default_rng(1).standard_normal((3, 16, 4, 8)).astype(np.float32)


@jax.jit
def serve(cache, tokens, counts):
    """One attention layer over embedded tokens."""
    q, k, v = (jnp.asarray(x)[tokens] for x in EMBEDDING)
    cache = jattn.append(cache, k[:, :, :2], v[:, :, :2], seq_lengths=counts)
    return cache, jattn.paged_attention(q, cache, query_seq_lengths=counts)


def test_requests_get_what_they_get_alone():
    """Shared prefixes, chunks, too few pages, eviction and cancellation: every result is the lone one bit for bit."""
    rng = np.random.default_rng(2)
    system = rng.integers(0, 16, 20).tolist()
    prompts = [(system if i % 3 else []) + rng.integers(0, 16, rng.integers(1, 25)).tolist() for i in range(10)]

    def alone(prompt, count):
        server = Server(8)
        request = server.admit(prompt)
        while len(request["results"]) < count:
            server.step()
        return request

    server, waiting, running, done = Server(9), list(range(10)), {}, {}
    for _ in range(300):
        while waiting and None in server.slots and server.allocator.available >= 3:
            i = waiting.pop(0)
            running[i] = server.admit(prompts[i])
        server.step()
        for i, request in list(running.items()):
            stalled = len(running) > 1 and not server.allocator.available and rng.random() < 0.2
            if len(request["results"]) >= 4 + i % 3 or stalled:  # finished, or cancelled to make room
                done[i] = running.pop(i)
                server.finish(request)
        if len(done) == 10:
            break
    assert len(done) == 10 and server.allocator.hits > 0
    assert server.allocator.collect(wait=True) == 0 and server.allocator.used == 0
    for i, request in done.items():
        want = alone(prompts[i], len(request["results"]))
        assert request["tokens"] == want["tokens"][: len(request["tokens"])]
        for x, y in zip(request["results"], want["results"], strict=False):
            np.testing.assert_array_equal(x, y)
    assert sum(len(request["results"]) for request in done.values()) > 30


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda a: PageAllocator(0, 4), ValueError, "num_pages=0 must be a positive int"),
        (lambda a: PageAllocator(4, 2.0), ValueError, "page_size=2.0 must be a positive int"),
        (lambda a: a.allocate(-1), ValueError, "count=-1 must be an int >= 0"),
        (lambda a: a.allocate(9), OutOfPages, "9 pages asked for, 3 of 4 available"),
        (lambda a: a.release([0, 0]), ValueError, "page 0 is released 2 times and has 1 owners"),
        (lambda a: a.release([0, 1]), ValueError, "page 1 has no owner"),
        (lambda a: a.release([-1]), ValueError, r"page -1 must be in \[0, 4\)"),
        (lambda a: a.release([4]), ValueError, r"page 4 must be in \[0, 4\)"),
        (lambda a: a.release([0.0]), TypeError, "page 0.0 must be an int"),
        (lambda a: a.release([0], after=3), TypeError, r"after must have is_ready\(\), as a jax.Array has, not int"),
        (lambda a: a.share([0, 2]), ValueError, "page 2 has no owner"),
        (lambda a: a.own(3), ValueError, "page 3 has no owner"),
        (lambda a: a.publish(range(8), [0]), ValueError, "tokens fill 2 pages, but 1 pages are given"),
        (lambda a: a.publish([0.5] * 4, [0]), ValueError, "tokens have shape .* expected .n. ints"),
        (lambda a: a.match([[1]]), ValueError, r"tokens have shape \(1, 1\) and dtype int64"),
    ],
)
def test_refused_and_nothing_changed(call, error, words):
    allocator = PageAllocator(4, PAGE)
    assert allocator.allocate(1) == [0]
    with pytest.raises(error, match=words):
        call(allocator)
    assert (allocator.available, allocator.owners(0), allocator._published) == (3, 1, {})
