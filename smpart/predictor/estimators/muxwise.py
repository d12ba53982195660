"""MuxWise's latency regression and its guard against contention (arXiv 2504.14489, sections 3.2 and 3.3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from smpart.predictor.estimators.base import Floats, LatencyEstimator, column
from smpart.predictor.estimators.forms import alone, has_decode, has_prefill, medians, relative_nnls, solo_rows

_LENGTHS = (2048.0, 8192.0, 32768.0, 131072.0)
"""The paper's profiling grid: bounds of length buckets, and of the guard's cells."""


_NOTHING = 1e-3
"""Singular value, of terms that are at most 1, below which rows tell nothing of a direction."""

Form = Callable[[Floats], tuple[Floats, Floats]]


@dataclass(frozen=True, slots=True)
class _Buckets:
    """Coefficients at one unit count, by length bucket: float64[buckets, terms]."""

    edges: Floats
    theta: Floats

    def seconds(self, terms: Floats, lengths: Floats) -> Floats:
        return np.asarray((terms * self.theta[np.searchsorted(self.edges, lengths)]).sum(axis=1))


class MuxWise(LatencyEstimator):
    """``T_P = t1 sum(n^2) + t2 sum(nr) + t3 sum(n) + t4`` and ``T_D = t1 sum(r) + t2 bs + t3``, decode guarded.

    Each unit count and length bucket has coefficients of its own; a unit count that was not measured takes those of
    the next lower one, as the authors' code does. Beside a neighbour, decode takes its solo time by the largest
    slowdown seen in its cell of the guard grid, or seen at all for a cell without samples; prefill has no guard.

    Completed here: packed prompts are taken to reuse equally many tokens, a hybrid forward as the sum of both phases,
    and no coefficient may fall below 0. Where rows repeat, medians count. Where the rows of a bucket or of a unit count
    cannot tell its coefficients apart, it has those of the next bucket, or of the next lower unit count.

    Attributes:
        guard_: largest slowdown seen, by cell of the guard grid.
        worst_: largest slowdown of decode seen at all; at least 1.
    """

    def predict_upper(self, X: Floats) -> Floats:  # noqa: N803
        """What plans are made on: the same, since the paper's prediction beside a neighbour is its guarded worst."""
        return self.predict(X)

    def _fit(self, X: Floats, y: Floats) -> None:  # noqa: N803
        X, y = medians(X, y)  # noqa: N806
        rows = solo_rows(X)
        self.prefill_: dict[float, _Buckets] = {}
        self.decode_: dict[float, _Buckets] = {}
        for units in np.unique(column(X, "units")[rows]):
            here = rows & (column(X, "units") == units)
            self._fit_units(X[here], y[here], float(units))
        self.prefill_ = _determined(self.prefill_, X[rows & has_prefill(X)], _prefill)
        self.decode_ = _determined(self.decode_, X[rows & has_decode(X)], _decode)
        self.least_ = float(y.min())
        self.guard_: dict[bytes, float] = {}
        self.worst_ = 1.0
        beside = ~alone(X) & has_decode(X)
        if beside.any():
            self._fit_guard(X[beside], y[beside])

    def _fit_units(self, X: Floats, y: Floats, units: float) -> None:  # noqa: N803
        """Both phases at once: a hybrid row is the sum of one term of each."""
        phases = [(self.prefill_, has_prefill(X), *_prefill(X)), (self.decode_, has_decode(X), *_decode(X))]
        edges = [_edges(terms[rows], lengths[rows]) for _, rows, terms, lengths in phases]
        blocks = [
            _blocks(terms * rows[:, None], np.searchsorted(edge, lengths), len(edge) + 1)
            for edge, (_, rows, terms, lengths) in zip(edges, phases, strict=True)
        ]
        theta = np.split(relative_nnls(np.hstack(blocks), y), [blocks[0].shape[1]])
        for edge, own, (sets, rows, terms, _) in zip(edges, theta, phases, strict=True):
            if rows.any():
                sets[units] = _Buckets(edge, own.reshape(-1, terms.shape[1]))

    def _fit_guard(self, X: Floats, y: Floats) -> None:  # noqa: N803
        slowdowns = np.maximum(1.0, y / self._solo(X))
        for cell, slowdown in zip(_cells(X), slowdowns, strict=True):
            self.guard_[cell] = max(self.guard_.get(cell, 1.0), float(slowdown))
        self.worst_ = float(slowdowns.max())

    def _predict(self, X: Floats) -> Floats:  # noqa: N803
        seconds = self._solo(X)
        guarded = np.flatnonzero(~alone(X) & has_decode(X))
        seconds[guarded] *= [self.guard_.get(cell, self.worst_) for cell in _cells(X[guarded])]
        return seconds

    def _solo(self, X: Floats) -> Floats:  # noqa: N803
        prefill = self._phase(self.prefill_, X, *_prefill(X))
        decode = self._phase(self.decode_, X, *_decode(X))
        total: Floats = np.where(has_prefill(X), prefill, 0.0) + np.where(has_decode(X), decode, 0.0)
        return np.maximum(total, self.least_)

    @staticmethod
    def _phase(sets: dict[float, _Buckets], X: Floats, terms: Floats, lengths: Floats) -> Floats:  # noqa: N803
        seconds = np.zeros(len(X))
        known = np.array(sorted(sets))
        if len(known):
            lower = np.maximum(0, np.searchsorted(known, column(X, "units"), side="right") - 1)
            for place in np.unique(lower):
                rows = lower == place
                seconds[rows] = sets[float(known[place])].seconds(terms[rows], lengths[rows])
        return seconds


def _prefill(X: Floats) -> tuple[Floats, Floats]:  # noqa: N803
    """Terms of the prefill form, and the new tokens of one prompt."""
    tokens, prompts = column(X, "prefill_tokens"), np.maximum(1.0, column(X, "prefill_chunks"))
    # Twice the pairs are the sum of n^2 + 2nr + n. Without reused tokens this is exact for unequal prompts too.
    products = 2.0 * column(X, "prefill_pairs") - tokens
    reused = np.minimum(tokens * column(X, "prefill_context") / prompts, products / 2.0)
    squares = products - 2.0 * reused
    return np.column_stack([squares, reused, tokens, np.ones(len(X))]), tokens / prompts


def _decode(X: Floats) -> tuple[Floats, Floats]:  # noqa: N803
    """Terms of the decode form, and the context of one sequence."""
    context, batch = column(X, "decode_context"), column(X, "decode_batch")
    return np.column_stack([context, batch, np.ones(len(X))]), context / np.maximum(1.0, batch)


def _determined(sets: dict[float, _Buckets], X: Floats, form: Form) -> dict[float, _Buckets]:  # noqa: N803
    """The unit counts whose rows tell all coefficients of a form apart that the whole profile does; all, if none."""
    terms, units = form(X)[0], column(X, "units")
    terms = terms / np.maximum(terms.max(axis=0, initial=0.0), 1.0)
    whole = np.linalg.matrix_rank(terms, tol=_NOTHING) if len(terms) else 0
    kept = {u: own for u, own in sets.items() if np.linalg.matrix_rank(terms[units == u], tol=_NOTHING) == whole}
    return kept or sets


def _edges(terms: Floats, lengths: Floats) -> Floats:
    """Bounds of the grid that leave every bucket rows enough to tell its coefficients apart."""
    edges: list[float] = []
    for edge in _LENGTHS:
        below = edges[-1] if edges else 0.0
        parts = [(lengths > below) & (lengths <= edge), lengths > edge]
        if all(_rank(terms[part]) == _rank(terms) for part in parts):
            edges.append(edge)
    return np.array(edges)


def _rank(terms: Floats) -> int:
    if not len(terms):
        return 0
    return int(np.linalg.matrix_rank(terms / np.maximum(terms.max(axis=0), 1.0), tol=1e-6))


def _blocks(terms: Floats, buckets: NDArray[np.intp], count: int) -> Floats:
    """Terms moved to the columns of their row's bucket, 0 in those of others."""
    table = np.zeros((len(terms), count, terms.shape[1]))
    table[np.arange(len(terms)), buckets] = terms
    return table.reshape(len(terms), -1)


def _cells(X: Floats) -> list[bytes]:  # noqa: N803
    """Each row's cell of the guard grid: neighbour's new and reused tokens, own batch and reused tokens, units."""
    cells = np.column_stack(
        [
            np.searchsorted(_LENGTHS, column(X, "neighbour_prefill_tokens")),
            np.searchsorted(_LENGTHS, column(X, "neighbour_prefill_context")),
            np.ceil(np.log2(np.maximum(1.0, column(X, "decode_batch")))),
            np.searchsorted(_LENGTHS, column(X, "decode_context") / np.maximum(1.0, column(X, "decode_batch"))),
            column(X, "units"),
        ]
    )
    return [row.tobytes() for row in cells]
