"""Prefill and decode of a language model at the same time, in two lanes of one device, over one KV memory.

The public names are listed in ``__all__``. They are loaded on first use, so that ``import smpart.partition`` or
``import smpart.predictor``, which are useful alone, cost no import of torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from smpart.errors import (
    BackendUnavailable,
    EngineClosed,
    RequestFailed,
    SmpartError,
    UnsupportedModel,
    UsageError,
)

if TYPE_CHECKING:
    from smpart.engine import Engine, RequestOutput, wrap
    from smpart.kvcache import KVConfig
    from smpart.partition import Split
    from smpart.runtime.sampling import SamplingParams
    from smpart.scheduler.slo import SLO

__version__ = "0.1.0"

__all__ = [
    "SLO",
    "BackendUnavailable",
    "Engine",
    "EngineClosed",
    "KVConfig",
    "RequestFailed",
    "RequestOutput",
    "SamplingParams",
    "SmpartError",
    "Split",
    "UnsupportedModel",
    "UsageError",
    "__version__",
    "wrap",
]

_HOMES = {
    "Engine": "smpart.engine",
    "KVConfig": "smpart.kvcache",
    "RequestOutput": "smpart.engine",
    "SLO": "smpart.scheduler.slo",
    "SamplingParams": "smpart.runtime.sampling",
    "Split": "smpart.partition",
    "wrap": "smpart.engine",
}

if not TYPE_CHECKING:  # a type checker sees the imports above; this would make every name valid to it

    def __getattr__(name):
        if name not in _HOMES:
            raise AttributeError(f"module 'smpart' has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_HOMES[name]), name)
        return value

    def __dir__():
        return sorted({*globals(), *__all__})
