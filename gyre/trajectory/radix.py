"""The radix structure under the trajectory tree: nodes that are ranges of flat arrays.

A node's tokens were sampled all by one call, or by none. Prompts are matched and shared; what was sampled always gets
a node of its own, so that two equal samples stay two. 4 bytes a token, and 8 more where it was sampled; splitting a node
moves none of them. Calls are known here only by their number (`maker`); what they mean is the tree's business.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

ROOT = 0
NOT_SAMPLED = -1
"""The version of a token that the policy did not sample."""


class Match(NamedTuple):
    """How far tokens are in the radix already: all of `node`, then `kept` tokens of its child `inner` (-1: of none)."""

    node: int
    inner: int
    kept: int
    tokens: int
    """In all."""


class Radix:
    def __init__(self) -> None:
        self.ids = array("i")
        self.logprobs = array("f")  # of the sampled tokens alone, and so are the versions
        self.versions = array("i")
        # One entry a node. Its tokens are ids[start : start + length], the log-probs of sampled ones begin at `drawn`.
        self.parent = array("i", (-1,))
        self.start = array("i", (0,))
        self.drawn = array("i", (0,))
        self.length = array("i", (0,))
        self.depth = array("i", (0,))  # tokens from the root to the node's end
        self.maker = array("i", (-1,))  # the call that brought the tokens
        self.sampled = array("B", (0,))  # 1: as its output; 0: as part of its prompt
        self._children: list[dict[int, tuple[int, ...]] | None] = [None]  # by first token; equal samples share one

    # ------------------------------------------------------------------------------------------------ growing

    def match(self, start: int, tokens: array[int], rank: Callable[[int], int]) -> Match:
        """The longest match of `tokens` below `start`; of equally long ones the one whose last node ranks highest."""
        best = (0, -1)
        found = Match(start, -1, 0, 0)
        stack = [(start, 0)]
        while stack:
            node, position = stack.pop()
            children = self._children[node]
            if children is None or position == len(tokens):
                continue
            for child in children.get(tokens[position], ()):
                shared = self._shared(child, tokens, position)
                whole = shared == self.length[child]
                if whole:
                    stack.append((child, position + shared))
                if (reached := (position + shared, rank(child))) > best:
                    best = reached
                    found = Match(child, -1, 0, reached[0]) if whole else Match(node, child, shared, reached[0])
        return found

    def add_prompt(self, parent: int, tokens: array[int], maker: int) -> int:
        """A new node of prompt tokens under `parent`."""
        return self._extend(parent, tokens, maker, 0)

    def add_output(
        self, parent: int, tokens: array[int], logprobs: array[float], versions: array[int], maker: int
    ) -> int:
        """A new node of sampled tokens under `parent`."""
        node = self._extend(parent, tokens, maker, 1)
        self.logprobs.extend(logprobs)
        self.versions.extend(versions)
        return node

    def split(self, node: int, kept: int) -> int:
        """Cut `node` after `kept` tokens; returns the new upper part. The lower keeps its number, and so its calls."""
        parent, start = self.parent[node], self.start[node]
        upper = self._append(parent, start, self.drawn[node], kept, self.maker[node], self.sampled[node])
        siblings = self._children[parent]
        assert siblings is not None
        siblings[self.ids[start]] = tuple(sibling for sibling in siblings[self.ids[start]] if sibling != node)
        self.parent[node] = upper
        self.start[node] = start + kept
        self.drawn[node] += kept
        self.length[node] -= kept
        self._children[upper] = {self.ids[start + kept]: (node,)}
        return upper

    # ------------------------------------------------------------------------------------------------ reading

    def children(self, node: int) -> list[int]:
        return [child for equal in (self._children[node] or {}).values() for child in equal]

    def path(self, node: int, above: int = ROOT) -> list[int]:
        """The nodes from below `above` down to `node`."""
        nodes: list[int] = []
        while node != above:
            nodes.append(node)
            node = self.parent[node]
        return nodes[::-1]

    def ids_along(self, nodes: Sequence[int]) -> array[int]:
        gathered = array("i")
        start = end = 0
        for node in nodes:
            if self.start[node] != end:  # what one thread added in a row lies in a row, and is copied at once
                gathered.extend(self.ids[start:end])
                start = self.start[node]
            end = self.start[node] + self.length[node]
        gathered.extend(self.ids[start:end])
        return gathered

    def logprobs_along(self, nodes: Sequence[int]) -> array[float]:
        """One for each token, 0 where it was not sampled."""
        return self._drawn_along(self.logprobs, array("f", (0.0,)), nodes)

    def versions_along(self, nodes: Sequence[int]) -> array[int]:
        """One for each token, NOT_SAMPLED where it was not."""
        return self._drawn_along(self.versions, array("i", (NOT_SAMPLED,)), nodes)

    def tail(self, node: int, tokens: int) -> array[int]:
        """The last `tokens` ids of the path to the end of `node`; all of it where that has fewer."""
        pieces: list[array[int]] = []
        while node != ROOT and tokens > 0:
            end = self.start[node] + self.length[node]
            pieces.append(self.ids[max(self.start[node], end - tokens) : end])
            tokens -= len(pieces[-1])
            node = self.parent[node]
        out = array("i")
        for piece in reversed(pieces):
            out.extend(piece)
        return out

    def survey(self) -> tuple[dict[int, int], dict[int, tuple[int, int]]]:
        """From one walk over all tokens: by node, the crc32 of the whole path to its end; and its (entry, exit) order.

        Node a lies on the path to node b when a's interval encloses b's.
        """
        crcs = {ROOT: 0}
        entries: dict[int, int] = {}
        spans: dict[int, tuple[int, int]] = {}
        tick = 0
        stack = [ROOT]
        while stack:
            node = stack[-1]
            if node in entries:
                spans[stack.pop()] = (entries[node], tick)
                continue
            entries[node] = tick
            tick += 1
            for child in self.children(node):
                start = self.start[child]
                crcs[child] = zlib.crc32(self.ids[start : start + self.length[child]], crcs[node])
                stack.append(child)
        return crcs, spans

    def faults(self) -> Iterator[str]:
        """What is wrong with the nodes themselves: tokens in no node or in two, depths that do not add up."""
        nodes = range(1, len(self.parent))
        covered = 0
        for node in sorted(nodes, key=lambda node: self.start[node]):
            if self.start[node] != covered or self.length[node] < 1:
                yield f"node {node}: its tokens do not follow those of the node before it in memory"
            covered = self.start[node] + self.length[node]
        if covered != len(self.ids):
            yield f"tree: {len(self.ids)} tokens, of which the nodes hold {covered}"
        drawn = 0
        for node in sorted((node for node in nodes if self.sampled[node]), key=lambda node: self.drawn[node]):
            if self.drawn[node] != drawn:
                yield f"node {node}: its log-probs do not follow those of the node before it in memory"
            drawn = self.drawn[node] + self.length[node]
        if not drawn == len(self.logprobs) == len(self.versions):
            yield f"tree: {len(self.logprobs)} log-probs, of which the nodes hold {drawn}"
        for node in nodes:
            if self.depth[node] != self.depth[self.parent[node]] + self.length[node]:
                yield f"node {node}: its depth is not its parent's and its own length"

    # ------------------------------------------------------------------------------------------------ inside

    def _extend(self, parent: int, tokens: array[int], maker: int, sampled: int) -> int:
        start = len(self.ids)
        self.ids.extend(tokens)
        return self._append(parent, start, len(self.logprobs), len(tokens), maker, sampled)

    def _append(self, parent: int, start: int, drawn: int, length: int, maker: int, sampled: int) -> int:
        node = len(self.parent)
        self.parent.append(parent)
        self.start.append(start)
        self.drawn.append(drawn)
        self.length.append(length)
        self.depth.append(self.depth[parent] + length)
        self.maker.append(maker)
        self.sampled.append(sampled)
        self._children.append(None)
        siblings = self._children[parent]
        if siblings is None:
            siblings = self._children[parent] = {}
        first = self.ids[start]
        siblings[first] = (*siblings.get(first, ()), node)
        return node

    def _drawn_along(self, values: array[Any], blank: array[Any], nodes: Sequence[int]) -> array[Any]:
        gathered = array(values.typecode)
        for node in nodes:
            drawn, length = self.drawn[node], self.length[node]
            gathered.extend(values[drawn : drawn + length] if self.sampled[node] else blank * length)
        return gathered

    def _shared(self, node: int, tokens: array[int], position: int) -> int:
        """How many tokens of `node` equal those at `position`, by halving: equal ranges compare at memory speed."""
        start = self.start[node]
        limit = min(self.length[node], len(tokens) - position)
        if self.ids[start : start + limit] == tokens[position : position + limit]:
            return limit
        low, high = 0, limit - 1
        while low < high:
            middle = (low + high + 1) // 2
            if self.ids[start + low : start + middle] == tokens[position + low : position + middle]:
                low = middle
            else:
                high = middle - 1
        return low
