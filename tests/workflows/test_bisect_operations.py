"""The table of operations, and sizes of passes that launch every variant of a kernel."""

from types import SimpleNamespace

import pytest

from kdtr_cli.engine.kernels import KERNELS, matmuls
from kdtr_cli.workflows.bisect_operations import OPERATIONS, operations_of, pass_sizes, reachable_kernels

pytestmark = pytest.mark.quick


def engine(kind: str, *matrices: tuple[int, int], experts: tuple[tuple[int, int], ...] = ()) -> SimpleNamespace:
    """As much of a transformer as the sizes hang on: matrices [n, k], and experts [16, n, k]."""
    weights = SimpleNamespace(
        embed=SimpleNamespace(form="bf16"),
        matrices=lambda: [SimpleNamespace(shape=shape, form="bf16") for shape in matrices],
        experts=lambda: [SimpleNamespace(shape=(16, *shape), form="int4") for shape in experts],
    )
    return SimpleNamespace(device=SimpleNamespace(kind=kind), weights=weights)


class TestSizes:
    @pytest.mark.parametrize(
        ("model", "sizes"),
        [
            (engine("cpu", (64, 128)), [1, 2, 5]),
            (engine("gpu", (64, 128)), [1, 2, 5]),
            (engine("gpu", (64, 256)), [1, 2, 5]),
            (engine("gpu", (64, 256), (8192, 256)), [1, 2, 5, 9]),
            (engine("gpu", experts=((64, 256),)), [1, 2]),
        ],
    )
    def test_the_fewest_that_show_all_variants(self, model, sizes):
        assert pass_sizes(model, 64) == sizes
        seen = set().union(*(reachable_kernels(model, rows) for rows in sizes))
        assert seen == set().union(*(reachable_kernels(model, rows) for rows in range(1, 65)))
        assert seen <= set(KERNELS)

    def test_no_more_rows_than_a_pass_has(self):
        assert pass_sizes(engine("gpu", (8192, 256)), 4) == [1, 2]

    def test_every_variant_of_the_largest_models_is_reached(self):
        model = engine("gpu", (64, 128), (64, 256), (8192, 256))
        seen = set().union(*(reachable_kernels(model, rows) for rows in pass_sizes(model, 64)))
        assert seen >= matmuls("gpu", 64, "bf16")


class TestTable:
    def test_a_tensor_s_operations_are_of_its_kind_of_layer(self):
        assert [op.name for op in operations_of("hidden", True)] == ["moe_combine"]
        assert [op.name for op in operations_of("hidden", False)] == ["mlp_down"]
        assert [op.name for op in operations_of("self_attn.query", True)] == ["kv_append", "w_uk", "rope_query"]
        assert operations_of("mlp.expert_ids", True) == ()

    def test_names_are_unique_and_the_last_two_are_those_behind_the_layers(self):
        assert len({op.name for op in OPERATIONS}) == len(OPERATIONS)
        assert [op.name for op in OPERATIONS[-2:]] == ["lm_head", "token_choice"]
