"""Two forwards on the same SMs at once: two streams and no split, or splits whose sides overlap.

How the hardware then places thread blocks is undocumented, so this states a rule that is fair to both. A forward asks
of each resource, SM time and bandwidth, for what it uses alone; where two ask for more than there is, both slow down
alike, until their shares add up to the whole. Bandwidth is shared so whether SMs are or not
(`smpart.sim.scaling.Load.beside`). Stream priorities, which only choose whose block comes next, are left out.

A kernel that computes holds its SMs. One that streams holds as many as its bandwidth takes (`held`), and blocks of the
other forward find room on the rest. Alone a forward has full speed; where sides do not overlap nobody waits for an SM.
"""

from __future__ import annotations

import math

REACHES = 0.86
"""Share of the whole GPU's bandwidth at which a kernel counts as streaming at full speed: the one free constant.

Assumed so that the best fixed split of an A100 gets through 1.11 times as much as sharing it does (the sum of both
phases' speeds, Llama-3.1-8B, batches 1 to 256 beside 512 to 8,192 tokens): what semi-PD (section 7.2.2) gained there
over (100, 100) by control. For an H100 it follows that sharing loses by 1.05. With 0.80 these are 1.05 and 1.00, with
0.95 they are 1.29 and 1.20.
"""


def held(knee: float) -> float:
    """Share of the SMs that a streaming kernel needs, where bandwidth saturates exponentially with a `knee`.

    >>> 0.3 < held(0.19) < held(0.25) < 0.5
    True
    """
    return -knee * math.log1p(REACHES * math.expm1(-1.0 / knee))


def demand(computing: float, streaming: float, share: float, held: float) -> float:
    """The part of the device's SM time that a forward takes when it runs alone.

    Args:
        computing: share of its time in which it computes.
        streaming: share in which it streams; in the rest it waits for the host.
        share: share of the device's SMs that it may use.
        held: share that streaming takes.
    """
    return computing * share + streaming * min(share, held)


def crowding(mine: float, theirs: float) -> float:
    """Times as long as an SM's work takes when both forwards' demands are put on one device.

    >>> crowding(0.9, 0.4), crowding(0.5, 0.4)
    (1.3, 1.0)
    """
    return max(1.0, mine + theirs)
