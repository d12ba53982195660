"""Lets scikit-learn's own estimator checks, which bring columns of their own, run on estimators of latency."""

from __future__ import annotations

from typing import Any

import numpy as np

from smpart.predictor.estimators.base import COLUMNS


class AnyColumns:
    """Turns whatever columns a check brings into sizes of prefills, so that its fits and predictions can run."""

    def _check(self, X: Any) -> None:  # noqa: N803
        if (X < 0.0).any():
            raise ValueError("Negative values in data passed to a latency estimator")

    def _fit(self, X: Any, y: Any) -> None:  # noqa: N803
        super()._fit(self._sizes(X), y)  # type: ignore[misc]

    def _predict(self, X: Any) -> Any:  # noqa: N803
        return super()._predict(self._sizes(X))  # type: ignore[misc]

    def _sizes(self, X: Any) -> Any:  # noqa: N803
        sizes = np.zeros((len(X), len(COLUMNS)))
        sizes[:, : min(6, X.shape[1])] = X[:, :6]
        sizes[:, 0] += 1.0
        sizes[:, COLUMNS.index("units")] = 1.0
        return sizes

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()  # type: ignore[misc]
        tags.regressor_tags.poor_score = True
        return tags
