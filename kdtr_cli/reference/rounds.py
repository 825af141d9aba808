"""The DDTree and chain loops with the NumPy model: a golden's rounds, and the tokens and logits of plain decoding.

One round of all sequences: draft, build the trees, feed roots and nodes in one forward pass, choose after every row,
walk, keep the logits on the way, compact the cache (docs/numerics.md rules 17 to 20).
"""

from dataclasses import dataclass

import numpy as np

from kdtr_cli.ddtree.accept import walk
from kdtr_cli.ddtree.compact import compact
from kdtr_cli.ddtree.rounds import DraftSettings, Round, rows_digest
from kdtr_cli.ddtree.tree import Tree, build_tree, paths
from kdtr_cli.model.prompts import Decoding, Generated, Prompt
from kdtr_cli.reference.drafters import Drafter, Marginals
from kdtr_cli.reference.generate import FiniteCheck, prefill
from kdtr_cli.reference.sampling import choose
from kdtr_cli.reference.transformer import Cache, Model, Rows

__all__ = ["Drafted", "draft_everywhere", "generate_rounds"]


@dataclass(frozen=True, eq=False)
class Drafted:
    """One sequence's output, its rounds, and the digest of its cache rows 0 … P + T - 2 in every layer at the end."""

    generated: Generated
    rounds: list[Round]
    final_cache_digest: bytes


class _Observer:
    """Watches a forward pass: stops at what is not finite, keeps the layer outputs that the drafter reads."""

    def __init__(self, check: FiniteCheck, taps: tuple[int, ...]) -> None:
        self.check = check
        self._names = [f"model.layers.{i}.hidden" for i in taps]
        self._seen: dict[str, np.ndarray] = {}

    def __call__(self, name: str, value: np.ndarray) -> None:
        self.check(name, value)
        if name in self._names:
            self._seen[name] = value

    def features(self) -> np.ndarray | None:
        """[M, taps * hidden] of the rows fed last, in the order of the taps; None without taps."""
        return np.concatenate([self._seen[name] for name in self._names], -1) if self._names else None


class _Sequence:
    """One sequence while it is decoded. ``start`` is the position of ``root``, which has not been fed."""

    def __init__(self, prompt: Prompt, decoding: Decoding, first_logits: np.ndarray) -> None:
        self.prompt, self.decoding = prompt, decoding
        self.start = len(prompt.ids)
        self.root = _choose(first_logits[None], np.array([self.start]), prompt.stream, decoding)[0]
        self.tokens: list[int] = []
        self.logits: list[np.ndarray] = []
        self.rounds: list[Round] = []
        self.stopped = False
        self.emit([int(self.root)], first_logits[None])

    def emit(self, tokens: list[int], logits: np.ndarray) -> None:
        """Add tokens and the logits that chose them, up to the limit and the first stop id."""
        for token, row in zip(tokens, logits, strict=True):
            if not self.done:
                self.tokens.append(token)
                self.logits.append(row)
                self.stopped = self.decoding.stops(token)

    @property
    def done(self) -> bool:
        return self.stopped or len(self.tokens) >= self.decoding.steps

    def generated(self) -> Generated:
        reason = "stop" if self.stopped else "length"
        return Generated(np.array(self.tokens, np.int32), np.stack(self.logits), None, reason)


def generate_rounds(
    model: Model, prompts: list[Prompt], decoding: Decoding, drafter: Drafter, settings: DraftSettings
) -> list[Drafted]:
    """Decode all prompts together by rounds; a sequence's bits do not depend on the others, nor on the drafter.

    Prompts must have been checked by ``check_prompts``; the model must hold rotary tables for P + steps - 1 positions
    and for the drafter's horizon after them, as far as max_position_embeddings goes. InputError, naming the place, when
    the target's or the drafter's arithmetic overflows.
    """
    cache = model.cache([len(p.ids) + decoding.steps + settings.nodes for p in prompts])
    observer = _Observer(FiniteCheck(prompts), drafter.taps)
    sequences = []
    for slot, prompt in enumerate(prompts):
        drafter.reset(slot, prompt)
        sequences.append(_Sequence(prompt, decoding, _feed_prompt(model, cache, observer, drafter, slot, prompt)))
    while active := [slot for slot, sequence in enumerate(sequences) if not sequence.done]:
        _round(model, cache, observer, drafter, settings, sequences, active)
    return [
        Drafted(s.generated(), s.rounds, rows_digest(_rows(cache, slot, 0, len(s.prompt.ids) + len(s.tokens) - 1)))
        for slot, s in enumerate(sequences)
    ]


def draft_everywhere(drafter: Drafter, prompts: list[Prompt], outputs: list[np.ndarray], k: int) -> list[Marginals]:
    """For each sequence the marginals at every output position: ids, log-probabilities [T, L, k], counts [T, L].

    Entry t is what the drafter says with tokens[t] as the root. ``drafter`` must just have been through
    ``generate_rounds`` with these prompts, whose outputs int32 [T] these are.
    """
    out = []
    for slot, (prompt, tokens) in enumerate(zip(prompts, outputs, strict=True)):
        each = [drafter.marginals(slot, len(prompt.ids) + t, int(token), k) for t, token in enumerate(tokens)]
        out.append(tuple(np.stack(part) for part in zip(*each, strict=True)))
    return out


def _feed_prompt(
    model: Model, cache: Cache, observer: _Observer, drafter: Drafter, slot: int, prompt: Prompt
) -> np.ndarray:
    """Feed a prompt and give it to the drafter; the logits [V] of its last position."""

    def commit(tokens: np.ndarray) -> None:
        drafter.extend(slot, tokens, observer.features())

    return prefill(model, cache, observer.check, slot, prompt.ids, keep_all=False, observe=observer, fed=commit)[-1]


def _round(
    model: Model,
    cache: Cache,
    observer: _Observer,
    drafter: Drafter,
    settings: DraftSettings,
    sequences: list[_Sequence],
    active: list[int],
) -> None:
    """One round of the active sequences."""
    config = model.config
    drafts: list[Marginals] = []
    trees: list[Tree] = []
    for slot in active:
        s = sequences[slot]
        drafts.append(drafter.marginals(slot, s.start, int(s.root), settings.width(config.vocab_size)))
        trees.append(build_tree(int(s.root), *drafts[-1], settings.nodes, config.max_position_embeddings - 1 - s.start))
    rows = _tree_rows([sequences[slot].start for slot in active], trees, active)
    observer.check.rows = rows
    hidden = model.forward(rows, cache, observer)
    logits = model.logits(hidden)
    observer.check("logits", logits)
    features = observer.features()
    for (slot, run), tree, draft in zip(rows.runs(), trees, drafts, strict=True):
        s = sequences[slot]
        posterior = _choose(logits[run], rows.positions[run] + 1, s.prompt.stream, s.decoding)
        accepted, bonus = walk(tree, posterior)
        for layer in cache.rows:
            compact(layer[slot], s.start, accepted)
        drafter.extend(slot, tree.tokens[accepted], None if features is None else _committed(features[run], accepted))
        digest = rows_digest(_rows(cache, slot, s.start, len(accepted)))
        one = Round(s.start, int(s.root), bonus, tree, accepted, posterior, *draft, digest)
        s.rounds.append(one)
        s.emit(one.emitted.tolist(), logits[run][accepted])
        s.start, s.root = s.start + len(accepted), bonus


def _committed(features: np.ndarray, accepted: np.ndarray) -> np.ndarray:
    """The accepted rows of a round's features, which need not be its first ones."""
    return features[accepted]


def _tree_rows(starts: list[int], trees: list[Tree], slots: list[int]) -> Rows:
    """The verifier's rows of all trees, one after another (rule 19)."""
    return Rows(
        tokens=np.concatenate([tree.tokens for tree in trees]),
        slots=np.repeat(np.array(slots, np.int32), [tree.n + 1 for tree in trees]),
        positions=np.concatenate([start + tree.depths for start, tree in zip(starts, trees, strict=True)]),
        places=np.concatenate([start + np.arange(tree.n + 1) for start, tree in zip(starts, trees, strict=True)]),
        paths=[start + path for start, tree in zip(starts, trees, strict=True) for path in paths(tree)],
    )


def _choose(logits: np.ndarray, positions: np.ndarray, stream: int, decoding: Decoding) -> np.ndarray:
    streams = np.full(len(positions), stream)
    return choose(logits, positions, streams, temperature=decoding.temperature, seed=decoding.seed)


def _rows(cache: Cache, slot: int, first: int, count: int) -> list[np.ndarray]:
    return [layer[slot][first : first + count] for layer in cache.rows]
