"""Policies by name. One file in `smpart.scheduler.policies` registers one name (or a few) and is loaded on demand."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field

from smpart.errors import UsageError
from smpart.partition import Split
from smpart.scheduler import policies
from smpart.scheduler.plan import Policy
from smpart.scheduler.slo import SLO


@dataclass(frozen=True, slots=True)
class Setup:
    """What a policy is made from.

    Attributes:
        argument: what followed the colon of ``name:argument``, or ``""``.
        slo: the objectives of requests that name none.
        splits: splits the device can realise; empty: not known yet, the policy checks when it plans.
        overlapping: those besides whose sides share units, if `splits` is known.
    """

    argument: str = ""
    slo: SLO = field(default_factory=SLO)
    splits: tuple[Split, ...] = ()
    overlapping: tuple[Split, ...] = ()

    def whole(self, policy: str, default: int) -> int:
        """The argument as a whole number of at least 1, or `default` without one. Raises `UsageError`."""
        if not self.argument:
            return default
        if not self.argument.isdecimal() or int(self.argument) < 1:
            raise UsageError(f"policy {policy}:{self.argument}: the argument must be a whole number of at least 1")
        return int(self.argument)

    def nothing(self, policy: str) -> None:
        """Raises `UsageError` if there is an argument."""
        if self.argument:
            raise UsageError(f"policy {policy}:{self.argument}: {policy} takes no argument")


Factory = Callable[[Setup], Policy]

_FACTORIES: dict[str, Factory] = {}


def register(name: str) -> Callable[[Factory], Factory]:
    """Decorator: make a policy known as `name`."""

    def keep(factory: Factory) -> Factory:
        _FACTORIES[name] = factory
        return factory

    return keep


def policy_names() -> tuple[str, ...]:
    """Every policy there is, in alphabetical order.

    >>> "chunked" in policy_names()
    True
    """
    for module in pkgutil.iter_modules(policies.__path__):
        importlib.import_module(f"{policies.__name__}.{module.name}")
    return tuple(sorted(_FACTORIES))


def make_policy(
    spec: str, *, slo: SLO | None = None, splits: tuple[Split, ...] = (), overlapping: tuple[Split, ...] = ()
) -> Policy:
    """The policy that `spec` names: ``name`` or ``name:argument`` (``chunked:256``, ``static:96/36``).

    Raises:
        UsageError: no such policy, or an argument it cannot use.

    >>> make_policy("chunked:256").name
    'chunked:256'
    """
    name, _, argument = spec.strip().partition(":")
    if (
        name.isidentifier()
        and name not in _FACTORIES
        and name in {m.name for m in pkgutil.iter_modules(policies.__path__)}
    ):
        importlib.import_module(f"{policies.__name__}.{name}")
    if name not in _FACTORIES and name not in policy_names():
        raise UsageError(f"policy {spec!r}: no such policy; there are {', '.join(policy_names())}")
    return _FACTORIES[name](Setup(argument.strip(), slo or SLO(), splits, overlapping))
