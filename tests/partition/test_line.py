"""The moving line, under random launches, completions and changes of target."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from smpart.partition import Line, Side, Split
from smpart.partition.split import nested, nested_or_overlapping

TOTAL = 5
SPLITS = [Split(p, TOTAL - p) for p in range(TOTAL + 1)]
OVERLAPPING = [Split(5, 5), Split(4, 2), Split(3, 5)]


def same(prefill, decode):
    """Partitions of different splits may lie anywhere: only one split at a time is safe."""
    return prefill == decode


def every_other(prefill, decode):
    """Some pairs were found disjoint, and some not."""
    return prefill == decode or (nested(prefill, decode) and (prefill.prefill + decode.prefill) % 2 == 0)


class Lanes(RuleBasedStateMachine):
    """Two lanes of depth 2 that launch whenever the line lets them, and complete in order, at any time."""

    disjoint = staticmethod(nested)
    splits = SPLITS

    def __init__(self):
        super().__init__()
        self.line = Line(Split(3, 2), self.disjoint)
        self.queues = {side: [] for side in Side}
        self.ids = 0

    @rule(side=st.sampled_from(list(Side)))
    def launch(self, side):
        split = self.line.grant(side)
        if split is None or len(self.queues[side]) == 2:
            return
        assert split.units(side) > 0
        self.ids += 1
        self.queues[side].append((self.ids, split))
        self.line.launched(self.ids, side, split)

    @precondition(lambda self: any(self.queues.values()))
    @rule(side=st.sampled_from(list(Side)))
    def complete(self, side):
        if self.queues[side]:
            self.line.completed(self.queues[side].pop(0)[0])

    @rule(place=st.integers(0, 99))
    def move(self, place):
        self.line.target = self.splits[place % len(self.splits)]

    @rule(side=st.sampled_from(list(Side)), place=st.integers(0, 99))
    def nobody_waits_for_ever(self, side, place):
        """Once the other side's works are done, a side that the target gives units is granted exactly those."""
        self.line.target = goal = self.splits[place % len(self.splits)]
        while self.queues[side.other]:
            self.line.completed(self.queues[side.other].pop(0)[0])
        assert self.line.grant(side) == (goal if goal.units(side) else None)

    @rule(place=st.integers(0, 99))
    def both_arrive_while_both_keep_launching(self, place):
        """A steady target is reached by both sides although neither ever pauses, within their depths."""
        shared = [split for split in self.splits if not split.exclusive]
        self.line.target = goal = shared[place % len(shared)]
        for _ in range(6):
            for side in Side:
                self.complete(side)
                self.launch(side)
        assert {self.line.grant(side) for side in Side} == {goal}

    @invariant()
    def no_unit_is_shared(self):
        pairs = [(p, d) for _, p in self.queues[Side.PREFILL] for _, d in self.queues[Side.DECODE]]
        assert all(self.disjoint(prefill, decode) for prefill, decode in pairs)

    @invariant()
    def the_count_is_right(self):
        assert all(self.line.inflight(side) == len(queue) for side, queue in self.queues.items())


class StrictLanes(Lanes):
    disjoint = staticmethod(same)


class PartlyProvenLanes(Lanes):
    disjoint = staticmethod(every_other)


class SharingLanes(Lanes):
    """Some splits overlap; others still own what they own."""

    disjoint = staticmethod(nested_or_overlapping(TOTAL))
    splits = SPLITS + OVERLAPPING

    @invariant()
    def no_unit_is_shared_unless_both_ask_for_it(self):
        for _, prefill in self.queues[Side.PREFILL]:
            for _, decode in self.queues[Side.DECODE]:
                mine, yours = set(prefill.indices(Side.PREFILL, TOTAL)), set(decode.indices(Side.DECODE, TOTAL))
                assert not mine & yours or {prefill, decode} <= set(OVERLAPPING)


TestLine = Lanes.TestCase
TestSharingLine = SharingLanes.TestCase
TestStrictLine = StrictLanes.TestCase
TestPartlyProvenLine = PartlyProvenLanes.TestCase


@given(st.sampled_from(SPLITS), st.sampled_from(SPLITS))
def test_nested_splits_are_disjoint_where_their_positions_are(prefill, decode):
    mine, yours = set(prefill.indices(Side.PREFILL, TOTAL)), set(decode.indices(Side.DECODE, TOTAL))
    assert nested(prefill, decode) == (not mine & yours)


@given(st.sampled_from(SPLITS), st.sampled_from(SPLITS), st.sampled_from(list(Side)))
def test_the_shrinking_side_moves_first(before, after, side):
    """A side that shrinks is granted its new share at its next launch, whatever else is in flight."""
    line = Line(before)
    for id, each in enumerate(Side):
        if (split := line.grant(each)) is not None:
            line.launched(id, each, split)
    line.target = after
    if 0 < after.units(side) <= before.units(side):
        assert line.grant(side) == after
