"""Two forwards on the same SMs at once: two streams and no split, or splits whose sides overlap.

Nobody documents how the hardware then places thread blocks, so this states a rule that is fair to both: of each
resource, SM time and bandwidth, a forward demands what it uses alone; where two demand more than there is, both slow
down alike, until their shares add up to the whole. Bandwidth is shared so whether SMs are or not
(`smpart.sim.scaling.Load.beside`). Stream priorities, which only choose whose block comes next, are left out.

A kernel that computes holds its SMs. One that streams holds as many as its bandwidth takes (`held`): blocks of the
other forward find room on the rest. Solo, a forward has full speed; on sides that do not overlap nobody waits for an SM.
"""

from __future__ import annotations

import math

REACHES = 0.92
"""Share of the whole GPU's bandwidth at which a kernel counts as streaming at full speed. The one free constant: with it
two phases together get through as much as semi-PD (its section 7.2.2) found for (100, 100) against controlled caps."""


def held(knee: float) -> float:
    """Share of the SMs that a streaming kernel needs, where bandwidth saturates exponentially with a `knee`.

    >>> 0.45 < held(0.19) < 0.5
    True
    """
    return -knee * math.log1p(REACHES * math.expm1(-1.0 / knee))


def demand(computing: float, streaming: float, share: float, held: float) -> float:
    """The part of the device's SM time that a forward takes when it runs alone.

    Args:
        computing: share of its time in which it computes; the rest it streams (`streaming`) or waits.
        share: share of the device's SMs that it may use.
        held: share that streaming takes.
    """
    return computing * share + streaming * min(share, held)


def crowding(mine: float, theirs: float) -> float:
    """Times as long as an SM's work takes when both forwards' demands are put on one device."""
    return max(1.0, mine + theirs)
