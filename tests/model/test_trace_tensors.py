"""The table of traced tensors: what a model of each kind has, and that a bundle accepts exactly that."""

import re

import numpy as np
import pytest

from kdtr_cli.bundle.schema import SchemaError, array_rule, check_shapes
from kdtr_cli.model.config import parse_config
from kdtr_cli.model.presets import PRESETS
from kdtr_cli.model.traces import Trace, execution_order, trace_bytes, trace_tensors

pytestmark = pytest.mark.quick

NAMES = sorted(PRESETS)


def config_of(name: str):
    return parse_config(PRESETS[name])


@pytest.mark.parametrize("name", NAMES)
def test_a_bundle_takes_every_tensor_of_the_table(name):
    rows, shapes = 5, {"prompt": ("int32", (3,)), "tokens": ("int32", (3,))}
    for tensor in trace_tensors(config_of(name), "full"):
        shapes[f"trace/{tensor.name}"] = ("int32" if tensor.integer else "float32", (rows, tensor.width))
    check_shapes("golden", "s", shapes, 9)
    check_shapes("run", "s", shapes, 9)
    for path in set(shapes) - {"prompt", "tokens"}:
        dtype, (_, width) = shapes[path]
        with pytest.raises(SchemaError, match=re.escape(path)):
            check_shapes("run", "s", shapes | {path: (dtype, (rows + 1, width))}, 9)


def test_the_kinds_of_the_table_are_those_of_the_schema():
    """Every name that the schema has a rule for is a tensor of some model."""
    known = {t.name for name in NAMES for t in trace_tensors(config_of(name), "full")}
    kinds = {t.kind for name in NAMES for t in trace_tensors(config_of(name), "full")}
    for kind in kinds | {"values", "qkv", "experts_out", "logits", "input_layernorm"}:
        for name in (kind, f"model.layers.1.{kind}", f"model.layers.1.self_attn.{kind}", f"model.layers.1.mlp.{kind}"):
            allowed = array_rule("golden", f"trace/{name}") is not None
            assert allowed == (name in known | {"model.layers.1.mlp.mlp_out"}), name


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_execution_is_that_of_the_table(name):
    names = [t.name for t in trace_tensors(config_of(name), "full")]
    assert execution_order(reversed(names)) == execution_order(sorted(names)) == names


def test_layers_are_the_residual_stream():
    config = config_of("tiny")
    kinds = [t.name for t in trace_tensors(config, "layers")]
    hidden = [f"model.layers.{i}.hidden" for i in range(config.num_hidden_layers)]
    assert kinds == ["embed", *hidden, "final_norm"]


def test_bytes_are_those_of_the_arrays():
    config = config_of("tiny")
    trace = Trace(config, "full", 7, np.float64)
    assert sum(a.nbytes for a in trace.arrays.values()) == 7 * trace_bytes(config, "full", 8)
    assert trace_bytes(config, None) == 0


class TestTrace:
    def filled(self, rows: int = 4) -> Trace:
        trace = Trace(config_of("tiny"), "layers", rows)
        for name, array in trace.arrays.items():
            trace.put(name, np.arange(rows), np.full(array.shape, 2, array.dtype))
        return trace

    def test_rows_past_the_last_are_left_out(self):
        trace = self.filled()
        values = np.arange(3 * 128, dtype=np.float32).reshape(3, 128)
        trace.put("embed", np.array([5, 2, 4]), values)
        assert (trace.arrays["embed"][2] == values[1]).all()
        assert trace.finished(3)["trace/embed"].shape == (3, 128)

    def test_names_of_another_level_are_left_out(self):
        self.filled().put("model.layers.0.self_attn.q", np.arange(4), np.zeros((4, 1)))

    def test_a_row_that_was_never_told_is_no_trace(self):
        trace = Trace(config_of("tiny"), "layers", 3)
        trace.put("embed", np.array([0, 2]), np.zeros((2, 128)))
        with pytest.raises(RuntimeError, match="embed has no row 1 of 3"):
            trace.finished(3)

    def test_what_was_packed_goes_on(self):
        trace = Trace(config_of("tiny"), "layers", 4)
        trace.unpack(self.filled().pack())
        assert (trace.finished(4)["trace/final_norm"] == 2).all()
