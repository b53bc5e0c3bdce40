"""The radix tree over token ids: structure only. What hangs on its nodes is the components' business."""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mamba_checkpoint_cache.errors import InvariantError
from mamba_checkpoint_cache.tree.node import Node

TOKEN_BYTES = 4
GHOST_TOKENS = 16
"""How much of an evicted edge is remembered."""
MAX_GHOSTS = 1024
_TOP_BYTE = TOKEN_BYTES - 1 if sys.byteorder == "little" else 0


def pack_tokens(tokens: Sequence[int], stop: int | None = None) -> bytes:
    """``tokens[:stop]`` as packed int32: slices compare at memory speed and take an eighth of a list's space.

    Raises:
        ValueError: if a token is no integer or does not fit 32 bits.
    """
    head = tokens if stop is None else tokens[:stop]
    if isinstance(head, array) and head.typecode == "i":
        return head.tobytes()
    if isinstance(head, list) and (packed := _pack_natural(head)) is not None:
        return packed
    try:
        return struct.pack(f"{len(head)}i", *head)
    except struct.error as error:
        raise ValueError(f"tokens must be integers that fit 32 bits ({error})") from None


def _pack_natural(tokens: list[int]) -> bytes | None:
    """``tokens`` packed, a third faster than struct can; None if one of them is negative or out of range."""
    try:
        packed = array("I", tokens).tobytes()
    except (OverflowError, TypeError):
        return None
    return packed if packed[_TOP_BYTE::TOKEN_BYTES].isascii() else None


class Walk(NamedTuple):
    """How far a key runs in the tree.

    ``node`` is the last node whose whole edge matched, ``matched`` the number of tokens found, in whole pages; past
    ``node.depth`` they run into ``partial``, the edge on which the key leaves the tree.
    """

    node: Node
    matched: int
    partial: Node | None


class RadixTree:
    """Nodes keyed by token pages. Children are found by their first page, so edges split at page boundaries only."""

    def __init__(self, page_size: int = 1) -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        self.page_size = page_size
        self._page_bytes = page_size * TOKEN_BYTES
        self._ghost_tokens = max(GHOST_TOKENS, page_size)
        self.root = Node(b"", 0, None, array("i"))

    def floor(self, depth: int) -> int:
        """The largest depth at or below ``depth`` that is a page boundary."""
        return depth - depth % self.page_size

    def walk(self, key: bytes) -> Walk:
        """Follow ``key`` (packed tokens) from the root as far as it goes."""
        node, position, page = self.root, 0, self._page_bytes
        while child := node.children.get(key[position : position + page]):
            if not key.startswith(child.key, position):
                matched = position + self._common_bytes(child.key, key, position)
                return Walk(node, matched // TOKEN_BYTES, child)
            node, position = child, position + len(child.key)
        return Walk(node, position // TOKEN_BYTES, None)

    def extend(self, walk: Walk, key: bytes, kv: array[int]) -> Node:
        """The node that ends where ``key`` ends, after :meth:`walk` went as far as it could.

        ``kv`` has the KV slot ids of at least the tokens of ``key``, or is empty. Splits and appends as needed.
        """
        node = walk.node
        if walk.partial is not None and walk.matched > node.depth:
            node = self.split(walk.partial, walk.matched)
        if walk.matched * TOKEN_BYTES == len(key):
            return node
        depth = len(key) // TOKEN_BYTES
        leaf = Node(key[walk.matched * TOKEN_BYTES :], depth, node, kv[walk.matched : depth])
        node.children[leaf.key[: self._page_bytes]] = leaf
        return leaf

    def split(self, node: Node, depth: int) -> Node:
        """Cut the edge of ``node`` at ``depth``: a new upper node takes the first part, ``node`` keeps its end."""
        cut = depth - node.start
        upper = Node(node.key[: cut * TOKEN_BYTES], depth, node.parent, node.kv[:cut], last_use=node.last_use)
        self._siblings(node)[node.key[: self._page_bytes]] = upper
        node.key, node.kv, node.parent = node.key[cut * TOKEN_BYTES :], node.kv[cut:], upper
        upper.children[node.key[: self._page_bytes]] = node
        return upper

    def remove(self, leaf: Node) -> None:
        """Take a leaf out of the tree."""
        siblings = self._siblings(leaf)
        if leaf.children or siblings.get(leaf.key[: self._page_bytes]) is not leaf:
            raise InvariantError(f"expected a leaf of the tree at depth {leaf.depth}")
        del siblings[leaf.key[: self._page_bytes]]
        leaf.parent = None

    def detach(self, node: Node) -> None:
        """Make ``node`` and all below it unreachable from the root; the way up from them stays."""
        del self._siblings(node)[node.key[: self._page_bytes]]

    def remember(self, leaf: Node) -> None:
        """Keep how the edge of an evicted leaf began, so that a later miss can be told from a prompt never seen."""
        if leaf.parent is not None:
            ghosts = leaf.parent.ghosts
            ghosts[leaf.key[: self._ghost_tokens * TOKEN_BYTES]] = None
            if len(ghosts) > MAX_GHOSTS:
                del ghosts[next(iter(ghosts))]

    def remembers(self, walk: Walk, key: bytes) -> bool:
        """Whether an edge that was evicted began where ``key`` leaves the tree, and as it goes on."""
        ghosts, rest = walk.node.ghosts, walk.node.depth * TOKEN_BYTES
        if not ghosts or walk.matched > walk.node.depth:
            return False
        sizes = range(self._page_bytes, self._ghost_tokens * TOKEN_BYTES + 1, self._page_bytes)
        return any(key[rest : rest + size] in ghosts for size in sizes)

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root, parents before children."""
        return self.below(self.root)

    @staticmethod
    def below(node: Node) -> Iterator[Node]:
        """All nodes under ``node``, parents before children."""
        stack = list(node.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check(self) -> None:
        """Raise :class:`InvariantError` unless every edge is keyed, linked, measured and page-aligned as it should be."""
        for node in self.nodes():
            parent = node.parent
            if parent is None or parent.children.get(node.key[: self._page_bytes]) is not node:
                raise InvariantError(f"the node at depth {node.depth} is not its parent's child")
            if not node.key or node.start != parent.depth or node.depth % self.page_size:
                raise InvariantError(f"the node at depth {node.depth} starts at {node.start}, its parent ends at {parent.depth}")

    def _siblings(self, node: Node) -> dict[bytes, Node]:
        if node.parent is None:
            raise InvariantError("expected a node with a parent")
        return node.parent.children

    def _common_bytes(self, edge: bytes, key: bytes, position: int) -> int:
        """Bytes of ``edge`` that ``key`` shares from ``position`` on, in whole pages; the first page is known to be shared."""
        low, high = 1, min(len(edge), len(key) - position) // self._page_bytes
        while low < high:
            middle = (low + high + 1) // 2
            if key.startswith(edge[: middle * self._page_bytes], position):
                low = middle
            else:
                high = middle - 1
        return low * self._page_bytes
