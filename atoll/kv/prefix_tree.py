"""The tree of computed pages, named by a hash chain: which page holds which tokens after which prefix; knows no ledger and no request."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from atoll.errors import PoolCorruptError
from atoll.kv.checkpoint import Checkpoint
from atoll.kv.eviction import Stamp

DIGEST_BYTES = 16  # 128 bits: two different prefixes share a name with probability below n^2 / 2^129 over n pages


def root_digest(salt: str | None) -> bytes:
    """The name of the empty prefix. Prefixes under different salts never meet; None is a salt of its own, unlike any text."""
    return blake2b(b"" if salt is None else b"salt" + salt.encode(), digest_size=DIGEST_BYTES).digest()


def page_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The name of a full page: of its tokens, and of every token before them."""
    return blake2b(array("q", token_ids).tobytes(), digest_size=DIGEST_BYTES, key=parent).digest()


@dataclass(eq=False, slots=True)
class PrefixNode:
    """One page of rows that are computed, after its parent's."""

    digest: bytes
    page: int  # the null page for the roots, which hold no row
    depth: int  # pages from the beginning, this one included
    parent: "PrefixNode | None"
    children: dict[bytes, "PrefixNode"] = field(default_factory=dict)
    checkpoint: Checkpoint | None = None  # published, for the boundary after this page
    is_held: bool = False  # a request holds the page too, and then every page before it: it cannot be evicted
    stamp: Stamp = (0.0, 0)  # of its last use


def upward(node: PrefixNode | None) -> Iterator[PrefixNode]:
    """A node and all before it, back to the beginning."""
    while node is not None and node.depth:
        yield node
        node = node.parent


class PrefixTree:
    """Nodes by digest. A node's parent is always in the tree, so a prefix is walked from its beginning and ends at the first page that is missing."""

    def __init__(self) -> None:
        self._nodes: dict[bytes, PrefixNode] = {}
        self._by_page: dict[int, PrefixNode] = {}
        self._roots: dict[bytes, PrefixNode] = {}
        self.num_idle = 0  # pages that no request holds: all of them can be evicted, the last of a chain first

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._nodes

    def __iter__(self) -> Iterator[PrefixNode]:
        return iter(self._nodes.values())

    def get(self, digest: bytes) -> PrefixNode | None:
        return self._nodes.get(digest)

    def of_page(self, page: int) -> PrefixNode | None:
        return self._by_page.get(page)

    def insert(self, parent: bytes, digest: bytes, page: int, *, first: bool) -> PrefixNode:
        """Add a page that its request holds; `first`: its parent is a root, made where it is missing. Any other parent is in the tree."""
        assert digest not in self._nodes and page not in self._by_page
        above = self._roots.setdefault(parent, PrefixNode(parent, 0, 0, None)) if first else self._nodes[parent]
        node = self._nodes[digest] = self._by_page[page] = above.children[digest] = PrefixNode(digest, page, above.depth + 1, above, is_held=True)
        return node

    def set_held(self, node: PrefixNode, is_held: bool) -> None:
        """Note whether a request holds a node's page."""
        self.num_idle += node.is_held - is_held
        node.is_held = is_held

    def remove(self, node: PrefixNode) -> None:
        """Take out a node that no request holds and after which none comes."""
        assert not node.is_held and not node.children and node.parent is not None
        del self._nodes[node.digest], self._by_page[node.page], node.parent.children[node.digest]
        self.num_idle -= 1
        if node.parent.depth == 0 and not node.parent.children:
            del self._roots[node.parent.digest]

    def check(self) -> None:
        """Recount everything from scratch. Raises PoolCorruptError at the first disagreement."""
        for node in self:
            if node.parent is None or node.parent.children.get(node.digest) is not node or self._by_page.get(node.page) is not node:
                raise PoolCorruptError(f"page {node.page} at depth {node.depth} is not where its parent and its page say; a node was lost")
            if node.parent.depth and self._nodes.get(node.parent.digest) is not node.parent:
                raise PoolCorruptError(f"page {node.page} at depth {node.depth} has a parent that left the tree; leaves go first")
            if node.depth != node.parent.depth + 1 or (node.is_held and node.parent.depth and not node.parent.is_held):
                raise PoolCorruptError(f"page {node.page} at depth {node.depth} is held without the page before it; whoever holds a page holds its prefix")
        idle = sum(not node.is_held for node in self)
        if idle != self.num_idle or len(self._by_page) != len(self._nodes):
            raise PoolCorruptError(f"{self.num_idle} idle pages of {len(self._by_page)} are counted, {idle} of {len(self._nodes)} are in the tree")
