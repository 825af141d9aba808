"""Rotary tables: equal to independent formulas, one rounding from float64, and the same bits everywhere."""

import dataclasses
import math
from decimal import Context, Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtr_cli.errors import InputError
from kdtr_cli.model import rope
from kdtr_cli.model.config import ModelConfig, RopeScaling, load_config, parse_config
from kdtr_cli.model.presets import PRESETS
from kdtr_cli.model.rope import inv_freq, rope_table, rope_table64, rope_table_sha256

pytestmark = pytest.mark.quick
FIXTURES = Path(__file__).parents[2] / "fixtures"


def config(**changes: Any) -> ModelConfig:
    return dataclasses.replace(parse_config(PRESETS["tiny"]), **changes)


def plain_yarn(c: ModelConfig) -> list[float]:
    """The frequencies again, one pair at a time, with math's functions."""
    d, base, y = c.qk_rope_head_dim, c.rope_theta, c.rope_scaling
    out = []
    for j in range(d // 2):
        f = base ** (-2 * j / d)
        if y is not None:
            low = d * math.log(y.original_max_position_embeddings / (y.beta_fast * 2 * math.pi)) / (2 * math.log(base))
            high = d * math.log(y.original_max_position_embeddings / (y.beta_slow * 2 * math.pi)) / (2 * math.log(base))
            low, high = max(math.floor(low), 0), min(math.ceil(high), d - 1)
            ramp = min(max((j - low) / (high - low if high > low else 0.001), 0.0), 1.0)
            f = f / y.factor * ramp + f * (1 - ramp)
        out.append(f)
    return out


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([2, 6, 8, 64, 128]),
    st.floats(100, 1e7),
    st.one_of(
        st.none(),
        st.builds(
            RopeScaling,
            factor=st.floats(1, 128),
            original_max_position_embeddings=st.integers(256, 8192),
            beta_fast=st.floats(1, 64),
            beta_slow=st.just(1.0),
        ),
    ),
)
def test_frequencies_equal_the_plain_formula(dim: int, theta: float, scaling: RopeScaling | None) -> None:
    c = config(qk_rope_head_dim=dim, rope_theta=theta, rope_scaling=scaling)
    got = inv_freq(c)
    assert got.dtype == np.float64
    assert got.shape == (dim // 2,)
    np.testing.assert_allclose(got, plain_yarn(c), rtol=4e-15)


def test_ends_of_the_ramp_are_the_plain_and_the_stretched_frequency() -> None:
    c = config(qk_rope_head_dim=64, rope_scaling=RopeScaling(64.0, 4096))
    f = 50000.0 ** (-np.arange(0, 64, 2) / 64)
    np.testing.assert_allclose(inv_freq(c)[:9], f[:9], rtol=1e-15)
    np.testing.assert_allclose(inv_freq(c)[20:], f[20:] / 64, rtol=1e-15)
    assert f[14] / 64 < inv_freq(c)[14] < f[14]


@pytest.mark.parametrize("n", [1, 2, 300, 2048])
def test_table_is_the_cosine_of_the_float64_angle_rounded_once(n: int) -> None:
    c = config()
    angle = np.arange(n, dtype=np.longdouble)[:, None] * np.array(plain_yarn(c))[None, :].astype(np.longdouble)
    cos, sin = rope_table(c, n)
    assert cos.dtype == sin.dtype == np.float32
    assert cos.shape == sin.shape == (n, 4)
    for got, want in ((cos, np.cos(angle)), (sin, np.sin(angle))):
        # half an ulp of float32 and the float64 error of an angle up to 2048
        assert np.abs(got - want).max() <= 2**-25 + 1e-12
    cos64, sin64 = rope_table64(c, n)
    np.testing.assert_array_equal(cos64.astype(np.float32), cos)
    np.testing.assert_array_equal(sin64.astype(np.float32), sin)


@pytest.mark.skipif(np.finfo(np.longdouble).nmant < 60, reason="long double is no wider than double here")
def test_own_sine_and_cosine_stay_below_one_ulp() -> None:
    rng = np.random.default_rng(1)
    multiples = np.arange(0, 4000) * (math.pi / 4)
    near = np.nextafter(multiples, np.inf)
    x = np.concatenate([rng.uniform(0, 8e5, 200_000), 10 ** rng.uniform(-18, 0, 20_000), multiples, near, [0.0, 8e5]])
    for got, want in zip(
        rope._cos_sin(x), (np.cos(x.astype(np.longdouble)), np.sin(x.astype(np.longdouble))), strict=True
    ):
        assert float((np.abs(got - want) / np.spacing(np.abs(want).astype(np.float64))).max()) < 0.8


def test_parts_of_half_pi_add_up_and_are_short() -> None:
    context = Context(prec=60)
    half_pi = Decimal("1.57079632679489661923132169163975144209858469968755291048747229615")
    total = Decimal(0)
    for part in rope._PIO2:
        total = context.add(total, Decimal(part))
    assert abs(total - half_pi) < Decimal("1e-36")
    for part in rope._PIO2[:2]:
        mantissa = int(math.ldexp(math.frexp(part)[0], 33))
        assert math.ldexp(mantissa, math.frexp(part)[1] - 33) == part


def test_amplitude_follows_transformers() -> None:
    m = 0.1 * math.log(4.0) + 1
    assert RopeScaling(4.0, 512).amplitude() == pytest.approx(m, rel=1e-15)
    assert RopeScaling(4.0, 512, mscale=0.5).amplitude() == pytest.approx(m, rel=1e-15)
    assert RopeScaling(4.0, 512, mscale=0.5, mscale_all_dim=0.0).amplitude() == pytest.approx(m, rel=1e-15)
    both = RopeScaling(4.0, 512, mscale=0.5, mscale_all_dim=0.25).amplitude()
    assert both == pytest.approx((0.05 * math.log(4.0) + 1) / (0.025 * math.log(4.0) + 1), rel=1e-15)
    assert RopeScaling(4.0, 512, mscale=0.5, mscale_all_dim=0.25, attention_factor=0.3).amplitude() == 0.3
    assert RopeScaling(1.0, 512).amplitude() == 1.0


def test_amplitude_multiplies_both_tables_before_the_rounding() -> None:
    base, scaled = config(), config(rope_scaling=RopeScaling(4.0, 512, attention_factor=1.3))
    for one, two, table in zip(rope_table64(base, 50), rope_table64(scaled, 50), rope_table(scaled, 50), strict=True):
        np.testing.assert_array_equal(one * 1.3, two)
        np.testing.assert_array_equal(two.astype(np.float32), table)


def test_softmax_scale_has_m_squared_only_with_mscale_all_dim() -> None:
    m = 0.1 * 0.5 * math.log(4.0) + 1
    assert config(rope_scaling=RopeScaling(4.0, 512, mscale_all_dim=0.5)).softmax_scale() == pytest.approx(
        24**-0.5 * m * m
    )
    assert config(rope_scaling=RopeScaling(4.0, 512)).softmax_scale() == pytest.approx(24**-0.5)
    assert config(rope_scaling=RopeScaling(4.0, 512, mscale_all_dim=0.0)).softmax_scale() == pytest.approx(24**-0.5)


def test_float32_angles_are_another_table_that_parts_with_the_position() -> None:
    c = config()
    near, far = np.abs(np.array(rope_table(c, 2048)) - np.array(rope_table(c, 2048, "f32"))).max(axis=(0, 2))[[1, -1]]
    assert near < 2e-7
    assert 1e-6 < far < 1e-3
    assert rope_table_sha256(*rope_table(c, 64)) != rope_table_sha256(*rope_table(c, 64, "f32"))


def test_float32_angles_take_every_step_in_float32() -> None:
    c = config(rope_scaling=RopeScaling(4.0, 512, attention_factor=1.3))
    angle = np.arange(100, dtype=np.float32)[:, None] * np.array(plain_yarn(c), dtype=np.float32)
    want = np.cos(angle.astype(np.float64)).astype(np.float32) * np.float32(1.3)
    # float32 frequencies made in float32 steps are an ulp or two from the rounded float64 ones
    np.testing.assert_allclose(rope_table(c, 100, "f32")[0], want, atol=100 * 2**-23)


def test_a_longer_table_starts_with_the_shorter_one() -> None:
    for angles in ("f64", "f32"):
        short, long = rope_table(config(), 7, angles), rope_table(config(), 100, angles)
        for a, b in zip(short, long, strict=True):
            np.testing.assert_array_equal(a, b[:7])


def test_work_in_blocks_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = rope_table64(config(), 500)
    monkeypatch.setattr(rope, "_BLOCK", 13)
    for a, b in zip(whole, rope_table64(config(), 500), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("n", [0, -1, 2049])
def test_positions_beyond_the_model_are_refused(n: int) -> None:
    with pytest.raises(InputError, match="max_position_embeddings"):
        rope_table(config(), n)


def test_unknown_angles_are_refused() -> None:
    with pytest.raises(InputError, match="f64"):
        rope_table(config(), 3, "f16")


def test_digest_sees_every_part() -> None:
    cos, sin = rope_table(config(), 8)
    digests = {rope_table_sha256(cos, sin), rope_table_sha256(sin, cos), rope_table_sha256(cos[:7], sin[:7])}
    digests.add(rope_table_sha256(cos.reshape(4, 8), sin.reshape(4, 8)))
    changed = sin.copy()
    changed[-1, -1] = np.nextafter(changed[-1, -1], np.float32(2))
    assert len(digests | {rope_table_sha256(cos, changed)}) == 5


def test_the_tables_of_tiny_kimi_are_these() -> None:
    # Any other value means other bits in every bundle: raise the contract version if it is meant.
    c, _ = load_config(FIXTURES / "tiny-kimi")
    assert rope_table_sha256(*rope_table(c, 2048)) == TINY_KIMI_F64
    assert rope_table_sha256(*rope_table(c, 2048, "f32")) == TINY_KIMI_F32


TINY_KIMI_F64 = "abe091868c27fa30785e85e28c1c04361608b959a986513e46ee2ac3ba299bd8"
TINY_KIMI_F32 = "7e317ab430cbea7bc8b898bf941147c48902e59d7ac9396f2ad711f3b6693aee"
