"""Holds a lane's stream while the host queues behind it: what comes after is then timed without the host's part."""

from __future__ import annotations

from smpart.partition.cuda.places import Place
from smpart.partition.cuda.program import Program, pointer, uint64

_MOST_S = 0.25


class Gate:
    """One block that sits on one SM of the lane for a while."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._kernel = program.kernel("smid_probe", "probe")
        self._memory = program.memory(32)

    def hold(self, place: Place, seconds: float) -> None:
        """Let nothing that is queued at `place` from now on begin earlier than that many seconds after what is there.

        At most a quarter of a second.
        """
        arguments = (pointer(self._memory + 16), pointer(self._memory), uint64(int(min(seconds, _MOST_S) * 1e9)))
        self._program.launch(self._kernel, place, 1, 32, arguments)
