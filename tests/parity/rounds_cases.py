"""Goldens with rounds for the tests of judging: drafts that hit now and then, sound trees, a target that walks them."""

import copy

import numpy as np
from parity_cases import Side, golden_side, run_side

from kdtr_cli.ddtree.accept import walk
from kdtr_cli.ddtree.rounds import DraftSettings, Round, pack_rounds
from kdtr_cli.ddtree.tree import build_tree

DRAFTER = "synthetic:0.7"


def make_rounds(
    prompt_length: int, tokens: np.ndarray, settings: DraftSettings, vocab: int, rng: np.random.Generator
) -> list[Round]:
    """Rounds that emit `tokens` (the first one comes from the prompt)."""
    horizon, width = settings.horizon, settings.width(vocab)
    future = np.concatenate([tokens, rng.integers(0, vocab, horizon + 1)]).astype(np.int32)
    rounds, at = [], 0
    while at + 1 < len(tokens):
        ids = np.stack([rng.permutation(vocab)[:width] for _ in range(horizon)]).astype(np.int32)
        for depth in range(horizon):
            token, rank = future[at + 1 + depth], int(rng.integers(0, 2)) % width
            if rng.random() < 0.8 and token not in ids[depth]:
                ids[depth, rank] = token
        logps = -np.sort(rng.exponential(2, (horizon, width)).astype(np.float32), axis=1)
        counts = np.where(rng.random(horizon) < 0.8, width, rng.integers(1, width + 1, horizon)).astype(np.int32)
        if rng.random() < 0.1:
            counts[:] = 0  # a root without a tree
        tree = build_tree(int(future[at]), ids, logps, counts, settings.nodes)
        posterior = rng.integers(0, vocab, tree.n + 1).astype(np.int32)
        node, depth = 0, 0
        while node is not None:
            posterior[node] = future[at + 1 + depth]
            children = np.flatnonzero((tree.parents == node) & (tree.tokens == posterior[node]))
            node, depth = (int(children[0]) if len(children) else None), depth + 1
        accepted, bonus = walk(tree, posterior)
        start, digest = prompt_length + at, rng.bytes(32)
        rounds.append(Round(start, int(future[at]), bonus, tree, accepted, posterior, ids, logps, counts, digest))
        at += len(accepted)
    return rounds


def add_rounds(side: Side, mode: str = "ddtree", budget: int = 6, block_size: int = 5, seed: int = 0) -> None:
    """Give every sequence of a golden rounds, and the manifest its drafting. Stop ids end nothing."""
    rng = np.random.default_rng(seed)
    settings = DraftSettings(mode, DRAFTER, budget, block_size)
    for s in side.seqs:
        rounds = make_rounds(len(s.prompt), s.tokens, settings, side.vocab, rng)
        s.rounds = pack_rounds(rounds, settings.horizon, settings.width(side.vocab), rng.bytes(32))
    side.manifest["decoding"] |= {"mode": mode, "ignore_eos": True}
    side.manifest["drafting"] = {
        "mode": mode,
        "drafter": DRAFTER,
        "of": None,
        "drafter_sha256": None,
        "budget": budget,
        "block_size": block_size,
        "horizon": block_size - 1,
    }


def round_pair(mode: str = "ddtree", budget: int = 6, block_size: int = 5, **kwargs: object) -> tuple[Side, Side]:
    """A golden with rounds, and a run that agrees with it bit for bit. `kwargs` go to `golden_side`."""
    golden = golden_side(**{"steps": 12, **kwargs})
    add_rounds(golden, mode, budget, block_size, seed=int(kwargs.get("seed", 0)))
    run = run_side(golden, mode=mode, steps=golden.manifest["decoding"]["steps"])
    run.manifest["decoding"]["ignore_eos"] = True
    run.manifest["drafting"] = copy.deepcopy(golden.manifest["drafting"])
    return golden, run


def rounds_of(side: Side, seq: int = 0) -> dict[str, np.ndarray]:
    """The arrays of a sequence's rounds by name, writable in place."""
    arrays = side.seqs[seq].rounds
    for path in arrays:
        arrays[path] = arrays[path].copy()
    return {path.removeprefix("rounds/"): array for path, array in arrays.items()}


def node_at(arrays: dict[str, np.ndarray], number: int, node: int) -> int:
    """Where node 1 … n of a round lies in tokens, parents, depths and scores."""
    return int(arrays["n_nodes"][:number].sum()) + node - 1
