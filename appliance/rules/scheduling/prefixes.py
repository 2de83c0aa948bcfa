"""Which endpoints have seen the head of a prompt: a radix tree over the bytes of the request.

Bytes, because the router has no tokenizer and needs none: what an engine's cache shares is a shared head, and equal
heads are equal bytes. A node's label is a slice of some prompt; children are told apart by their first byte; a match
that ends inside a label counts as far as it goes. A node remembers how often each endpoint was picked for a prompt that
passed through it, and how often it was passed at all; both fade, halving about every `FADE_VISITS` prompts.

Votes. Along the matched path every label gives its length to the endpoints it speaks for. Those are the ones picked
most often there, not last: one prompt that had to go elsewhere does not move the other thousand. How many it speaks for
follows from its share of the traffic: a head that a twentieth of all prompts start with has one home; one that every
prompt starts with (a system prompt for everybody) has as many homes as there are replicas, and while it has fewer it
speaks for nobody, so that load decides and the next home is found. Without this the first replica to see a shared
system prompt would be sent everybody.

Memory. Label bytes plus `NODE_BYTES` per node are bounded, and so is the number of nodes; leaves go least recently used
first. A prompt touches its path from the leaf upwards, so a node is always younger than its children and the oldest
node is always a leaf: eviction takes from one end of one list and searches nothing.

An endpoint is forgotten by giving it a new id (`Member.forget_cache`): what the tree holds for the old one fades and is
evicted with the rest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

NODE_BYTES = 650
"""What a node costs beside its label: the object, its tables, its place in the list (summed on Python 3.11, 64 bit)."""
TEXT_BYTES = 32 << 10
"""Only so much of a prompt is looked at: about 8,000 tokens. A longer shared head would be told apart no better by more
of it, and a single prompt could otherwise displace thousands of others."""
FADE_VISITS = 1024.0
FADED = 0.05
PRIOR_VISITS = 2.0
"""Added to all traffic when a share is taken, so that the very first prompts do not look like everybody's."""


class Node:
    __slots__ = ("children", "counts", "epoch", "label", "parent", "visits")

    def __init__(self, label: bytes, parent: Node | None, epoch: int) -> None:
        self.label = label
        self.parent = parent
        self.epoch = epoch
        self.children: dict[int, Node] | None = None
        self.counts: dict[int, float] = {}
        self.visits = 0.0


class Match:
    """Where a prompt left the tree. Valid until the next `record` on that tree.

    `path` are the nodes passed, from the top; `matched_bytes` the length of the head seen before; `inside` how many
    bytes of the last node's label matched when it ended there, 0 when the whole label did.
    """

    __slots__ = ("inside", "matched_bytes", "path", "text")

    def __init__(self, text: bytes, path: list[Node], matched_bytes: int, inside: int) -> None:
        self.text = text
        self.path = path
        self.matched_bytes = matched_bytes
        self.inside = inside


class Prefixes:
    """The tree of one model. `size_bytes` never stays above `max_bytes`, nor `len` above `max_nodes`."""

    __slots__ = ("_epoch", "_recent", "_root", "_text_bytes", "max_bytes", "max_nodes", "owned", "size_bytes", "visits")

    def __init__(self, max_bytes: int = 32 << 20, max_nodes: int = 100_000) -> None:
        self.max_bytes = max_bytes
        self.max_nodes = max_nodes
        # One prompt may take a quarter of the tree at most, or a small tree would forget everything for each.
        self._text_bytes = min(TEXT_BYTES, max_bytes // 4)
        self._root = Node(b"", None, 0)
        self._recent: OrderedDict[Node, None] = OrderedDict()
        self._epoch = 0
        self.size_bytes = 0
        self.visits = 0.0
        self.owned: dict[int, int] = {}
        """Label bytes that each endpoint has seen: an estimate of what fills its cache."""

    def __len__(self) -> int:
        """Nodes, without the empty root."""
        return len(self._recent)

    def match(self, text: bytes) -> Match:
        """Walk down as far as `text` has been seen. Changes nothing but the ages of what it passes."""
        if len(text) > self._text_bytes:
            text = text[: self._text_bytes]
        node = self._root
        path: list[Node] = []
        at = 0
        end = len(text)
        epoch = self._epoch
        while at < end and node.children is not None:
            child = node.children.get(text[at])
            if child is None:
                break
            if child.epoch != epoch:
                self._fade(child)
            path.append(child)
            label = child.label
            if not text.startswith(label, at):
                inside = _common(label, text, at)
                return Match(text, path, at + inside, inside)
            at += len(label)
            node = child
        return Match(text, path, at, 0)

    def votes(self, match: Match, allowed: Sequence[int], replicas: int) -> list[float]:
        """For each id in `allowed`, how many bytes of the matched head speak for it. `replicas` is how many endpoints
        share the traffic, those that are not allowed to win included."""
        won: dict[int, float] = dict.fromkeys(allowed, 0.0)
        scale = replicas / (self.visits + PRIOR_VISITS)
        path = match.path
        last = len(path) - 1
        for index, node in enumerate(path):
            length = match.inside if index == last and match.inside else len(node.label)
            due = node.visits * scale
            counts = node.counts
            if due < 1.5:
                most = 0.0
                home = 0
                for identity, seen in counts.items():
                    if seen > most and identity in won:
                        most = seen
                        home = identity
                if home:
                    won[home] += length
                continue
            homes = min(int(due + 0.5), len(won))
            known = [(seen, identity) for identity, seen in counts.items() if identity in won]
            if len(known) >= homes:
                known.sort(reverse=True)
                for _, identity in known[:homes]:
                    won[identity] += length
        return list(won.values())

    def record(self, match: Match, identity: int) -> None:
        """The prompt of `match` went to the endpoint with this id (positive). Uses the match up."""
        text = match.text
        path = match.path
        recent = self._recent
        parent = path[-1] if path else self._root
        if match.inside:
            parent = path[-1] = self._split(parent, match.inside)
        if match.matched_bytes < len(text):
            leaf = Node(text[match.matched_bytes :], parent, self._epoch)
            if parent.children is None:
                parent.children = {}
            parent.children[text[match.matched_bytes]] = leaf
            recent[leaf] = None
            self.size_bytes += len(leaf.label) + NODE_BYTES
            path.append(leaf)
        owned = self.owned
        for node in reversed(path):
            recent.move_to_end(node)
            node.visits += 1.0
            counts = node.counts
            if identity in counts:
                counts[identity] += 1.0
            else:
                counts[identity] = 1.0
                owned[identity] = owned.get(identity, 0) + len(node.label)
        self.visits += 1.0
        if self.visits >= FADE_VISITS:
            self.visits *= 0.5
            self._epoch += 1
        while self.size_bytes > self.max_bytes or len(recent) > self.max_nodes:
            self._evict()

    def _split(self, node: Node, inside: int) -> Node:
        """Cut a label in two; the upper part takes the node's place and is returned."""
        parent = node.parent
        assert parent is not None and parent.children is not None
        label = node.label
        upper = Node(label[:inside], parent, node.epoch)
        upper.visits = node.visits
        upper.counts = node.counts.copy()
        upper.children = {label[inside]: node}
        parent.children[label[0]] = upper
        node.label = label[inside:]
        node.parent = upper
        self._recent[upper] = None
        self.size_bytes += NODE_BYTES
        return upper

    def _evict(self) -> None:
        node, _ = self._recent.popitem(last=False)
        parent = node.parent
        assert parent is not None and parent.children is not None and not node.children
        del parent.children[node.label[0]]
        if not parent.children:
            parent.children = None
        self.size_bytes -= len(node.label) + NODE_BYTES
        for identity in node.counts:
            self._disown(identity, len(node.label))

    def _fade(self, node: Node) -> None:
        factor = 0.5 ** (self._epoch - node.epoch)
        node.epoch = self._epoch
        node.visits *= factor
        counts = node.counts
        for identity in list(counts):
            counts[identity] *= factor
            if counts[identity] < FADED:
                del counts[identity]
                self._disown(identity, len(node.label))

    def _disown(self, identity: int, length: int) -> None:
        left = self.owned.get(identity, 0) - length
        if left > 0:
            self.owned[identity] = left
        else:
            self.owned.pop(identity, None)


def _common(label: bytes, text: bytes, at: int) -> int:
    """How many bytes `label` shares with `text` from `at` on; the first one does, and not all do. Halving with slices
    compared in C: twelve steps for a label of 4 KiB, where a loop over bytes takes four thousand."""
    low = 1
    high = min(len(label), len(text) - at)
    while low < high:
        middle = (low + high + 1) >> 1
        if label[low:middle] == text[at + low : at + middle]:
            low = middle
        else:
            high = middle - 1
    return low
