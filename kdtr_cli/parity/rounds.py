"""Two recordings of DDTree or chain rounds, bit for bit: in which round and where in it do they part?

Arrays are those of a bundle (docs/bundle.md, rounds/), by path. In the order of cause and effect: where the round
starts, its root, the drafter's marginals, the tree, the target's choice after each row, the accepted path, the bonus,
the digest of the cache rows that it committed; after the last round the digest of the whole cache.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

__all__ = ["DECIDING", "RoundDifference", "RoundsComparison", "compare_rounds", "fault", "judged_rounds", "tau"]

Arrays = Mapping[str, np.ndarray]

#: What decides where a tolerance is given: what is drafted and emitted, not by which logits.
DECIDING = frozenset({"count", "start", "root", "tree", "accepted", "bonus"})

#: Parts of a round that follow from the target's choices in it.
_LATE = frozenset({"accepted", "bonus", "cache"})

_EACH = ("start", "root", "bonus", "n_nodes", "n_accepted")
_NODES = ("tokens", "parents", "depths", "scores")
_DRAFTS = ("draft_top_ids", "draft_top_logps")
_DTYPES = {
    "scores": np.float64,
    "draft_top_logps": np.float32,
    "cache_digest": np.uint8,
    "final_cache_digest": np.uint8,
}
_REQUIRED = (*_EACH, *_NODES, "accepted", "posterior", *_DRAFTS, "draft_counts")


@dataclass(frozen=True)
class RoundDifference:
    """Where two recordings part first.

    `round` counts from 0 (past the last one: the number of rounds, or the cache at the end); `position` is where the
    round starts, `part` what differs (count, start, root, marginals, tree, scores, posterior, accepted, bonus, cache,
    final_cache), `what` says where in it, with both values, which are `golden` and `run`. `follows`: the tokens part
    here or before, so that this is no difference of its own.
    """

    round: int
    position: int | None
    part: str
    what: str
    golden: object
    run: object
    follows: bool = False

    @property
    def where(self) -> str:
        """'round 3 (position 41): node 5 has token 12, golden 9'."""
        place = f"round {self.round}" + (f" (position {self.position})" if self.position is not None else "")
        if self.part == "final_cache":
            place = "after the last round"
        return f"{place}: {self.what}"


@dataclass(frozen=True)
class RoundsComparison:
    """Of `judged` rounds of the golden the first `equal` ones agree. `difference` is the first that decides; `open` the
    first that a tolerance leaves undecided, which `open_rounds` rounds have. `digests`: "compared", "none" where both
    sides lack some, "golden" or "run" where one side alone has them."""

    judged: int
    equal: int
    difference: RoundDifference | None
    open: RoundDifference | None
    open_rounds: int
    digests: str

    @property
    def all_bits(self) -> bool:
        """Whether nothing that was compared differs."""
        return self.difference is None and self.open is None and self.equal == self.judged


def fault(arrays: Arrays) -> str | None:
    """Why arrays can't be cut into rounds: one is missing, of another dtype, or lengths do not add up. None: they
    can."""
    part = _parts(arrays)
    for name in _REQUIRED:
        if name not in part:
            return f"rounds/{name} is missing"
    for name, array in part.items():
        wanted = np.dtype(_DTYPES.get(name, np.int32))
        if array.dtype != wanted:
            return f"rounds/{name} is {array.dtype}, not {wanted}"
    count = len(part["start"]) if part["start"].ndim == 1 else -1
    for name in _EACH:
        if part[name].shape != (count,):
            return f"rounds/{name} has shape {list(part[name].shape)}; one number a round is due"
    sums = {}
    for name, least in (("n_nodes", 0), ("n_accepted", 1)):
        wrong = np.flatnonzero(part[name] < least)
        if len(wrong):
            return f"round {wrong[0]}: rounds/{name} is {part[name][wrong[0]]}; at least {least} is due"
        sums[name] = int(part[name].sum(dtype=np.int64))
    due = dict.fromkeys(_NODES, sums["n_nodes"])
    due |= {"accepted": sums["n_accepted"], "posterior": sums["n_nodes"] + count}
    for name, rows in due.items():
        if part[name].shape != (rows,):
            return f"rounds/{name} has shape {list(part[name].shape)}; the counts of the rounds add up to {rows}"
    ids, logps = (part[name].shape for name in _DRAFTS)
    if len(ids) != 3 or ids[0] != count or logps != ids or part["draft_counts"].shape != ids[:2]:
        return (
            f"rounds/draft_top_ids, draft_top_logps and draft_counts have shapes {list(ids)}, {list(logps)} and "
            f"{list(part['draft_counts'].shape)}; [rounds, L, K] twice and [rounds, L] are due"
        )
    for name, shape in (("cache_digest", (count, 32)), ("final_cache_digest", (32,))):
        if name in part and part[name].shape != shape:
            return f"rounds/{name} has shape {list(part[name].shape)}, not {list(shape)}"
    return None


def tau(arrays: Arrays) -> float | None:
    """Mean of the accepted rows a round, the root counted; None without rounds."""
    accepted = arrays["rounds/n_accepted"]
    return float(accepted.mean(dtype=np.float64)) if len(accepted) else None


def judged_rounds(arrays: Arrays, prompt_length: int, steps: int | None) -> int:
    """How many rounds there are, counted until one starts so late that nothing it emits is among the first `steps`
    output tokens: a round that starts at s emits from output position s - prompt_length + 1 on."""
    start = arrays["rounds/start"]
    if steps is None:
        return len(start)
    late = np.flatnonzero(start.astype(np.int64) - prompt_length + 1 >= steps)
    return int(late[0]) if len(late) else len(start)


def compare_rounds(
    golden: Arrays,
    run: Arrays,
    prompt_length: int,
    *,
    strict: bool = True,
    steps: int | None = None,
    parted: int | None = None,
    whole: bool = True,
) -> RoundsComparison:
    """Compare two recordings of rounds that have no `fault`.

    `strict`: every bit decides; else `DECIDING` parts alone do. `steps`: rounds that emit nothing before this output
    position are left out. `parted`: the first output position where the tokens of the two sides differ, None: they
    don't. `whole`: both sides have as many tokens and all of them are judged, so the caches at the end are comparable.
    """
    g, r = _parts(golden), _parts(run)
    counts = [judged_rounds(side, prompt_length, steps) for side in (golden, run)]
    digests = _digests(g, r)
    left_open, open_rounds = None, 0
    for number, (a, b) in enumerate(zip(_cut(g, counts[0]), _cut(r, counts[1]), strict=False)):
        differs = False
        for found in _differences(number, a, b, None if parted is None else parted - (a.start - prompt_length)):
            if strict or found.part in DECIDING:
                return RoundsComparison(counts[0], number, found, left_open, open_rounds, digests)
            left_open, differs = left_open or found, True
        open_rounds += differs
    difference, equal = None, min(counts)
    if counts[0] != counts[1]:
        starts = (g if counts[0] > counts[1] else r)["start"]
        position = int(starts[equal])
        what = f"the run has {counts[1]} rounds, golden {counts[0]}"
        follows = parted is not None and position - prompt_length + 1 >= parted
        difference = RoundDifference(equal, position, "count", what, *counts, follows)
    elif whole and parted is None and "final_cache_digest" in g and "final_cache_digest" in r:
        last = _digest("final_cache", g["final_cache_digest"], r["final_cache_digest"], "the cache at the end")
        if last is not None:
            found = RoundDifference(equal, None, *last)
            difference, left_open = (found, left_open) if strict else (None, left_open or found)
    return RoundsComparison(counts[0], equal, difference, left_open, open_rounds, digests)


@dataclass(frozen=True, eq=False)
class _Round:
    """One round's part of every array: n nodes without the root, a accepted, L depths."""

    start: int
    root: int
    bonus: int
    tokens: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    scores: np.ndarray
    accepted: np.ndarray
    posterior: np.ndarray
    ids: np.ndarray
    logps: np.ndarray
    counts: np.ndarray
    digest: np.ndarray | None


# part, what differs in words, the golden's value, the run's
_Found = tuple[str, str, object, object]


def _parts(arrays: Arrays) -> dict[str, np.ndarray]:
    return {path.removeprefix("rounds/"): array for path, array in arrays.items() if path.startswith("rounds/")}


def _cut(part: Mapping[str, np.ndarray], count: int) -> Iterator[_Round]:
    """The first `count` rounds, one after another."""
    node = taken = 0
    for i in range(count):
        n, a = int(part["n_nodes"][i]), int(part["n_accepted"][i])
        yield _Round(
            *(int(part[name][i]) for name in ("start", "root", "bonus")),
            *(part[name][node : node + n] for name in _NODES),
            accepted=part["accepted"][taken : taken + a],
            posterior=part["posterior"][node + i : node + i + n + 1],
            ids=part["draft_top_ids"][i],
            logps=part["draft_top_logps"][i],
            counts=part["draft_counts"][i],
            digest=part["cache_digest"][i] if "cache_digest" in part else None,
        )
        node, taken = node + n, taken + a


def _differences(number: int, g: _Round, r: _Round, parted: int | None) -> Iterator[RoundDifference]:
    """The first difference in each part of two rounds. `parted`: how many output tokens after the golden's root the
    tokens part, 1 being the first that the round emits; 0 or less: at the root or before it."""
    before = parted is not None and parted <= 0
    within = parted is not None and 0 < parted <= len(g.accepted)
    # the row whose choice is the token that differs; that of any other row is the round's own affair
    excused = int(g.accepted[parted - 1]) if within else None

    def made(found: _Found, follows: bool) -> RoundDifference:
        return RoundDifference(number, g.start, *found, follows=before or follows)

    if g.start != r.start:
        yield made(("start", f"the run's starts at {r.start}, golden {g.start}", g.start, r.start), False)
    if g.root != r.root:
        yield made(("root", f"the root is {r.root}, golden {g.root}", g.root, r.root), False)
    for found in (_marginals(g, r), *_tree(g, r)):
        if found is not None:
            yield made(found, False)
    yield from (made(found, row == excused) for row, found in _posterior(g, r, excused))
    late = [_accepted(g, r)]
    if g.bonus != r.bonus:
        late.append(("bonus", f"the bonus is {r.bonus}, golden {g.bonus}", g.bonus, r.bonus))
    if g.digest is not None and r.digest is not None:
        late.append(_digest("cache", g.digest, r.digest, "the cache rows that it committed"))
    yield from (made(found, within and found[0] in _LATE) for found in late if found is not None)


def _marginals(g: _Round, r: _Round) -> _Found | None:
    """Counts, then ids, then log-probabilities of the candidates that there are: past the counts lies nothing."""
    if g.ids.shape != r.ids.shape:
        shapes = [list(x.ids.shape) for x in (g, r)]
        return "marginals", f"the marginals are {shapes[1]}, golden {shapes[0]}", *shapes
    if (at := _first(g.counts, r.counts)) is not None:
        pair = int(g.counts[at]), int(r.counts[at])
        return "marginals", f"depth {at + 1} has {pair[1]} candidates, golden {pair[0]}", *pair
    width = g.ids.shape[1]
    there = (np.arange(width) < g.counts[:, None]).reshape(-1)
    for name, what in (("ids", "is token"), ("logps", "has log-probability")):
        a, b = (getattr(x, name).reshape(-1) for x in (g, r))
        other = np.flatnonzero(_bits(a, b) & there)
        if len(other):
            depth, rank = divmod(int(other[0]), width)
            text, *pair = _values(a[other[0]], b[other[0]])
            return "marginals", f"depth {depth + 1}, rank {rank} {what} {text}", *pair
    return None


def _tree(g: _Round, r: _Round) -> list[_Found]:
    """The first node with another token, parent or depth, and the first with another score; the smaller one first."""
    common = min(len(g.tokens), len(r.tokens))
    found: list[tuple[int, _Found]] = []
    for part, names in (("tree", ("tokens", "parents", "depths")), ("scores", ("scores",))):
        firsts = {name: _first(getattr(g, name)[:common], getattr(r, name)[:common]) for name in names}
        known = {name: at for name, at in firsts.items() if at is not None}
        if known:
            name = min(known, key=known.__getitem__)
            at = known[name]
            text, *pair = _values(getattr(g, name)[at], getattr(r, name)[at])
            found.append((at, (part, f"node {at + 1} has {name.removesuffix('s')} {text}", *pair)))
        elif part == "tree" and len(g.tokens) != len(r.tokens):
            pair = len(g.tokens), len(r.tokens)
            found.append((common, (part, f"the tree has {pair[1]} nodes, golden {pair[0]}", *pair)))
    return [one for _, one in sorted(found, key=lambda item: item[0])]


def _posterior(g: _Round, r: _Round, excused: int | None) -> list[tuple[int, _Found]]:
    """The first row with another choice, `excused` only if it is the only one; none where the trees differ in size."""
    if len(g.posterior) != len(r.posterior):
        return []  # the tree says so
    other = np.flatnonzero(g.posterior != r.posterior).tolist()
    if not other:
        return []
    row = next((row for row in other if row != excused), other[0])
    text, *pair = _values(g.posterior[row], r.posterior[row])
    return [(row, ("posterior", f"after node {row} the target chose {text}", *pair))]


def _accepted(g: _Round, r: _Round) -> _Found | None:
    common = min(len(g.accepted), len(r.accepted))
    if (at := _first(g.accepted[:common], r.accepted[:common])) is not None:
        text, *pair = _values(g.accepted[at], r.accepted[at])
        return "accepted", f"row {at} of the accepted path is node {text}", *pair
    if len(g.accepted) != len(r.accepted):
        pair = len(g.accepted), len(r.accepted)
        return "accepted", f"{pair[1]} rows are accepted, golden {pair[0]}", *pair
    return None


def _digest(part: str, g: np.ndarray, r: np.ndarray, what: str) -> _Found | None:
    a, b = g.tobytes().hex(), r.tobytes().hex()
    return None if a == b else (part, f"the digest of {what} is {b[:12]}..., golden {a[:12]}...", a, b)


def _digests(g: Mapping[str, np.ndarray], r: Mapping[str, np.ndarray]) -> str:
    """Whether the digests of the cache can be compared, see RoundsComparison."""
    for name in ("cache_digest", "final_cache_digest"):
        if (name in g) != (name in r):
            return "golden" if name in g else "run"
    return "compared" if "cache_digest" in g and "final_cache_digest" in g else "none"


def _bits(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Where two arrays of one shape and dtype have other bits: bool of that shape."""
    if a.dtype.kind != "f":
        return a != b
    whole = np.dtype(f"u{a.dtype.itemsize}")
    return np.ascontiguousarray(a).view(whole) != np.ascontiguousarray(b).view(whole)


def _first(a: np.ndarray, b: np.ndarray) -> int | None:
    other = np.flatnonzero(_bits(a, b))
    return int(other[0]) if len(other) else None


def _values(g: np.generic, r: np.generic) -> tuple[str, object, object]:
    """'RUN, golden GOLDEN', the golden's value, the run's; with their bits where the digits are the same."""
    a, b = str(g), str(r)
    if a == b:
        a, b = (f"{text} (bits {x.tobytes()[::-1].hex()})" for text, x in ((a, g), (b, r)))
    return f"{b}, golden {a}", g.item(), r.item()
