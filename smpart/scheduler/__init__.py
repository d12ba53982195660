"""Who runs what, where, now: snapshot in, plan out. Pure functions of state and predictions; imports no torch.

`make_policy` builds a policy by name; a `Policy` answers a `Snapshot` with a `Plan`.
"""

from smpart.scheduler.plan import BlockMove, Piece, Plan, Policy, ResumePrefill, StartPrefill, Step
from smpart.scheduler.registry import Setup, make_policy, policy_names, register
from smpart.scheduler.slo import SLO
from smpart.scheduler.snapshot import ForwardView, LaneView, Snapshot
from smpart.scheduler.table import RequestTable, State

__all__ = [
    "SLO", "BlockMove", "ForwardView", "LaneView", "Piece", "Plan", "Policy", "RequestTable", "ResumePrefill", "Setup",
    "Snapshot", "StartPrefill", "State", "Step", "make_policy", "policy_names", "register",
]  # fmt: skip
