"""Rotary frequencies against closed forms."""

import numpy as np

from plora_jax.models.rope import Rope, frequencies


def test_default_and_linear():
    plain = frequencies(Rope("default", dim=8, theta=10_000.0))
    np.testing.assert_allclose(plain, [1, 1e-1, 1e-2, 1e-3], rtol=1e-12)
    np.testing.assert_allclose(frequencies(Rope("linear", dim=8, factor=4.0)), plain / 4, rtol=1e-12)


def test_none_rotates_nothing():
    assert not frequencies(Rope("none", dim=8)).any()


def test_llama3_keeps_short_waves_and_stretches_long_ones():
    plain = frequencies(Rope("default", dim=128, theta=5e5))
    scaled = frequencies(Rope("llama3", dim=128, theta=5e5, factor=8.0, original=8192))
    wave = 2 * np.pi / plain
    np.testing.assert_array_equal(scaled[wave < 8192 / 4], plain[wave < 8192 / 4])
    np.testing.assert_allclose(scaled[wave > 8192], plain[wave > 8192] / 8, rtol=1e-12)
    between = (wave > 8192 / 4) & (wave < 8192)
    assert between.any()
    smooth = (8192 / wave[between] - 1) / 3  # the Llama 3.1 reference code's blend
    np.testing.assert_allclose(scaled[between], (1 - smooth) * plain[between] / 8 + smooth * plain[between])


def test_yarn_ends():
    plain = frequencies(Rope("default", dim=128, theta=1e6))
    scaled = frequencies(Rope("yarn", dim=128, theta=1e6, factor=4.0, original=32768))
    assert scaled[0] == plain[0]  # many turns within the original context: kept
    np.testing.assert_allclose(scaled[-1], plain[-1] / 4)  # less than one turn: stretched
    assert (np.diff(scaled / plain) <= 1e-12).all()


def test_longrope_takes_each_factor_set():
    rope = Rope("longrope", dim=4, theta=100.0, original=16, short=(1.0, 2.0), long=(4.0, 5.0))
    np.testing.assert_allclose(frequencies(rope), [1.0, 0.1 / 2])
    np.testing.assert_allclose(frequencies(rope, long=True), [1 / 4, 0.1 / 5])
