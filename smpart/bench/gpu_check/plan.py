"""The stages of a GPU check, in order of value, and what each may take."""

from __future__ import annotations

from smpart.bench.gpu_check.runner import Stage

DEVICE = Stage("device", 40, "what the device is")

STAGES = (
    Stage("doctor", 45, "lanes disjoint and as large as promised, by both proofs"),
    Stage("conformance", 60, "the contract of lanes, on green contexts"),
    Stage("tokens", 100, "the tokens of plain generate, under random resizes"),
    Stage("profile", 60, "zero copy at the hand-off, no host sync in the steady state"),
    Stage("switch", 30, "what a switch costs; contexts: time and memory"),
    Stage("graphs", 60, "decode graphs: capture, replay, memory, context"),
    Stage("contention", 90, "prefill and decode alone and side by side, over the splits"),
    Stage("gemm", 25, "matrix products with and without the SM carve-out"),
    Stage("serving", 100, "chunked against smpart on one bursty load"),
    Stage("mps", 40, "lanes under MPS"),
    Stage("sanitizer", 60, "the kernels of csrc under compute-sanitizer"),
)

TOTAL_S = 465.0
"""All of them together: below eight minutes, with the time to end the last one."""
