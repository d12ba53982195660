"""CUDA kernels: finds the sources in ``csrc``, compiles them with NVRTC, keeps the binaries, loads and launches them.

Compiling needs the NVRTC library alone, neither a driver nor a GPU nor toolkit headers. Loading and launching go
through cupy and need a GPU.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import logging
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smpart.cache import cache
from smpart.durable import make_folder, write_whole
from smpart.errors import BackendUnavailable, UsageError

logger = logging.getLogger(__name__)

_SOURCES = Path(__file__).with_name("csrc")
_OPTIONS = ("--std=c++17", "--generate-line-info")
_SHARED_WITHOUT_ASKING = 48 * 1024
"""Bytes of dynamic shared memory a block may have before its kernel's limit must be raised."""
_ON_DEVICE = (2, 13)
"""DLPack's numbers of CUDA memory and CUDA managed memory."""


class Kernels:
    """The kernels of ``csrc``, compiled for one architecture and loaded on cupy's current device as they are asked for.

    Args:
        arch: ``sm_`` and the device's compute capability without its dot: ``sm_90``.

    Raises:
        UsageError: `arch` is none.
    """

    def __init__(self, arch: str) -> None:
        self.arch = _checked(arch)
        self._modules: dict[str, Any] = {}

    def function(self, source: str, kernel: str) -> Any:
        """A kernel, ready for `launch`: ``function("smid_probe", "probe")``. Asked for again, it is the same module.

        Raises:
            UsageError: no such source.
            BackendUnavailable: cupy or NVRTC is missing, or the source does not compile here.
        """
        module = self._modules.get(source)
        if module is None:
            cupy = _optional("cupy")
            module = self._modules[source] = cupy.RawModule(path=str(compiled(source, self.arch)))
        return module.get_function(kernel)


def launch(function: Any, grid: int, block: int, args: Sequence[Any], stream: int, shared: int = 0) -> None:
    """Queue a kernel on a stream and return at once. The stream's context, or its device's primary one, is current.

    Args:
        function: from `Kernels.function`.
        grid: blocks.
        block: threads a block.
        args: in the kernel's order. Tensors and arrays on the device are passed in place through DLPack; if torch's
            current stream is another, the launch waits for what that one has queued so far. Nothing keeps their memory
            until the kernel has run: the caller does. cupy reads no bfloat16 or float8: pass a view of another type.
            Numbers are numpy scalars of the parameter's type (``numpy.int32(3)``); so are addresses, those of pinned
            host memory for one (``numpy.uint64(tensor.data_ptr())``).
        stream: handle of a CUDA stream (a ``CUstream`` as an int).
        shared: bytes of dynamic shared memory a block.

    Raises:
        UsageError: an argument is a plain number, whose size among the parameters would be a guess, or lies on the
            host, from where cupy would pass a copy.
    """
    for position, arg in enumerate(args):
        if type(arg) in (bool, int, float):
            raise UsageError(f"kernel argument {position} is the plain number {arg!r}: give a numpy scalar")
        if hasattr(arg, "__dlpack__") and arg.__dlpack_device__()[0] not in _ON_DEVICE:
            raise UsageError(f"kernel argument {position} lies on the host: give a tensor on the device, or an address")
    cupy = _optional("cupy")
    with cupy.cuda.Stream.from_external(_StreamHandle(stream)):
        passed = tuple(cupy.from_dlpack(arg) if hasattr(arg, "__dlpack__") else arg for arg in args)
        if shared > _SHARED_WITHOUT_ASKING and shared > function.max_dynamic_shared_size_bytes:
            function.max_dynamic_shared_size_bytes = shared
        function((grid,), (block,), passed, shared_mem=shared)


def compile_all(arch: str) -> dict[str, Path]:
    """Compile every source for one architecture, so that nothing has to be compiled later. Errors as for `compiled`."""
    return {path.stem: compiled(path.stem, arch) for path in sorted(_SOURCES.glob("*.cu"))}


def compiled(name: str, arch: str) -> Path:
    """Binary (cubin) of ``csrc/<name>.cu``: compiled now, or kept from before.

    Binaries are kept in ``$SMPART_CACHE/kernels`` (default ``~/.cache/smpart/kernels``), by the hash of all that went
    into them; the name of each also carries a hash of its content, so that a damaged one is noticed and made anew.
    Where they cannot be kept, a line is logged and the file lives as long as this process.

    Args:
        name: of the source, without its suffix.
        arch: as for `Kernels`.

    Raises:
        UsageError: no such source or architecture.
        BackendUnavailable: NVRTC is missing, or refuses the source or the architecture.
    """
    source = _source(name)
    headers = {path.name: path.read_bytes() for path in sorted(_SOURCES.glob("*.h"))}
    options = (*_OPTIONS, f"--gpu-architecture={_checked(arch)}")
    text, nvrtc = source.read_bytes(), _nvrtc()
    version = ".".join(map(str, _call(nvrtc.nvrtcVersion)))
    stem = f"{name}-{arch}-{_digest(version, *options, text, *headers, *headers.values())}"
    kept = _kept(stem)
    if kept is not None:
        return kept
    binary = _compile(nvrtc, source.name, text, headers, options)
    file = f"{stem}-{_digest(binary)}.cubin"
    try:
        folder = cache() / "kernels"
        make_folder(folder)
        return write_whole(folder / file, binary)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        logger.warning("kernel %s is compiled anew in every process: its cache cannot be written (%s)", name, error)
        return write_whole(Path(_for_this_process().name) / file, binary)


class _StreamHandle:
    """What cupy takes as a foreign stream."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        """Version of the protocol, and the handle."""
        return 0, self._handle


def _source(name: str) -> Path:
    source = _SOURCES / f"{name}.cu"
    if source.parent != _SOURCES or not source.is_file():
        known = ", ".join(sorted(path.stem for path in _SOURCES.glob("*.cu")))
        raise UsageError(f"no kernel source {name!r} in {_SOURCES}: there are {known or 'none, reinstall smpart'}")
    return source


def _checked(arch: str) -> str:
    if not re.fullmatch(r"sm_[0-9]{2,3}[af]?", arch):
        raise UsageError(f"GPU architecture {arch!r}: must be sm_ and the compute capability's digits, as in sm_90")
    return arch


def _optional(module: str) -> Any:
    """An optional package, imported when it is first needed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise BackendUnavailable(
            f"CUDA kernels need {module.partition('.')[0]}, which cannot be imported ({error}): "
            "run `pip install 'smpart[cuda]'`"
        ) from error


# ---- NVRTC -----------------------------------------------------------------------------------------------------------


def _nvrtc() -> Any:
    """The bindings, with the library behind them loaded."""
    nvrtc = _optional("cuda.bindings.nvrtc")
    try:
        nvrtc.nvrtcVersion()
    except RuntimeError as error:  # how a library that is not found shows itself
        raise BackendUnavailable(
            "CUDA kernels need the NVRTC library, which is not found: run `pip install 'smpart[cuda]'`, "
            "or set CUDA_HOME to a CUDA toolkit"
        ) from error
    return nvrtc


def _call(function: Any, *args: Any) -> Any:
    """What an NVRTC function returns, its status left out."""
    status, *results = function(*args)
    if int(status) != 0:
        raise BackendUnavailable(f"NVRTC failed in {function.__name__}: {status.name}")
    return results[0] if len(results) == 1 else results


def _compile(nvrtc: Any, name: str, text: bytes, headers: dict[str, bytes], options: tuple[str, ...]) -> bytes:
    """Compile a source to a cubin. Headers are handed over as read, so that the binary is what was hashed."""
    names = [header.encode() for header in headers]
    program = _call(nvrtc.nvrtcCreateProgram, text, name.encode(), len(headers), list(headers.values()), names)
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if int(status) != 0:
            log = bytes(_call(nvrtc.nvrtcGetProgramLogSize, program))
            _call(nvrtc.nvrtcGetProgramLog, program, log)
            raise BackendUnavailable(f"{name} does not compile with {options[-1]}: {_first_error(log, status.name)}")
        binary = bytes(_call(nvrtc.nvrtcGetCUBINSize, program))
        _call(nvrtc.nvrtcGetCUBIN, program, binary)  # fills the buffer it is given
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return binary


def _first_error(log: bytes, status: str) -> str:
    """The line of a compiler's log that says what is wrong."""
    lines = [line.strip() for line in log.decode(errors="replace").strip("\0\n ").splitlines()]
    return next((line for line in lines if "error" in line), status)


# ---- the cache -------------------------------------------------------------------------------------------------------


@functools.cache
def _for_this_process() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="smpart-kernels-")


def _digest(*parts: str | bytes) -> str:
    whole = hashlib.sha256()
    for part in parts:
        encoded = part.encode() if isinstance(part, str) else part
        whole.update(len(encoded).to_bytes(8, "little") + encoded)
    return whole.hexdigest()[:32]


def _kept(stem: str) -> Path | None:
    """An undamaged binary in the cache."""
    try:
        for path in sorted((cache() / "kernels").glob(f"{stem}-*.cubin")):
            if path.stem == f"{stem}-{_digest(path.read_bytes())}":
                return path
            logger.warning("kernel binary %s is damaged: compiling it anew", path)
    except (OSError, RuntimeError) as error:
        logger.warning("the cache of kernel binaries cannot be read (%s)", error)
    return None
