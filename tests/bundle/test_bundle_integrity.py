"""Every flipped bit of content is found, and the digests are those of docs/bundle.md."""

import hashlib
import random
from pathlib import Path

import h5py
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kdtr_cli.bundle import open_bundle
from kdtr_cli.bundle.integrity import array_sha256, stored_view, stream_sha256
from kdtr_cli.bundle.schema import SchemaError
from kdtr_cli.errors import InputError
from kdtr_cli.workflows.verify import verify_bundle

pytestmark = pytest.mark.quick


def places(path: Path) -> dict[str, tuple[int, int]]:
    """Where each dataset's bytes lie in the file: (offset, size)."""
    found = {}

    def note(name, item):
        if isinstance(item, h5py.Dataset):
            found[name] = (item.id.get_offset(), item.id.get_storage_size())

    with h5py.File(path, "r") as file:
        file.visititems(note)
    return found


def test_one_bit_in_any_dataset_is_found_and_named(bundle_path):
    whole = bundle_path.read_bytes()
    dice = random.Random(1)
    spots = places(bundle_path)
    assert len(spots) == 2 + 1 + 2 * 6
    for name, (offset, size) in spots.items():
        for at in {offset, offset + size - 1, offset + dice.randrange(size)}:
            data = bytearray(whole)
            data[at] ^= 1 << dice.randrange(8)
            bundle_path.write_bytes(data)
            result = verify_bundle(bundle_path)
            assert len(result.problems) == 1, name
            assert name.rpartition("/")[2] in result.problems[0]
            assert "digest" in result.problems[0] or "manifest_sha256" in result.problems[0]
            assert result.path == str(bundle_path)
    bundle_path.write_bytes(whole)
    assert verify_bundle(bundle_path).ok


@pytest.mark.parametrize("read", ["array", "rows", "blocks", "verified_sha256"])
def test_no_way_to_read_skips_the_digest(bundle_path, read):
    offset, size = places(bundle_path)["sequences/000001/logits/exact"]
    data = bytearray(bundle_path.read_bytes())
    data[offset + size - 1] ^= 1
    bundle_path.write_bytes(data)
    calls = {
        "array": lambda sequence: sequence.array("logits/exact"),
        "rows": lambda sequence: sequence.rows("logits/exact", 0, 1),  # not even near the damage
        "blocks": lambda sequence: list(sequence.blocks("logits/exact", 64)),
        "verified_sha256": lambda sequence: sequence.verified_sha256("logits/exact"),
    }
    with open_bundle(bundle_path) as bundle:
        calls[read](bundle.sequences[0])
        for _ in range(2):  # a refusal is not remembered as a success
            with pytest.raises(InputError, match="sequences/000001/logits/exact does not match its digest"):
                calls[read](bundle.sequences[1])


def test_several_damaged_arrays_are_all_told(bundle_path):
    data = bytearray(bundle_path.read_bytes())
    for name in ("sequences/000000/tokens", "sequences/000001/logits/float64"):
        data[places(bundle_path)[name][0]] ^= 1
    bundle_path.write_bytes(data)
    result = verify_bundle(bundle_path)
    assert [problem.split(": ")[1].split()[0] for problem in result.problems] == [
        "sequences/000000/tokens",
        "sequences/000001/logits/float64",
    ]


def test_manifest_digest_attribute(bundle_path):
    with open_bundle(bundle_path) as bundle:
        digest = bundle.manifest_sha256
    data = bundle_path.read_bytes()
    assert data.count(digest.encode()) == 1
    with h5py.File(bundle_path, "r+") as file:
        file.attrs.modify("manifest_sha256", np.bytes_(digest[::-1]))
    with pytest.raises(InputError, match="does not match manifest_sha256"):
        open_bundle(bundle_path)


@given(
    hnp.arrays(
        st.sampled_from([np.dtype(name) for name in ("i1", "u1", "<i4", ">i4", "<i8", "f2", ">f4", "<f8")]),
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    )
)
def test_digest_is_of_dtype_shape_and_little_endian_bytes(array):
    head = f"{array.dtype.name}[{','.join(str(size) for size in array.shape)}]\n"
    little = array.astype(array.dtype.newbyteorder("<")).tobytes(order="C")
    assert array_sha256(array) == hashlib.sha256(head.encode() + little).hexdigest()
    assert array_sha256(np.array(array, order="F")) == array_sha256(array)


def test_digest_by_hand():
    """The worked examples of docs/bundle.md; the literal is from sha256sum."""
    one = np.array([[1.0]], dtype=np.float32)
    assert array_sha256(one) == "15f568991966704e8918908085bfc57aca9e595efb8c9e376799bd1eca0e2179"
    half = np.array([1.0], dtype=ml_dtypes.bfloat16)
    assert array_sha256(half) == hashlib.sha256(b"bfloat16[1]\n\x80\x3f").hexdigest()
    assert array_sha256(half) != array_sha256(half.view(np.uint8).reshape(2))
    assert array_sha256(np.zeros((0, 3), np.int32)) == hashlib.sha256(b"int32[0,3]\n").hexdigest()


def test_digest_tells_shapes_and_dtypes_apart():
    flat = np.arange(6, dtype=np.int32)
    digests = {array_sha256(a) for a in (flat, flat.reshape(2, 3), flat.reshape(3, 2), flat.view(np.float32))}
    assert len(digests) == 4


@given(st.integers(0, 40), st.integers(1, 50))
def test_digest_of_blocks_is_that_of_the_whole(rows, step):
    array = np.arange(rows * 3, dtype=np.float64).reshape(rows, 3)
    blocks = [stored_view(array[at : at + step]) for at in range(0, rows, step)]
    assert stream_sha256("float64", array.shape, blocks) == array_sha256(array)


@pytest.mark.parametrize("dtype", ["U3", "c8", "bool", "O", "M8[s]", "u2", "V4", [("a", "i4")]])
def test_other_dtypes_have_no_digest(dtype):
    with pytest.raises(SchemaError, match="can't be stored"):
        array_sha256(np.zeros(2, dtype))
