"""Compiles the kernels for real, exactly as they are launched, for GPUs that need not be here. Run by
test_triton_kernels.py."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from paged_oracle import Problem
from triton.backends.compiler import GPUTarget

from smpart.runtime.device.attention import Scratch
from smpart.runtime.device.triton_attention import TritonAttention

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class AbsentGpu:
    """What Triton asks its driver for in order to compile."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_device(self) -> int:
        return self._capability  # a number of its own: what was compiled is kept by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)


@pytest.fixture
def compile_for(monkeypatch):
    """Turns launches into compilations; what was compiled, by kernel."""

    def start(capability: int) -> dict[str, Any]:
        compiled: dict[str, Any] = {}

        def compile_only(kernel: Any, grid: Any) -> Any:
            def launch(*args: Any, **kwargs: Any) -> None:
                compiled[kernel.__name__] = kernel.run(*args, grid=grid, warmup=True, **kwargs)

            return launch

        monkeypatch.setattr(triton.runtime.JITFunction, "__getitem__", compile_only)
        triton.runtime.driver.set_active(AbsentGpu(capability))
        return compiled

    return start


def stack_bytes(kernel: Any, folder: Path) -> int:
    """Bytes a thread keeps on its stack, as the CUDA toolkit reports them: what did not fit in registers."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    report = subprocess.run([CUOBJDUMP, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True)
    found = re.search(r"STACK:(\d+)", report.stdout)
    assert found is not None, report.stdout
    return int(found[1])


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("dim", "group", "window"), [(80, 3, None), (256, 2, 100)])
def test_compiles_within_the_registers_and_memory_of_one_sm(
    compile_for, tmp_path, capability, dtype, dim, group, window
):
    compiled = compile_for(capability)
    problem = Problem([400], [(3, 2)], heads=2 * group, kv_heads=2, dim=dim, dtype=dtype, window=window)
    attention = TritonAttention(problem.shape, Scratch(torch.device("cpu")), 132)
    attention.prepare(problem.attended)
    attention.decode(*problem.decode)
    attention.prefill(*problem.prefill)
    assert compiled.keys() == {"_decode", "_combine", "_prefill"}
    for name, kernel in compiled.items():
        assert kernel.asm["cubin"], name
        assert kernel.metadata.shared <= 99 << 10, name  # what a block may have on the smallest SMs served
        assert stack_bytes(kernel, tmp_path) <= 64, name  # a few registers, by compiler and GPU
        if dtype == torch.float32:
            assert "tf32" not in kernel.asm["ptx"], name
