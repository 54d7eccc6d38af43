"""SwiGlu: against float64, on every instruction set, and what its bits may depend on."""

from __future__ import annotations

import numpy as np
import pytest

from qwenrt.plugins import reference
from tests.tolerance import OP, relative_error

from .ops import isas, run_node, using_isa


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize(("rows", "inner"), [(0, 8), (1, 1), (1, 3072), (3, 17), (40, 100), (700, 33), (2, 0)])
def test_it_is_silu_of_the_gate_times_up(isa: str, rows: int, inner: int) -> None:
    gate_up = 8 * np.random.default_rng(rows + inner).standard_normal((rows, 2 * inner)).astype(np.float32)
    with using_isa(isa):
        y = run_node("SwiGlu", (gate_up,))
    assert y.shape == (rows, inner)
    assert relative_error(y, reference.swi_glu(gate_up)) < OP["float32"]


@pytest.mark.parametrize("isa", isas())
def test_a_row_has_the_same_bits_whatever_else_is_computed(isa: str) -> None:
    gate_up = np.random.default_rng(0).standard_normal((300, 210), np.float32)
    with using_isa(isa):
        want = run_node("SwiGlu", (gate_up,))
        for first, last in [(0, 1), (1, 3), (17, 290)]:
            np.testing.assert_array_equal(run_node("SwiGlu", (gate_up[first:last],)), want[first:last])


@pytest.mark.parametrize("isa", isas())
def test_large_gates_give_no_infinity_and_nan_stays_in_its_place(isa: str) -> None:
    gate = np.array([1e30, -1e30, 88.0, -88.0, 0.0, -0.0, np.nan, np.inf], np.float32)
    with using_isa(isa):
        y = run_node("SwiGlu", (np.concatenate([gate, np.ones_like(gate)])[None],))[0]
    np.testing.assert_allclose(y[:6], [1e30, 0, 88, 0, 0, 0], rtol=1e-6, atol=1e-35)
    assert np.isnan(y[6])
    assert y[7] == np.inf


def test_an_odd_number_of_columns_is_refused() -> None:
    with pytest.raises(Exception, match=r"gate_up has shape \[2, 5\], expected \[2, 4\]"):
        run_node("SwiGlu", (np.zeros((2, 5), np.float32),))
