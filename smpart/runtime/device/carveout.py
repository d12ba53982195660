"""Tells matrix-multiplication libraries how many SMs a lane has: their grids are sized for the whole device else."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

logger = logging.getLogger(__name__)


class Carveout:
    """The SMs that kernels launched from now on should leave alone: a setting of the whole process.

    torch has an experimental knob for it, for some of its kernels, in some versions. Without it nothing is lost but
    speed: a grid that is too large runs in more waves.

    Args:
        setter: `torch._C._set_sm_carveout_experimental`, or None where there is none.
    """

    def __init__(self, setter: Callable[[int | None], None] | None) -> None:
        self._set = setter
        self._left: int | None = None
        if setter is None:
            logger.info("this torch cannot be told a lane's SMs: matrix multiplications size their grids for all")

    @classmethod
    def of_torch(cls) -> Carveout:
        """The one of this process's torch."""
        return cls(getattr(torch._C, "_set_sm_carveout_experimental", None))

    def leave(self, units: int) -> None:
        """Have kernels leave `units` SMs alone."""
        if self._set is not None and units != self._left:
            self._set(units or None)
            self._left = units
