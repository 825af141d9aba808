"""`--kdtr-update`: a golden made anew by its recipe, or from what its own manifest says, and what that changed."""

import os
import secrets
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kdtr_cli.bundle.reader import Bundle, BundleSequence, open_bundle
from kdtr_cli.errors import InputError, KdtrError
from kdtr_cli.model.choices import Choices
from kdtr_cli.model.presets import PRESETS
from kdtr_cli.model.prompts import Prompt, check_prompts
from kdtr_cli.model.source import open_model
from kdtr_cli.workflows.engine_inputs import write_model
from kdtr_cli.workflows.golden import GoldenOptions, prepare_golden, write_golden
from kdtr_cli.workflows.golden_rounds import DraftOptions
from kdtr_cli.workflows.prompts import PromptOptions
from kdtr_cli.workflows.run import check_golden
from kdtr_cli.workflows.verify import verify_bundle

__all__ = ["Recipe", "make_anew"]

#: The words of a `kdtr golden` without -o, or a function that writes a golden to a path.
Recipe = str | Sequence[str] | Callable[[Path], object]


def make_anew(path: Path, recipe: Recipe | None, root: Path) -> str:
    """Make the golden ``path`` anew and say in one line what changed. The new one is made beside the old, checked, and
    put in its place in one step; where the content is the same the old file stays.

    InputError: it can't be made anew; the old one is as it was.
    """
    if path.is_dir():
        raise InputError(f"{path} is a sweep; 'kdtr golden' makes it, shard by shard")
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.stem[:200]}.{secrets.token_hex(4)}.new.h5")
    try:
        if recipe is None:
            _from_manifest(path, new)
        elif callable(recipe):
            recipe(new)
        else:
            _by_command(recipe, new, root)
        problems = verify_bundle(new).problems
        if problems:
            raise InputError(f"{path} was not made anew: {problems[0]}")
        with open_bundle(new) as made:
            check_golden(made)
            said = list(_changes(path, made))
        if said:
            os.replace(new, path)
        return f"{path}: {'; '.join(said) if said else 'made anew, nothing changed'}"
    finally:
        new.unlink(missing_ok=True)


def _by_command(recipe: str | Sequence[str], new: Path, root: Path) -> None:
    words = shlex.split(recipe) if isinstance(recipe, str) else list(recipe)
    command = [sys.executable, "-m", "kdtr_cli", "golden", *words, "-o", str(new)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, errors="replace")
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise InputError(f"'kdtr golden {shlex.join(words)}' failed with exit {done.returncode}: {reason}")


def _from_manifest(path: Path, new: Path) -> None:
    """The same prompts, settings and model; what a manifest does not hold needs a recipe."""
    if not path.exists():
        raise InputError(f"{path}: no such golden, and no recipe to make it by")
    with open_bundle(path) as old, tempfile.TemporaryDirectory(prefix="kdtr-update-") as folder:
        check_golden(old)
        made = old.manifest
        drafted = made.get("drafting")
        if drafted is not None and drafted["drafter_sha256"] is not None:
            raise InputError(
                f"{path} was drafted by a checkpoint, which no bundle holds: give it a recipe to make it by"
            )
        arithmetic = [name for name in made["arithmetic"] if name != "bf16"]
        exact = arithmetic == ["exact", "float64"]
        if not exact and arithmetic not in (["float64"], ["float32"]):
            named = ", ".join(made["arithmetic"])
            raise InputError(f"{path} holds logits of {named}: give the golden a recipe to make it by")
        decoding = made["decoding"]
        choices = {name: made["choices"][name] for name in ("latent_norm_eps", "rope_angles")}
        options = GoldenOptions(
            model=_model(old, Path(folder)),
            output=new,
            prompts=PromptOptions(seed=decoding["seed"]),
            steps=decoding["steps"],
            ignore_eos=decoding["ignore_eos"],
            temperature=decoding["temperature"],
            exact=exact,
            single=arithmetic[0] if not exact else "float64",
            logits=made["logits"],
            score=made["score"],
            choices=Choices(**choices),
            embed_weights=made["model"]["embedded"],
            drafting=drafted and DraftOptions(*(drafted[k] for k in ("mode", "drafter", "budget", "block_size"))),
            bf16="bf16" in made["arithmetic"],
        )
        prompts = [Prompt(s.id, s.prompt, s.stream) for s in old.sequences]
        model = open_model(options.model, cache=False)
        prepared = prepare_golden(options, model, check_prompts(prompts, model.config, options.steps))
        prepared.manifest["model"]["name"] = made["model"].get("name", model.name)
        if "prompts" in made:
            prepared.manifest["prompts"] = made["prompts"]
        write_golden(prepared, prompts, new, force=False)
        with open_bundle(new) as written:
            _check_nothing_lost(old, written)


def _model(old: Bundle, folder: Path) -> str:
    """The weights that the golden embeds, or the preset that it names: what it was made from, and nothing else."""
    embedded = write_model(old, folder)
    if embedded is not None:
        return str(embedded)
    name = old.manifest["model"].get("name")
    if name in PRESETS:
        return name
    raise InputError(f"{old.path} embeds no weights and no preset is called {name!r}: give it a recipe to make it by")


def _check_nothing_lost(old: Bundle, new: Bundle) -> None:
    """Options that leave arrays and no word in the manifest are not known here; then there is less in the new one."""
    length = {s.id: len(s.tokens) for s in new.sequences}
    for a, b in zip(old.sequences, new.sequences, strict=True):
        lost = sorted(set(a.array_names()) - set(b.array_names()) - {"ties"})
        if lost and length[b.id]:
            raise InputError(
                f"{old.path} holds {lost[0]}, which its manifest doesn't say how to make: give it a recipe"
            )


def _changes(path: Path, new: Bundle) -> Iterator[str]:
    """What is other in the new golden, one phrase each; nothing: the two have the same content."""
    if not path.exists():
        yield "made"
        return
    try:
        with open_bundle(path) as old:
            if old.manifest_sha256 == new.manifest_sha256:
                return
            yield "made anew"
            yield from _fields("", _told(old.manifest), _told(new.manifest))
            yield from _sequences(old, new)
    except KdtrError as error:
        yield f"made anew, the old one was broken ({error})"


def _told(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest without what the sequences say themselves."""
    return {k: v for k, v in manifest.items() if k not in ("sequences", "datasets", "schema", "kind")}


def _fields(where: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for key in sorted({*old, *new}):
        a, b = old.get(key), new.get(key)
        if a == b:
            continue
        if key == "weights" or not (isinstance(a, dict) and isinstance(b, dict)):
            yield f"{where}{key} is another" if key == "weights" else f"{where}{key} {_short(a)} -> {_short(b)}"
        else:
            yield from _fields(f"{where}{key}.", a, b)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 24 else f"{text[:8]}..."


def _sequences(old: Bundle, new: Bundle) -> Iterator[str]:
    before, after = ({s.id: s for s in bundle.sequences} for bundle in (old, new))
    for name, only in (("gone", before.keys() - after.keys()), ("new", after.keys() - before.keys())):
        if only:
            yield f"{len(only)} sequences {name}, first {min(only)!r}"
    both = [(before[name], after[name]) for name in before if name in after]
    if other := [b.id for a, b in both if not np.array_equal(a.prompt, b.prompt)]:
        yield f"{len(other)} prompts are others, first of {other[0]!r}"
    parted = [(b.id, _first(a.tokens, b.tokens)) for a, b in both if not np.array_equal(a.tokens, b.tokens)]
    if parted:
        yield f"tokens of {len(parted)} sequences are others, first of {parted[0][0]!r} at step {parted[0][1]}"
    largest = max((_largest(a, b) for a, b in both), default=0.0)
    if largest:
        yield f"largest change of a logit {largest:.3e}"


def _first(a: np.ndarray, b: np.ndarray) -> int:
    common = min(len(a), len(b))
    differ = np.flatnonzero(a[:common] != b[:common])
    return int(differ[0]) if len(differ) else common


def _largest(old: BundleSequence, new: BundleSequence) -> float:
    """The largest change of a logit up to the step where the tokens part; inf where it is not a number."""
    steps = min(_first(old.tokens, new.tokens) + 1, len(old.tokens), len(new.tokens))
    held = [n for n in old.array_names() if n.startswith("logits/") and not n.endswith(("_top_ids", "_sha256"))]
    largest = 0.0
    for name in held:
        if name in new.array_names() and old.shape(name)[1:] == new.shape(name)[1:] and steps:
            a, b = (np.asarray(s.rows(name, 0, steps), np.float64) for s in (old, new))
            with np.errstate(invalid="ignore"):
                change = float(np.abs(b - a).max())
            largest = max(largest, change if change == change else np.inf)
    return largest
