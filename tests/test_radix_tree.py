from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mamba_checkpoint_cache.tree.lru import LruQueue
from mamba_checkpoint_cache.tree.node import Node
from mamba_checkpoint_cache.tree.radix_tree import RadixTree, pack_tokens

prompts = st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=12)


@given(prompts=prompts, page_size=st.sampled_from([1, 2, 3]), probe=st.lists(st.integers(0, 2), max_size=14))
def test_a_walk_finds_the_longest_shared_prefix_in_whole_pages(prompts, page_size, probe):
    """Against brute force, for any prompts, any page size and any probe; the KV along the way is that of the first who came."""
    tree = RadixTree(page_size)
    kv_of: dict[tuple[int, ...], int] = {}
    for number, prompt in enumerate(prompts):
        tokens = prompt[: tree.floor(len(prompt))]
        kv = array("i", range(100 * number, 100 * number + len(tokens)))
        key = pack_tokens(tokens)
        if tokens:
            tree.extend(tree.walk(key), key, kv)
        for end in range(1, len(tokens) + 1):
            page_end = -(-end // page_size) * page_size
            kv_of.setdefault((*tuple(tokens[:page_end]), end), kv[end - 1])
    tree.check()

    walk = tree.walk(pack_tokens(probe))

    def shared(prompt):
        return next((i for i, (a, b) in enumerate(zip(prompt, probe, strict=False)) if a != b), min(len(prompt), len(probe)))

    assert walk.matched == max((tree.floor(shared(prompt[: tree.floor(len(prompt))])) for prompt in prompts), default=0)
    node, found = walk.node, []
    while node is not None:
        found[:0] = node.kv
        node = node.parent
    pages = [(*tuple(probe[: -(-end // page_size) * page_size]), end) for end in range(1, walk.node.depth + 1)]
    assert found == [kv_of[page] for page in pages]


def test_a_split_keeps_the_deeper_node_and_all_that_hangs_on_it():
    """The state at the end of an edge stays where it is; the new node takes the first part."""
    tree = RadixTree()
    key = pack_tokens([1, 2, 3, 4])
    deep = tree.extend(tree.walk(key), key, array("i", [11, 12, 13, 14]))

    other = pack_tokens([1, 2, 9])
    leaf = tree.extend(tree.walk(other), other, array("i", [11, 12, 29]))

    assert (deep.depth, deep.start, list(deep.kv)) == (4, 2, [13, 14])
    assert (deep.parent.depth, list(deep.parent.kv)) == (2, [11, 12])
    assert leaf.parent is deep.parent
    assert list(leaf.kv) == [29]
    tree.check()


def test_an_evicted_edge_is_remembered_by_how_it_began():
    """A later prompt that begins the same is told from one never seen."""
    tree = RadixTree()
    key = pack_tokens(list(range(40)))
    leaf = tree.extend(tree.walk(key), key, array("i"))
    tree.remember(leaf)
    tree.remove(leaf)

    again, longer, other = pack_tokens(list(range(40))), pack_tokens(list(range(16)) + [7] * 9), pack_tokens([5] * 40)

    assert [tree.remembers(tree.walk(key), key) for key in (again, longer, other)] == [True, True, False]


@pytest.mark.parametrize("tokens", [[1.5], ["a"], [None], [2**31], [-(2**31) - 1]])
def test_tokens_that_are_no_int32_are_refused(tokens):
    """One clear message instead of a wrong key."""
    with pytest.raises(ValueError, match="tokens must be integers that fit 32 bits"):
        pack_tokens(tokens)


def test_an_array_of_int32_is_the_same_key_as_the_list():
    """Engines that keep arrays skip the conversion."""
    assert pack_tokens(array("i", [3, -1, 2**31 - 1]), 2) == pack_tokens([3, -1])


@given(st.lists(st.tuples(st.sampled_from(["use", "leave", "pop"]), st.integers(0, 5)), max_size=60))
def test_the_queue_gives_the_least_recently_used_member(steps):
    """Against a sorted list, through any order of joining, moving, leaving and eviction."""
    nodes = [Node(b"", 0, None, array("i")) for _ in range(6)]
    queue, members = LruQueue(), {}
    for now, (step, which) in enumerate(steps, 1):
        node = nodes[which]
        if step == "use":
            node.last_use = members[node] = now
            queue.add(node)
        elif step == "leave":
            members.pop(node, None)
            queue.discard(node)
        else:
            oldest = min(members, key=members.get) if members else None
            assert queue.pop() is oldest
            members.pop(oldest, None)
        assert len(queue) == len(members)
        assert all((node in queue) == (node in members) for node in nodes)


def test_the_queue_does_not_grow_with_use():
    """Ten thousand uses of two nodes leave a heap of a handful."""
    nodes = [Node(b"", 0, None, array("i")) for _ in range(2)]
    queue = LruQueue()
    for now in range(10_000):
        nodes[now % 2].last_use = now
        queue.add(nodes[now % 2])

    assert len(queue._heap) < 100
