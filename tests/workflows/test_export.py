"""An exported file holds the bundle, to the byte, in whatever container; an engine's inputs are the engine's inputs."""

import json
import zipfile
from pathlib import Path

import h5py
import ml_dtypes
import numpy as np
import pytest
from engine_cases import golden_of, right_answer, saved, shell
from safetensors import safe_open
from safetensors.numpy import load_file

from kdtr_cli.bundle.manifest import decode_manifest
from kdtr_cli.bundle.reader import open_bundle
from kdtr_cli.bundle.schema import SequenceData
from kdtr_cli.bundle.writer import BundleWriter
from kdtr_cli.errors import InputError
from kdtr_cli.workflows import export
from kdtr_cli.workflows.engine_run import EngineRunOptions, make_engine_run
from kdtr_cli.workflows.export import ExportOptions, export_bundle


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    """With embedded bfloat16 weights and logits in float32 and float64."""
    return golden_of(tmp_path_factory.mktemp("export") / "golden.h5", score=True)


def arrays_of(path: Path) -> dict[str, np.ndarray]:
    with open_bundle(path) as bundle:
        return {name: bundle.array(name) for name in bundle.array_paths()}


class TestBundle:
    def test_safetensors_holds_every_array_and_text(self, golden, tmp_path):
        made = export_bundle(ExportOptions(golden, tmp_path / "g.safetensors"))
        wanted, got = arrays_of(golden), load_file(made.path)
        assert (made.arrays, made.bytes) == (len(wanted), made.path.stat().st_size)
        assert set(got) == set(wanted)
        for name, array in wanted.items():
            assert (got[name].dtype, got[name].shape) == (array.dtype, array.shape)
            assert got[name].tobytes() == array.tobytes()
        assert any(array.dtype == ml_dtypes.bfloat16 for array in got.values())
        with open_bundle(golden) as bundle, safe_open(made.path, "np") as file:
            texts = file.metadata()
            assert decode_manifest(texts["manifest"].encode()) == bundle.manifest
            assert texts["config"] == bundle.config_text
            assert (texts["schema"], texts["kind"]) == ("kdtr.export/1", "golden")

    def test_npz_holds_every_array_and_text(self, golden, tmp_path):
        made = export_bundle(ExportOptions(golden, tmp_path / "g.npz", "npz"))
        wanted = arrays_of(golden)
        with np.load(made.path, allow_pickle=False) as got:
            assert set(got.files) == {*wanted, "schema", "kind", "manifest", "config"}
            for name, array in wanted.items():
                assert got[name].shape == array.shape
                assert got[name].tobytes() == array.tobytes()
                if array.dtype == ml_dtypes.bfloat16:
                    assert np.array_equal(got[name].view(ml_dtypes.bfloat16), array)
                else:
                    assert got[name].dtype == array.dtype
            with open_bundle(golden) as bundle:
                assert decode_manifest(str(got["manifest"]).encode()) == bundle.manifest
                assert str(got["config"]) == bundle.config_text
        with zipfile.ZipFile(made.path) as archive:
            assert archive.testzip() is None

    @pytest.mark.parametrize("form", export.FORMATS)
    def test_the_same_bundle_is_the_same_file(self, golden, tmp_path, form):
        made = [export_bundle(ExportOptions(golden, tmp_path / name, form)).path for name in ("a", "b")]
        assert made[0].read_bytes() == made[1].read_bytes()

    def test_every_dtype_and_shape_of_the_format(self, tmp_path):
        """Scalars, empty rows, one byte to eight, and an id that is no ASCII."""
        shapes = [(), (0, 3), (2, 3), (1, 1, 1, 5)]
        kinds = [np.int8, np.uint8, np.int32, np.int64, np.float16, np.float32, np.float64]
        kinds += [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]
        made = {f"t{i}_{j}": np.ones(s, k) for i, s in enumerate(shapes) for j, k in enumerate(kinds)}
        path = tmp_path / "all.h5"
        with open_bundle(golden_of(tmp_path / "g.h5", embed_weights=False)) as golden:
            manifest = {
                k: v for k, v in golden.manifest.items() if k not in ("schema", "kind", "sequences", "datasets")
            }
            with BundleWriter(path, "golden") as writer:
                writer.add_config(golden.config_text)
                for name in sorted(made):
                    writer.add_weight(name, made[name])
                ids = np.array([1], np.int32)
                writer.add_sequence(SequenceData("é", 0, ids, ids, "length", {}))
                writer.finish(manifest)
        wanted = {name.removeprefix("model/weights/"): a for name, a in arrays_of(path).items()}
        data = export_bundle(ExportOptions(path, tmp_path / "s")).path.read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:begin])
        with np.load(export_bundle(ExportOptions(path, tmp_path / "n", "npz")).path) as npz:
            for name in made:
                array, stored = wanted[name], npz[f"model/weights/{name}"]
                assert (stored.shape, stored.tobytes()) == (array.shape, array.tobytes())
                entry = header[f"model/weights/{name}"]
                low, high = (begin + at for at in entry["data_offsets"])
                assert (tuple(entry["shape"]), data[low:high]) == (array.shape, array.tobytes())
                assert low % array.dtype.itemsize == 0

    def test_without_a_name_it_lies_beside_the_bundle(self, tmp_path):
        golden = golden_of(tmp_path / "some.golden.h5", embed_weights=False)
        assert export_bundle(ExportOptions(golden)).path == tmp_path / "some.golden.safetensors"
        with pytest.raises(InputError, match="--force"):
            export_bundle(ExportOptions(golden))
        assert export_bundle(ExportOptions(golden, force=True, format="npz")).path == tmp_path / "some.golden.npz"
        for form, suffix in (("safetensors", "safetensors"), ("hdf5", "h5")):
            made = export_bundle(ExportOptions(golden, format=form, inputs=True))
            assert made.path == tmp_path / f"some.golden.inputs.{suffix}"

    @pytest.mark.parametrize("form", export.FORMATS)
    def test_a_damaged_array_leaves_no_file(self, tmp_path, form):
        golden = golden_of(tmp_path / "g.h5", embed_weights=False)
        with open_bundle(golden) as bundle:
            row = bundle.sequences[1].array("logits/float64")[2].tobytes()
        data = golden.read_bytes()
        assert data.count(row) == 1
        golden.write_bytes(data.replace(row, bytes([row[0] ^ 1]) + row[1:]))
        (tmp_path / "old").write_bytes(b"old")
        with pytest.raises(InputError, match="does not match its digest"):
            export_bundle(ExportOptions(golden, tmp_path / "old", form, force=True))
        assert (tmp_path / "old").read_bytes() == b"old"
        assert sorted(p.name for p in tmp_path.iterdir()) == ["g.h5", "old"]


class TestInputs:
    @pytest.mark.parametrize("form", export.INPUT_FORMATS)
    @pytest.mark.parametrize("options", [{}, {"teacher_force": True, "steps": 2}])
    def test_they_are_what_a_command_reads(self, golden, tmp_path, form, options):
        """To the byte, but for the path of the private model folder."""
        answer = right_answer(golden)
        if options:
            keep = np.concatenate([np.arange(lo, lo + 2) for lo in answer["tokens/offsets"][:-1]])
            answer = {**answer, "tokens/ids": answer["tokens/ids"][keep], "logits": answer["logits"][keep]}
            answer["tokens/offsets"] = np.arange(3) * 2
        engine = shell(f'cp "$2" "{tmp_path}/seen"; cp "$3" "$1"', saved(tmp_path / "answer", answer))
        make_engine_run(EngineRunOptions(golden, tmp_path / "r.h5", engine, container=form, **options))
        made = export_bundle(ExportOptions(golden, tmp_path / "inputs", form, inputs=True, **options))
        got, seen = (p.read_bytes() for p in (made.path, tmp_path / "seen"))
        if form == "safetensors":
            texts = [safe_open(p, "np").metadata() for p in (made.path, tmp_path / "seen")]
            assert texts[0] == {**texts[1], "model": ""}
            assert got[-32:] == seen[-32:]  # the arrays lie alike
            assert {k: a.tobytes() for k, a in load_file(made.path).items()} == {
                k: a.tobytes() for k, a in load_file(tmp_path / "seen").items()
            }
        else:
            with h5py.File(made.path) as one, h5py.File(tmp_path / "seen") as other:
                texts = [json.loads(file["metadata"][()]) for file in (one, other)]
                assert texts[0] == {**texts[1], "model": ""}
                for group, name in (
                    ("prompts", "ids"),
                    ("prompts", "offsets"),
                    *([("tokens", "ids")] if options else []),
                ):
                    assert one[group][name].dtype == other[group][name].dtype
                    assert np.array_equal(one[group][name], other[group][name])
                assert set(one) == set(other)
        assert made.arrays == (5 if options else 3)

    @pytest.mark.parametrize("form", export.INPUT_FORMATS)
    def test_there_is_no_answer_in_them(self, golden, tmp_path, form):
        made = export_bundle(ExportOptions(golden, tmp_path / "inputs", form, inputs=True)).path.read_bytes()
        for name, array in arrays_of(golden).items():
            if "tokens" in name or "logits" in name:
                assert array.tobytes() not in made
        assert export_bundle(ExportOptions(golden, tmp_path / "again", form, inputs=True)).path.read_bytes() == made

    def test_a_model_is_named_as_it_is_given(self, golden, tmp_path):
        with pytest.raises(InputError, match="not a folder"):
            export_bundle(ExportOptions(golden, tmp_path / "i", inputs=True, model=str(tmp_path / "none")))
        folder = tmp_path / "model"
        folder.mkdir()
        with open_bundle(golden) as bundle:
            (folder / "config.json").write_text(bundle.config_text)
        made = export_bundle(ExportOptions(golden, tmp_path / "i", inputs=True, model=str(folder)))
        assert safe_open(made.path, "np").metadata()["model"] == str(folder)

    @pytest.mark.parametrize(
        ("options", "word"),
        [
            ({"format": "hdf5"}, "safetensors or npz"),
            ({"format": "npz", "inputs": True}, "safetensors or hdf5"),
            ({"steps": 2}, "go with --inputs"),
            ({"teacher_force": True}, "go with --inputs"),
            ({"model": "m"}, "go with --inputs"),
        ],
    )
    def test_options_that_don_t_go_together(self, golden, tmp_path, options, word):
        with pytest.raises(InputError, match=word):
            export_bundle(ExportOptions(golden, tmp_path / "x", **options))
        assert list(tmp_path.iterdir()) == []

    def test_a_run_has_none(self, golden, tmp_path):
        engine = shell('cp "$3" "$1"', saved(tmp_path / "answer", right_answer(golden)))
        make_engine_run(EngineRunOptions(golden, tmp_path / "r.h5", engine))
        with pytest.raises(InputError, match="golden"):
            export_bundle(ExportOptions(tmp_path / "r.h5", tmp_path / "x", inputs=True))
        assert json.loads(safe_open(export_bundle(ExportOptions(tmp_path / "r.h5")).path, "np").metadata()["manifest"])
