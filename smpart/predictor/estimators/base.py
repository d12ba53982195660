"""What all estimators of latency share: scikit-learn's contract over the columns of a profile's matrix."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.validation import check_is_fitted, validate_data

from smpart.partition import ModelShape
from smpart.profiler.sample import COLUMNS, SHAPE_COLUMNS

Floats = NDArray[np.float64]

_PLACE = {name: place for place, name in enumerate(COLUMNS)}
UNITS = _PLACE["units"]
"""Column of the units."""
SHAPE = slice(0, len(SHAPE_COLUMNS))
"""Columns of the forward's own shape."""
NEIGHBOUR = slice(_PLACE["neighbour_prefill_tokens"], _PLACE["neighbour_units"])
"""Columns of the neighbour's shape."""
MIX = slice(0, len(COLUMNS))


def column(X: Floats, name: str) -> Floats:  # noqa: N803 (scikit-learn's name)
    """One column by name: float64[n].

    >>> from smpart.partition import Shape
    >>> from smpart.profiler.sample import Point, matrix
    >>> column(matrix([Point(Shape.decode(4, 400), 2)]), "units").tolist()
    [2.0]
    """
    return X[:, _PLACE[name]]


class LatencyEstimator(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """Seconds of a whole forward, from a matrix of `smpart.profiler.sample.matrix`.

    Subclasses do their work in `_fit` and `_predict`, on matrices and times that were checked here.

    Args:
        model: dimensions of the model that was measured.
        units: units of the whole device.
    """

    def __init__(self, model: ModelShape, units: int) -> None:
        self.model = model
        self.units = units

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.positive_only = True
        tags.target_tags.positive_only = True
        return tags

    def fit(self, X: Any, y: Any) -> Self:  # noqa: N803
        """Learn from float64[n, len(COLUMNS)] and seconds float64[n]. Raises `ValueError` for anything else."""
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True)  # noqa: N806
        self._check(X)
        if not (y > 0.0).all():
            raise ValueError("seconds must be above 0")
        self._fit(X, y)
        return self

    def predict(self, X: Any) -> Floats:  # noqa: N803
        """Expected seconds: float64[n]. Raises `NotFittedError` before `fit`."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, reset=False)  # noqa: N806
        self._check(X)
        return self._predict(X)

    def _check(self, X: Floats) -> None:  # noqa: N803
        if X.shape[1] != len(COLUMNS):
            raise ValueError(f"X has {X.shape[1]} columns; a profile's matrix has {len(COLUMNS)}")
        if (X < 0.0).any():
            raise ValueError("sizes and units cannot be below 0")

    def _fit(self, X: Floats, y: Floats) -> None:  # noqa: N803
        raise NotImplementedError

    def _predict(self, X: Floats) -> Floats:  # noqa: N803
        raise NotImplementedError
