"""Interpolation against arithmetic: what is affine or bilinear between nodes is reproduced."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smpart.sim.grid import Curve, Grid
from smpart.sim.sheaf import Sheaf

numbers = st.floats(-50, 50)
places = st.floats(0, 300)


@given(a=numbers, b=numbers, c=numbers, x=places, y=places)
def test_a_grid_reproduces_what_is_linear_in_each_axis(a, b, c, x, y):
    axes = [[0, 1, 7, 100, 101], [0, 3, 80]]
    grid = Grid(axes, {(u, v): a * u + b * v + c * u * v for u in axes[0] for v in axes[1]})
    assert grid(x, y) == pytest.approx(a * x + b * y + c * x * y, rel=1e-6, abs=1e-3)


@given(a=numbers, b=numbers, x=places)
def test_a_curve_is_a_grid_of_one_axis(a, b, x):
    nodes = [0, 2, 3, 50]
    points = {float(u): a + b * u * u for u in nodes}
    grid = Grid([nodes], {(u,): points[u] for u in nodes})
    assert Curve(points)(x) == pytest.approx(grid(x), rel=1e-9, abs=1e-6)


@given(alpha=st.floats(0.1, 5), beta=st.floats(0, 5), key=st.floats(1, 40), total=st.floats(1, 500))
def test_a_sheaf_reproduces_times_that_grow_with_tokens_and_length(alpha, beta, key, total):
    curves = {k: {t: t * (alpha + beta * k) for t in (0, k, 8 * k)} for k in (1, 4, 32)}
    assert Sheaf(curves)(key, total) == pytest.approx(total * (alpha + beta * key), rel=1e-6)


@given(times=st.lists(st.floats(0.1, 9), min_size=12, max_size=12), key=st.floats(0.5, 90), total=st.floats(0, 800))
def test_a_sheaf_along_one_key_is_the_sheaf(times, key, total):
    """Floor and all: beyond the last key the blend would fall below it, here often."""
    curves = {k: dict(zip((0.0, 5.0 * k, 400.0), times[4 * i :], strict=False)) for i, k in enumerate((1, 4, 32))}
    sheaf = Sheaf(curves)
    assert sheaf.along(key)(total) == pytest.approx(sheaf(key, total), rel=1e-6, abs=1e-9)
    assert sheaf.along(key) is sheaf.along(key)
