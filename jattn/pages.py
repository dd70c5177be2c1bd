"""`PageAllocator`: which page of a cache belongs to whom. On the host, in plain Python; it touches no device.

A page has a count of its owners. Full pages of a prompt can be published under a hash of everything up to their end;
later prompts that begin alike share them. A published page without owners stays until its room is needed, least
recently used first.
"""

import collections
import dataclasses
import hashlib
from typing import Any

import numpy as np

__all__ = ["OutOfPages", "PageAllocator"]


class OutOfPages(RuntimeError):
    """Too few pages are free; nothing was allocated."""


@dataclasses.dataclass
class _Deferred:
    """Pages that stay owned until an array is ready."""

    pages: list[int]
    after: Any


class PageAllocator:
    """Owners, sharing and reuse of the pages of a `PagedCache`.

    Every page that a method returns has one owner more, and every owner releases it once. Only a page with one owner
    may be written to: `own` gives one, in the place of a page that is shared.

    Args:
        num_pages: P of the cache.
        page_size: tokens a page.

    Raises:
        ValueError: a number that is not positive.

    Example:
        >>> import jattn
        >>> allocator = jattn.PageAllocator(num_pages=64, page_size=4)
        >>> prompt = list(range(10))
        >>> pages = allocator.match(prompt)             # full pages that an earlier prompt left behind: none yet
        >>> pages += allocator.allocate(3 - len(pages))
        >>> allocator.publish(prompt, pages)            # once their keys and values are written
        >>> allocator.match(prompt + [7]) == pages[:2]  # the third is not full
        True

    Source: Kwon et al., "PagedAttention" (2023), for sharing and copy-on-write; vLLM, for hashes of full pages.
    """

    def __init__(self, num_pages: int, page_size: int):
        for name, x in (("num_pages", num_pages), ("page_size", page_size)):
            if isinstance(x, bool) or not isinstance(x, int | np.integer) or x <= 0:
                raise ValueError(f"{name}={x!r} must be a positive int")
        self.num_pages, self.page_size = int(num_pages), int(page_size)
        self._free = list(range(self.num_pages - 1, -1, -1))
        self._owners = [0] * self.num_pages
        self._deferred: list[_Deferred] = []
        self._promised = collections.Counter()  # releases of each page that are deferred
        self._digest: dict[int, bytes] = {}  # published page -> hash of the tokens up to its end
        self._published: dict[bytes, int] = {}
        self._idle: collections.OrderedDict[int, None] = collections.OrderedDict()  # without owners, oldest first
        self.hits = self.lookups = 0  # full pages that `match` found, and was asked for

    # What there is.

    @property
    def available(self) -> int:
        """Pages that `allocate` can give now, published ones without owners included."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        """Pages that have owners, those of deferred releases included."""
        return self.num_pages - self.available

    @property
    def idle(self) -> int:
        """Published pages without owners: kept to be shared, until their room is needed."""
        return len(self._idle)

    def owners(self, page: int) -> int:
        """How many owners a page has."""
        return self._owners[self._check(page)]

    # Getting pages.

    def allocate(self, count: int) -> list[int]:
        """`count` pages with one owner and no content.

        Raises:
            OutOfPages: fewer are available; nothing changes. Releases whose array is ready are carried out first.
            ValueError: count is negative.
        """
        if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 0:
            raise ValueError(f"count={count!r} must be an int >= 0")
        self.collect()
        if count > self.available:
            waiting = f", {len(self._promised)} wait for deferred releases" if self._promised else ""
            raise OutOfPages(f"{count} pages asked for, {self.available} of {self.num_pages} available{waiting}")
        return [self._take() for _ in range(count)]

    def share(self, pages) -> list[int]:
        """One more owner for each page: a fork of the sequence that they hold.

        Raises:
            ValueError: a page without owners; nothing changes.
        """
        pages = self._owned(pages)
        for page in pages:
            self._owners[page] += 1
        return pages

    def own(self, page: int, after: Any = None) -> tuple[int, int | None]:
        """A page to write to in the place of `page`: `(page, None)` if it has no other owner, else `(new, page)`.

        In the second case copy the content, `copy_pages(cache, [page], [new])`, put the new page into the block table,
        and the owner's share of the old one is released, with `after` as in `release`. A page that was published and
        has one owner is published no longer, because its content is about to change.

        Raises:
            OutOfPages: a copy is needed and no page available; nothing changes. ValueError: a page without owners.
        """
        (page,) = self._owned([page])
        if self._owners[page] == 1:
            self._withdraw(page)
            return page, None
        (new,) = self.allocate(1)
        self.release([page], after)
        return new, page

    # Giving them back.

    def release(self, pages, after: Any = None):
        """One owner less for each page.

        Args:
            pages: page ids; one that is listed twice is released twice.
            after: something with `is_ready()`, a `jax.Array` say, of the last launched step that may read the pages:
                they keep their owner until it is ready. None releases at once.

        Raises:
            ValueError: a page would be released more often than it has owners. TypeError: `after` has no `is_ready`.
                Nothing changes then.
        """
        if after is not None and not hasattr(after, "is_ready"):
            raise TypeError(f"after must have is_ready(), as a jax.Array has, not {type(after).__name__}")
        pages = self._owned(pages)
        for page, times in collections.Counter(pages).items():
            left = self._owners[page] - self._promised[page]
            if times > left:
                raise ValueError(f"page {page} is released {times} times and has {left} owners that did not release it")
        if after is None:
            self._drop(pages)
        elif pages:
            self._promised.update(pages)
            self._deferred.append(_Deferred(pages, after))
        self._promised += collections.Counter()  # forgets zeros

    def collect(self, wait: bool = False) -> int:
        """Carries out the deferred releases whose array is ready; with `wait`, all, after waiting for their arrays.

        Returns:
            How many releases are still deferred.
        """
        deferred, self._deferred = self._deferred, []
        for i, each in enumerate(deferred):
            try:
                if wait:
                    each.after.block_until_ready()
                ready = wait or each.after.is_ready()
            except BaseException:
                self._deferred += deferred[i:]
                raise
            if ready:
                self._promised -= collections.Counter(each.pages)
                self._drop(each.pages)
            else:
                self._deferred.append(each)
        return len(self._deferred)

    # Sharing prefixes.

    def match(self, tokens) -> list[int]:
        """The published pages that `tokens` begin with, each with one owner more.

        At least one token is left over, so that there is a query to compute.

        Args:
            tokens: the ids of a prompt, ints.

        Returns:
            Page ids, in order; the tokens after `len(pages) * page_size` have to be computed.
        """
        tokens, pages = _tokens(tokens), []
        digests = self._digests(tokens[:-1])
        for digest in digests:
            if digest not in self._published:
                break
            pages.append(self._published[digest])
        for page in pages:
            self._idle.pop(page, None)
            self._owners[page] += 1
        self.lookups += len(digests)
        self.hits += len(pages)
        return pages

    def publish(self, tokens, pages):
        """Offers the full pages of a sequence to `match`; call it once their keys and values are written.

        Args:
            tokens: the ids of the sequence so far, ints.
            pages: the pages that hold them, in order; more than the full ones may be given.

        Raises:
            ValueError: fewer pages than full ones, or a page without owners; nothing changes.
        """
        digests, pages = self._digests(_tokens(tokens)), self._owned(pages)
        if len(pages) < len(digests):
            raise ValueError(f"tokens fill {len(digests)} pages, but {len(pages)} pages are given")
        for digest, page in zip(digests, pages, strict=False):
            # The first page with some content serves all: tables of others that computed it as well stay as they are.
            if digest not in self._published and page not in self._digest:
                self._published[digest], self._digest[page] = page, digest

    def _digests(self, tokens):
        """One hash a full page, of all tokens up to its end: keys and values depend on everything before them."""
        chain, found = hashlib.sha256(), []
        for start in range(0, len(tokens) - self.page_size + 1, self.page_size):
            chain.update(tokens[start : start + self.page_size].tobytes())
            found.append(chain.digest())
        return found

    # Single pages.

    def _take(self):
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            self._withdraw(page)
        self._owners[page] = 1
        return page

    def _drop(self, pages):
        # The end of a sequence first, so that of a published prefix its beginning is evicted last.
        for page in reversed(pages):
            self._owners[page] -= 1
            if self._owners[page] == 0 and page in self._digest:
                self._idle[page] = None
            elif self._owners[page] == 0:
                self._free.append(page)

    def _withdraw(self, page):
        digest = self._digest.pop(page, None)
        if digest is not None:
            del self._published[digest]

    def _owned(self, pages):
        pages = [self._check(page) for page in np.asarray(pages).tolist()]
        for page in pages:
            if not self._owners[page]:
                raise ValueError(f"page {page} has no owner")
        return pages

    def _check(self, page):
        if isinstance(page, bool) or not isinstance(page, int | np.integer):
            raise TypeError(f"page {page!r} must be an int")
        if not 0 <= page < self.num_pages:
            raise ValueError(f"page {page} must be in [0, {self.num_pages})")
        return int(page)


def _tokens(tokens):
    tokens = np.asarray(tokens)
    if tokens.ndim != 1 or not (np.issubdtype(tokens.dtype, np.integer) or not tokens.size):
        raise ValueError(f"tokens have shape {tokens.shape} and dtype {tokens.dtype}; expected [n] ints")
    return tokens.astype(np.int64)
