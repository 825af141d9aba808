"""The curves as PNG, with matplotlib where it is there."""

import io
from importlib.util import find_spec

import numpy as np
import picture_cases as pictures
import pytest
from report_cases import REPORTS

from kdtr_cli.errors import InputError
from kdtr_cli.report.plot import check_plot, report_png

needs_matplotlib = pytest.mark.skipif(find_spec("matplotlib") is None, reason="no matplotlib: pip install 'kdtr[plot]'")

CASES = {
    "diverged": pictures.diverged,
    "2000 steps": pictures.long,
    "identical": pictures.identical,
    "not finite": pictures.odd,
    "tie": pictures.tie,
    "tensors": pictures.traced,
    "partial": pictures.partial,
}
CASES |= {f"plain: {name}": REPORTS[name] for name in ("nothing", "unopened", "nasty", "tokens alone")}


def image(png: bytes) -> np.ndarray:
    from matplotlib.image import imread

    return imread(io.BytesIO(png), format="png")


def share(png: bytes, colour: tuple[int, int, int]) -> float:
    """How much of a picture has that colour."""
    pixels = np.round(image(png)[..., :3] * 255).astype(int)
    return float((pixels == colour).all(axis=-1).mean())


@needs_matplotlib
@pytest.mark.parametrize("name", CASES)
def test_every_report_is_a_picture_and_no_warning(name):
    png = report_png(CASES[name]())
    height, width, _ = image(png).shape
    assert width > 1000
    assert height > 200
    assert len(png) < 1_000_000


@needs_matplotlib
def test_the_picture_shows_what_the_report_has():
    diverged, identical = report_png(pictures.diverged()), report_png(pictures.identical())
    largest, zero, gap = (47, 26, 85), (220, 235, 225), (230, 227, 218)
    assert share(diverged, largest) > 1e-4
    assert share(identical, largest) == 0
    assert share(identical, zero) > 0.15
    assert share(diverged, gap) > 0.1
    assert share(identical, gap) < 0.001


@needs_matplotlib
def test_the_same_report_is_the_same_picture():
    assert report_png(pictures.diverged()) == report_png(pictures.diverged())


@needs_matplotlib
def test_names_are_no_formulas():
    golden, run = pictures.pair()
    golden.one.id = run.one.id = "$\\frac{$"
    report_png(pictures.drawn(golden, run))


class TestCheck:
    def test_another_kind_of_file(self, tmp_path):
        with pytest.raises(InputError, match=r"--plot .*a\.svg: the picture is a PNG; name a file that ends in \.png"):
            check_plot(tmp_path / "a.svg", None)

    def test_the_report_s_own_file(self, tmp_path):
        with pytest.raises(InputError, match="is the --output-file too"):
            check_plot(tmp_path / "a.png", tmp_path / "a.png")

    def test_without_matplotlib(self, tmp_path, monkeypatch):
        monkeypatch.setattr("kdtr_cli.report.plot.find_spec", lambda name: None)
        with pytest.raises(InputError, match=r"--plot needs matplotlib, .*: pip install 'kdtr\[plot\]'"):
            check_plot(tmp_path / "a.png", None)
