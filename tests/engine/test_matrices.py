"""Weights on a device: as many bytes as the checkpoint stores, and the values that the checkpoint reader gives."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from kdtr_cli.engine.devices import Device, open_device
from kdtr_cli.engine.kernels import FORMS, KERNELS
from kdtr_cli.engine.launch import Launcher
from kdtr_cli.engine.matrices import Matrix, upload_matrix
from kdtr_cli.engine.weights import upload_weights
from kdtr_cli.errors import DeviceError, InputError
from kdtr_cli.model.config import ModelConfig, parse_config
from kdtr_cli.model.presets import PRESETS, new_weights
from kdtr_cli.model.quant import part_names, quantise_fp8, quantise_int4
from kdtr_cli.model.quantisation import fp8_config, int4_config
from kdtr_cli.model.safetensors_file import STORED_DTYPES
from kdtr_cli.model.source import open_model
from kdtr_cli.model.tensors import stored_tensors
from kdtr_cli.model.weights import Weights

FIXTURES = Path(__file__).parents[2] / "fixtures"
EXPERT = "model.layers.1.mlp.experts."
GATE_UP = tuple(f"{EXPERT}{e}.{p}_proj.weight" for e in range(7) for p in ("gate", "up"))
ATTENTION = "model.layers.0.self_attn."


@pytest.fixture(scope="module")
def device():
    with open_device("cpu") as d:
        yield d


def quantised(base: str, quantisation: dict, dtypes: dict[str, str] | None = None, **more) -> Weights:
    """A preset's weights quantised as stated; ``dtypes``: end of a stored name → its dtype."""
    config = parse_config({**PRESETS[base], "quantization_config": quantisation, **more})
    how, arrays = config.quantisation, {}
    plain = new_weights(config, 0)
    for name, parts in stored_tensors(config).items():
        if len(parts) == 1:
            made = {name: plain[name]}
        elif how.method == "int4":
            w = plain[name].astype(np.float32)
            values = (*quantise_int4(w, how.group_size), np.array(w.shape, np.int32))
            made = dict(zip(part_names("int4", name), values, strict=True))
        else:
            values = quantise_fp8(plain[name].astype(np.float32), how.block)
            made = dict(zip(part_names("fp8", name), values, strict=True))
        arrays |= made
    for name in arrays:
        for end, dtype in (dtypes or {}).items():
            if name.endswith(end):
                arrays[name] = arrays[name].astype(np.float32).astype(STORED_DTYPES[dtype])
    return Weights.from_arrays(arrays, config)


def plain(dtypes: dict[str, str]) -> Weights:
    """The preset `odd` without quantisation, some of its tensors in other dtypes."""
    config = parse_config(PRESETS["odd"])
    arrays = new_weights(config, 0)
    for name in arrays:
        for end, dtype in dtypes.items():
            if name.endswith(end):
                arrays[name] = arrays[name].astype(np.float32).astype(STORED_DTYPES[dtype])
    return Weights.from_arrays(arrays, config)


def read_back(device: Device, matrix: Matrix) -> np.ndarray:
    """The values of a matrix as kernels see them, float32 in its shape: products with one-hot rows."""
    launch = Launcher(device)
    *of, n, k = matrix.shape
    x, y = device.upload("x", np.eye(k, dtype=np.float32)), device.alloc("y", (k, n), np.float32)
    if not of:
        launch.matmul(x, matrix, y, k)
        return device.read(y).T
    out = np.empty(matrix.shape, np.float32)
    name = "expert_matmul_w1_m4_r2" if matrix.form == "f32" else f"expert_matmul_{matrix.form}_w1_m4_r2"
    for expert in range(of[0]):
        tiles = np.array([(expert, i, min(4, k - i)) for i in range(0, k, 4)], np.int32)
        lists = {"items": np.arange(k, dtype=np.int32), "tiles": tiles, "tile_count": np.array([len(tiles)], np.int32)}
        lists = {key: device.upload(key, value) for key, value in lists.items()}
        size = {"n": n, "k": k, "items_a_row": 1, "tile_places": len(tiles)}
        launch(name, x=x, y=y, **matrix.arguments, **lists, **size)
        out[expert] = device.read(y).T
    return out


def values_of(weights: Weights, tensors: tuple[str, ...], shape: tuple[int, ...]) -> np.ndarray:
    return np.concatenate([weights[t].reshape(-1) for t in tensors]).reshape(shape) + np.float32(0)  # a sum is never -0


class TestBytes:
    @pytest.mark.parametrize("name", ["tiny-kimi", "tiny-kimi-int4", "tiny-kimi-fp8"])
    def test_a_model_takes_as_many_bytes_as_its_checkpoint(self, name):
        model = open_model(FIXTURES / name, cache=False)
        weights = model.weights
        with open_device("cpu") as own:
            upload_weights(own, model.config, weights)
            on_device = own.bytes_allocated
        stored = sum(weights.stored_nbytes(part) for part in weights.stored_names)
        used = sum(4 * int(np.prod(shape)) for shape in weights.shapes.values())
        # kv_b of fp8, norms and biases are widened; at this size that is a few in a hundred
        assert stored * 0.98 < on_device < stored * (1.1 if name == "tiny-kimi-fp8" else 1.01)
        assert on_device < 0.51 * used

    @pytest.mark.parametrize(("name", "bits"), [("tiny-kimi-int4", 4 + 16 / 32), ("tiny-kimi-fp8", 8 + 32 / 128**2)])
    def test_routed_experts_take_their_bits_and_scales(self, device, name, bits):
        model = open_model(FIXTURES / name)
        found = upload_weights(device, model.config, model.weights).experts()
        assert {m.form for m in found} == {name.removeprefix("tiny-kimi-")}
        for matrix in found:
            # 96 rows of gate and of up share no block of 128 rows, so there every row has its own scales
            limit = 1.042 if name == "tiny-kimi-fp8" else 1
            assert bits <= matrix.nbytes * 8 / np.prod(matrix.shape) <= limit * bits

    def test_packed_weights_are_not_made_float32_on_the_way(self, device, monkeypatch):
        model = open_model(FIXTURES / "tiny-kimi-int4", cache=False)
        model.weights.used_sha256()  # as every run does; it checks the values
        loaded, load = [], Weights._load
        monkeypatch.setattr(Weights, "_load", lambda self, name: loaded.append(name) or load(self, name))
        upload_weights(device, model.config, model.weights)
        assert loaded
        assert all("norm" in name or "correction" in name for name in loaded)


class TestForms:
    @pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
    def test_of_what_is_stored_by_itself(self, device, dtype):
        weights = plain({"o_proj.weight": dtype, "kv_b_proj.weight": dtype})
        name = f"{ATTENTION}o_proj.weight"
        matrix = upload_matrix(device, "o", weights.shapes[name], weights, (name,))
        assert matrix.form == dtype.lower()
        assert matrix.nbytes == weights.stored_nbytes(name)
        assert read_back(device, matrix).tobytes() == values_of(weights, (name,), matrix.shape).tobytes()

    @pytest.mark.parametrize("group", [32, 8, 128, 12, 5, 1, 2**31 - 1])
    @pytest.mark.parametrize("scale", ["BF16", "F16", "F32"])
    def test_of_int4(self, device, group, scale):
        weights = quantised("odd", int4_config(("lm_head", "re:.*self_attn.*"), group), {"weight_scale": scale})
        matrix = upload_matrix(device, "experts", (7, 54, 75), weights, GATE_UP)
        assert matrix.form == "int4"
        assert (matrix.arguments["scale16"] is None) == (scale != "BF16")
        assert read_back(device, matrix).tobytes() == values_of(weights, GATE_UP, matrix.shape).tobytes()
        dense = f"{'model.layers.0.mlp.'}down_proj.weight"
        matrix = upload_matrix(device, "down", weights.shapes[dense], weights, (dense,))
        assert matrix.form == "int4"
        assert read_back(device, matrix).tobytes() == values_of(weights, (dense,), matrix.shape).tobytes()

    @pytest.mark.parametrize("block", [(128, 128), (27, 16), (9, 8), (10, 7), (1, 1), (2**31 - 1, 2**31 - 1)])
    @pytest.mark.parametrize("scale", ["F32", "BF16"])
    def test_of_fp8(self, device, block, scale):
        # 27 rows of gate, then 27 of up: a block that ends within a tensor begins anew with the next
        weights = quantised("odd", fp8_config(block), {"weight_scale_inv": scale})
        for tensors, shape in (
            (GATE_UP, (7, 54, 75)),
            ((f"{ATTENTION}q_a_proj.weight", f"{ATTENTION}kv_a_proj_with_mqa.weight"), (37 + 35, 75)),
        ):
            matrix = upload_matrix(device, "w", shape, weights, tensors)
            assert matrix.form == "fp8"
            assert matrix.arguments["block_rows"] in (1, min(block[0], 1 << 30))
            assert read_back(device, matrix).tobytes() == values_of(weights, tensors, shape).tobytes()

    def test_of_blocks_that_end_with_their_tensors(self, device):
        weights = quantised("odd", fp8_config((9, 16)))
        matrix = upload_matrix(device, "experts", (7, 54, 75), weights, GATE_UP)
        assert matrix.arguments["block_rows"] == 9
        assert matrix.arguments["scale"].shape == (7, 6, 5)

    def test_tensors_that_are_stored_unlike_each_other_are_float32(self, device):
        ignored = int4_config(("re:.*self_attn.*", f"{EXPERT}3.up_proj"))
        for weights in (quantised("odd", ignored), plain({"3.up_proj.weight": "F16"})):
            matrix = upload_matrix(device, "experts", (7, 54, 75), weights, GATE_UP)
            assert matrix.form == "f32"
            assert read_back(device, matrix).tobytes() == values_of(weights, GATE_UP, matrix.shape).tobytes()
        # of the other layer's experts all are packed
        others = tuple(name.replace("layers.1", "layers.2") for name in GATE_UP)
        weights = quantised("odd", ignored)
        assert upload_matrix(device, "experts", (7, 54, 75), weights, others).form == "int4"

    def test_scales_of_two_dtypes(self, device):
        weights = quantised("odd", int4_config(("re:.*self_attn.*",)), {"3.up_proj.weight_scale": "F32"})
        matrix = upload_matrix(device, "experts", (7, 54, 75), weights, GATE_UP)
        assert matrix.arguments["scale16"] is None
        assert read_back(device, matrix).tobytes() == values_of(weights, GATE_UP, matrix.shape).tobytes()

    @pytest.mark.parametrize("form", ["bf16", "int4", "fp8"])
    def test_of_a_cut(self, device, form):
        how = {"int4": int4_config(()), "fp8": fp8_config((16, 8))}
        weights = plain({}) if form == "bf16" else quantised("odd", how[form])
        name = f"{ATTENTION}kv_b_proj.weight"  # 3 heads of 13 + 9 rows
        cut = upload_matrix(device, "kv", (29, 66), weights, (name,), cut=lambda w: w.T)
        assert cut.form == ("bf16" if form == "bf16" else "f32")
        assert read_back(device, cut).tobytes() == (weights[name].T + np.float32(0)).tobytes()

    def test_rows_of_a_matrix(self, device):
        weights = plain({})
        name = f"{ATTENTION}o_proj.weight"
        matrix = upload_matrix(device, "o", weights.shapes[name], weights, (name,))
        assert read_back(device, matrix.rows(4, 10)).tobytes() == weights[name][4:14].tobytes()
        packed = upload_matrix(device, "w", (54, 75), quantised("odd", int4_config(())), GATE_UP[:2])
        with pytest.raises(DeviceError, match="is packed"):
            packed.rows(0, 3)

    def test_every_form_has_its_kernels(self):
        for form in FORMS:
            end = "" if form == "f32" else f"_{form}"
            assert f"matmul{end}_w1_m1_r4" in KERNELS
            assert f"expert_matmul{end}_w4_m4_r4" in KERNELS


class TestRefusals:
    def broken(self, part: str, method: str, place, value) -> tuple[ModelConfig, Weights]:
        whole = quantised("odd", int4_config(()) if method == "int4" else fp8_config())
        arrays = {name: whole.stored(name).copy() for name in whole.stored_names}
        arrays[part].reshape(-1)[place] = value
        return whole.config, Weights.from_arrays(arrays, whole.config)

    @pytest.mark.parametrize(
        ("method", "part", "value", "said"),
        [
            ("fp8", "0.gate_proj.weight", np.float32(np.nan), "0.gate_proj.weight\\[0, 5\\] is nan"),
            ("fp8", "0.gate_proj.weight_scale_inv", np.nan, "a scale must be finite and above 0"),
            ("int4", "2.up_proj.weight_scale", -1.0, "a scale must be finite and above 0"),
        ],
    )
    def test_a_value_that_is_not_finite(self, device, method, part, value, said):
        _, weights = self.broken(f"{EXPERT}{part}", method, 5 if part.endswith("weight") else 0, value)
        with pytest.raises(InputError, match=said):
            upload_matrix(device, "experts", (7, 54, 75), weights, GATE_UP)

    def test_a_product_that_overflows(self, device):
        weights = quantised("odd", fp8_config(), {})
        arrays = {name: weights.stored(name).copy() for name in weights.stored_names}
        arrays[f"{EXPERT}0.gate_proj.weight_scale_inv"][0, 0] = 3e38
        arrays[f"{EXPERT}0.gate_proj.weight"][0, 3] = ml_dtypes.float8_e4m3fn(448)
        with pytest.raises(InputError, match="a weight must be finite"):
            upload_matrix(device, "w", (7, 54, 75), Weights.from_arrays(arrays, weights.config), GATE_UP)
