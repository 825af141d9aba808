"""The curves of the worst sequence of a report as a PNG: heat map, error, KL and ULP, margins, tensors.

matplotlib is an extra (`kdtr[plot]`), imported when a picture is asked for.
"""

import io
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from kdtr_cli.errors import InputError
from kdtr_cli.parity.drawn import drawn_sequences
from kdtr_cli.parity.results import Report, SequenceResult
from kdtr_cli.parity.traces import TraceResult
from kdtr_cli.report.line import safe, verdict_line
from kdtr_cli.report.series import Series, pooled, series_of
from kdtr_cli.report.steps import Mark, marks

__all__ = ["check_plot", "report_png"]

_GOLDEN, _RUN, _BAD, _TIE, _GOOD, _ERROR = "#a9720f", "#1f62b5", "#b3261e", "#7340a8", "#1c7a4a", "#c63c5b"
_GAP, _ZERO, _NAN = "#e6e3da", "#dcebe1", "#00a3c4"
_HEAT = ("#f6ecd2", "#f3c46c", "#e98347", "#c63c5b", "#7f2a74", "#2f1a55")


def check_plot(path: Path, output_file: Path | None) -> None:
    """Say before any work whether a picture can be made. InputError: no matplotlib, another kind of file than PNG, the
    same file as the report."""
    if path.suffix.lower() != ".png":
        raise InputError(f"--plot {path}: the picture is a PNG; name a file that ends in .png")
    if output_file is not None and path.absolute() == output_file.absolute():
        raise InputError(f"--plot {path} is the --output-file too; name another file")
    if find_spec("matplotlib") is None:
        raise InputError("--plot needs matplotlib, which is not installed: pip install 'kdtr[plot]'")


def report_png(report: Report) -> bytes:
    """The picture. A report without any sequence gives one that says so."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    worst = next(iter(drawn_sequences(report.sequences)), None)
    panels = [] if worst is None else _panels(worst, report.teacher_forced)
    heights = [height for height, _ in panels] or [1.0]
    figure = Figure(figsize=(11, 1.8 + sum(heights)), dpi=110, layout="constrained", facecolor="white")
    canvas = FigureCanvasAgg(figure)
    figure.suptitle("\n".join(_title(report, worst)), x=0.01, ha="left", fontsize=10, parse_math=False)
    axes = np.atleast_1d(figure.subplots(len(heights), 1, height_ratios=heights))
    if not panels:
        axes[0].set_axis_off()
        axes[0].text(0.5, 0.5, "There are no curves to draw.", ha="center", va="center")
    for ax, (_, draw) in zip(axes, panels, strict=False):
        ax.tick_params(labelsize=8)
        ax.spines[["top", "right"]].set_visible(False)
        draw(ax)
    out = io.BytesIO()
    canvas.print_png(out, metadata={"Software": "kdtr"})
    return out.getvalue()


def _title(report: Report, worst: SequenceResult | None) -> list[str]:
    line = verdict_line(report)
    lines = [line if len(line) <= 150 else line[:147] + "..."]
    if worst is not None:
        name = safe(worst.id)
        of = "" if report.totals.sequences == 1 else f", the worst of {report.totals.sequences}"
        lines.append(f"sequence {worst.index} {name[:80]}{of}: {worst.verdict.value}")
        lines.append(
            "by step; dashed: the first divergence, grey: not compared, pale green: no difference, blue: not finite"
        )
    return lines


def _panels(result: SequenceResult, teacher_forced: bool) -> list[tuple[float, Any]]:
    """(height in inches, what draws it) from the top down."""
    series = series_of(result.logits.curves, result.logits.rows_compared)
    state = marks(result, teacher_forced)
    first = None if result.divergence is None else result.divergence.step
    panels: list[tuple[float, Any]] = []
    if series is not None:
        total = max(len(state), series.rows)
        at = _Steps(series, total, first, result.logits.form == "full")
        if series.blocks.shape[1]:
            panels.append((2.6, lambda ax: _heat(ax, at)))
        for title, values, colour in (
            ("largest |run - golden|", series.max_abs, _ERROR),
            ("KL(golden || run), nats", series.kl, _TIE),
            ("largest ULP distance", series.max_ulp, _RUN),
        ):
            if at.full or not np.isnan(values).all():
                panels.append((1.3, lambda ax, t=title, v=values, c=colour: _curve(ax, at, t, [(None, v, c)])))
        places = pooled(state, series.per, np.maximum)[: len(series.golden_margin)]
        ties = np.flatnonzero((places == Mark.TIE) | (series.golden_margin == 0))
        both = [("golden", series.golden_margin, _GOLDEN), ("run", series.run_margin, _RUN)]
        panels.append((1.5, lambda ax: _curve(ax, at, "margin", both, ties)))
    trace = result.trace
    if trace is not None and trace.tensors:
        panels.append((1.9, lambda ax: _tensors(ax, trace)))
    return panels


class _Steps:
    """The axis of steps that all panels share. `full`: every value is there, so that NaN is a value and no gap."""

    def __init__(self, series: Series, total: int, first: int | None, full: bool) -> None:
        self.series, self.total, self.first, self.full = series, total, first, full
        self.middle = (np.arange(len(series.max_abs)) + 0.5) * series.per - 0.5

    def finish(self, ax: Any) -> None:
        ax.set_xlim(-0.5, self.total - 0.5)
        if self.series.rows < self.total:
            ax.axvspan(self.series.rows - 0.5, self.total - 0.5, color=_GAP, zorder=0, lw=0)
        if self.first is not None:
            ax.axvline(self.first - 0.5, color=_BAD, ls="--", lw=1.2)


def _heat(ax: Any, at: _Steps) -> None:
    from matplotlib.colors import LinearSegmentedColormap, LogNorm
    from matplotlib.ticker import NullFormatter

    blocks = at.series.blocks.astype(np.float64).T
    positive = blocks[np.isfinite(blocks) & (blocks > 0)]
    colours = LinearSegmentedColormap.from_list("kdtr", _HEAT)
    colours = colours.with_extremes(bad=_NAN if at.full else _GAP, under=_ZERO, over=_NAN)
    high = positive.max() if positive.size else 1.0
    low = min(positive.min(), high / 100) if positive.size else 1e-9
    shown = np.where(blocks == 0, low * 1e-6, blocks)
    norm = LogNorm(low, high)
    ids = blocks.shape[0] * at.series.block_size
    right = min(at.series.per * blocks.shape[1], at.series.rows) - 0.5
    # LogNorm would mask what is not above 0, and the worst must not be averaged away
    image = ax.imshow(
        np.ma.masked_invalid(shown),
        aspect="auto",
        interpolation="nearest",
        cmap=colours,
        norm=norm,
        extent=(-0.5, right, ids, 0),
    )
    ax.set_ylabel("id", fontsize=8)
    ax.set_title(
        "largest |run - golden| by step and block of the vocabulary" + ("" if positive.size else ": no difference"),
        fontsize=9,
        loc="left",
    )
    if positive.size:
        place = ax.inset_axes([0.7, 1.03, 0.3, 0.04])  # above, so that the steps of all panels stay one below another
        ax.figure.colorbar(image, cax=place, orientation="horizontal")
        place.xaxis.set_ticks_position("top")
        place.xaxis.set_minor_formatter(NullFormatter())
        place.tick_params(labelsize=7)
    at.finish(ax)


def _curve(
    ax: Any,
    at: _Steps,
    title: str,
    curves: list[tuple[str | None, np.ndarray, str]],
    ties: np.ndarray | None = None,
) -> None:
    """Curves on a scale that is logarithmic above the smallest value that is not 0; what is not finite is marked."""
    known = np.concatenate([values for _, values, _ in curves])
    positive = known[np.isfinite(known) & (known > 0)]
    if positive.size:
        _logarithmic(ax, positive)
    for i, (label, values, colour) in enumerate(curves):
        finite = np.where(np.isfinite(values), values, np.nan)
        style = {"marker": "o", "ms": 2.5} if len(values) <= 80 else {}
        ax.plot(at.middle, finite, color=colour, lw=3 if i == 0 and len(curves) > 1 else 1.2, label=label, **style)
        odd = np.flatnonzero(~np.isfinite(values) if at.full and len(curves) == 1 else np.isinf(values))
        if len(odd):
            top = positive.max() if positive.size else 1.0
            ax.plot(at.middle[odd], np.full(len(odd), top), "v", color=_NAN, ms=5)
    if ties is not None and len(ties):
        ax.plot(at.middle[ties], curves[0][1][ties], "o", mfc="none", mec=_TIE, ms=8, label="a tie")
    said = "" if positive.size else ": 0 at every step" if np.isfinite(known).any() else ": not known"
    ax.set_title(title + said, fontsize=9, loc="left")
    if any(label for label, _, _ in curves):
        ax.legend(fontsize=7, loc="lower right", bbox_to_anchor=(1, 0.98), ncols=3, frameon=False)
    ax.grid(axis="y", color="#eeece5")
    at.finish(ax)


def _logarithmic(ax: Any, positive: np.ndarray) -> None:
    """A scale with a place for 0 below the smallest value, and few enough labels."""
    least = 10.0 ** np.floor(np.log10(positive.min()))
    ax.set_yscale("symlog", linthresh=least, linscale=1)
    ax.set_ylim(0, positive.max() * 3)
    ax.yaxis.get_major_locator().set_params(numticks=5)


def _tensors(ax: Any, trace: TraceResult) -> None:
    values = np.array([np.nan if t.max_abs is None else t.max_abs for t in trace.tensors], np.float64)
    positive = values[np.isfinite(values) & (values > 0)]
    if positive.size:
        _logarithmic(ax, positive)
    colours = [_GOOD if t.rows_identical == t.rows else _BAD if t.rows_out else _RUN for t in trace.tensors]
    ax.plot(np.where(np.isfinite(values), values, np.nan), color=_ERROR, lw=0.8, alpha=0.5)
    ax.scatter(np.arange(len(values)), np.where(np.isfinite(values), values, np.nan), c=colours, s=10, zorder=3)
    for i, tensor in enumerate(trace.tensors):
        if tensor is trace.first:
            ax.axvline(i, color=_BAD, ls="--", lw=1.2)
            ax.set_xlabel(f"first that parts: {safe(tensor.name)[:80]}", fontsize=8, color=_BAD, parse_math=False)
    ax.set_title("error by tensor, in the order of execution", fontsize=9, loc="left")
    ax.grid(axis="y", color="#eeece5")
