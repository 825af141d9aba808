"""For the tests of an engine: judge what it made against a golden, from memory or from a bundle (docs/ci.md).

from kdtr_cli.testing import Output, assert_parity, golden_inputs

def test_decode():
    inputs = golden_inputs("goldens/decode.h5")
    outputs = {p.id: Output(*my_engine(p.ids, inputs.steps, inputs.stop_ids)) for p in inputs.prompts}
    assert_parity("goldens/decode.h5", outputs, atol=1e-3)
"""

from kdtr_cli.errors import InputError
from kdtr_cli.testing.inputs import Inputs, golden_inputs, golden_model
from kdtr_cli.testing.outputs import Output
from kdtr_cli.testing.parity import ParityError, assert_parity

__all__ = ["InputError", "Inputs", "Output", "ParityError", "assert_parity", "golden_inputs", "golden_model"]
