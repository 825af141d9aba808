"""docs/bundle.md says what the code does."""

import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from kdtr_cli.bundle.manifest import encode_manifest
from kdtr_cli.bundle.schema import ARITHMETICS, DEFAULT_LIMITS, DTYPES, LIMIT_VARIABLE, SCHEMA, array_rule

pytestmark = pytest.mark.quick

PAGE = Path(__file__).parents[2] / "docs" / "bundle.md"


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text(encoding="utf-8")


def test_the_reader_of_the_page_reads(page, bundle_path):
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code, bundle_path], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0].startswith("séq 0 [")
    data = bytearray(bundle_path.read_bytes())
    data[-10] ^= 1  # in the manifest, the last dataset
    bundle_path.write_bytes(data)
    done = subprocess.run([sys.executable, "-c", code, bundle_path], capture_output=True, text=True, check=False)
    assert "AssertionError" in done.stderr


def test_names_and_numbers(page):
    assert f"`{SCHEMA}`" in page
    assert LIMIT_VARIABLE in page
    for name in DTYPES:
        assert f"`{name}`" in page
    for names in ARITHMETICS.values():
        for name, dtype in names.items():
            assert f"`{name}` ({dtype})" in page
    numbers = asdict(DEFAULT_LIMITS)
    assert (numbers.pop("dataset_bytes"), numbers.pop("total_bytes")) == (16 << 30, 64 << 30)
    assert "16 GiB an array, 64 GiB in all" in page
    assert (numbers.pop("ratio"), numbers.pop("small_bytes"), numbers.pop("chunk_bytes")) == (100, 1 << 20, 64 << 20)
    assert "over 1 MiB may declare 100 times what it stores" in page
    assert "chunks over 64 MiB" in page
    assert (numbers.pop("objects"), numbers.pop("depth")) == (1_000_000, 8)
    assert "1,000,000 objects; groups nested 8 deep" in page
    assert (numbers.pop("manifest_bytes"), numbers.pop("config_bytes")) == (64 << 20, 4 << 20)
    assert "The manifest has at most 64 MiB, the config 4 MiB" in page.replace("\n", " ")
    assert not numbers


def test_rounds_of_the_page_are_those_of_the_schema(page):
    section = page[page.index("`rounds/` has R rounds") : page.index("## The manifest")]
    for name in re.findall(r"`([a-z_]+)`", section):
        assert array_rule("golden", f"rounds/{name}") is not None, name
    for path in re.findall(r"`((?:rounds|drafts)/[a-z_]+)`", section):
        assert array_rule("golden", path) is not None, path


def test_manifest_keys_of_the_page_are_complete(page, make):
    section = page[page.index("## The manifest") : page.index("## Digests")]
    for key, value in make.manifest().items():
        for name in [key, *(value if isinstance(value, dict) else ())]:
            if name != "model.norm.weight":
                assert f"`{name}`" in section, name
    assert encode_manifest({"b": 1, "a": 2}) == b'{"a":2,"b":1}'  # sorted, no white space
