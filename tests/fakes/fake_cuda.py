"""A strict fake ``libcuda.so.1``, compiled on first use and steered from Python.

``load("13.0")`` puts it into this process, before anything of ``cuda`` is imported; ``Fake`` is its control panel. The
driver's version is fixed for a process, because the bindings keep the addresses they looked up.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).with_name("libcuda")
DRIVERS = ("12.4", "12.8", "13.0", "13.1")
GPUS = ("a100", "h100", "h100-pcie", "h200", "b200", "rtx4090", "l40s", "rtx5090")
_FLAGS = (
    "-shared",
    "-fPIC",
    "-O1",
    "-g",
    "-std=gnu11",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-fvisibility=hidden",
    "-pthread",
)


def cuda_headers() -> Path:
    """The folder of ``cuda.h`` in the wheel ``nvidia-cuda-runtime``."""
    folder = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "include"
    if not (folder / "cuda.h").is_file():
        raise FileNotFoundError(f"no cuda.h in {folder}: install nvidia-cuda-runtime")
    return folder


@cache
def build() -> Path:
    """Compile the fake, once for every content of its sources; return its path."""
    include = cuda_headers()
    sources = sorted(SOURCES.glob("*.[chi]*"))
    parts = [source.read_bytes() for source in sources] + [(include / "cuda.h").read_bytes(), repr(_FLAGS).encode()]
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    cached = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "smpart" / "fakes" / digest
    library = cached / "libcuda.so.1"
    if library.exists():
        return library
    cached.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cached) as folder:
        made = Path(folder) / library.name
        (made.parent / "errors.inc").write_text(_error_names(include / "cuda.h"))
        units = [str(source) for source in sources if source.suffix == ".c"]
        places = ["-I", folder, "-isystem", str(include)]
        subprocess.run(["gcc", *_FLAGS, "-Wl,-soname,libcuda.so.1", *places, "-o", str(made), *units], check=True)
        made.replace(library)
    return library


def load(driver: str = "13.0") -> Fake:
    """Load the fake into this process as a driver of this version.

    Raises:
        ValueError: A version it does not play.
    """
    if driver not in DRIVERS:
        raise ValueError(f"the fake plays drivers {', '.join(DRIVERS)}, not {driver}")
    return Fake(ctypes.CDLL(str(build()), mode=ctypes.RTLD_GLOBAL), driver)


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel that ran.

    Attributes:
        kernel: its name.
        stream: handle of the stream it was launched in, or its graph was.
        context: handle of the context it ran in: the stream's, or that of the stream it was captured in.
        stream_context: handle of the stream's own context.
        sms: the SMs of ``context``.
        from_graph: it was a node of a graph.
    """

    kernel: str
    stream: int
    context: int
    stream_context: int
    sms: frozenset[int]
    grid: tuple[int, ...]
    block: tuple[int, ...]
    from_graph: bool


class Fake:
    """Steers and questions the fake driver. Call names carry no ``_v2``: ``cuStreamDestroy``."""

    def __init__(self, library: ctypes.CDLL, driver: str) -> None:
        self._library = library
        self.driver = driver
        self.live_excused = False
        major, minor = driver.split(".")
        library.fake_kind.restype = ctypes.c_char_p
        library.fake_misuse.restype = ctypes.c_char_p
        library.fake_launch.restype = ctypes.c_char_p
        for function in ("fake_call_count", "fake_misuse_count", "fake_launch_count"):
            library[function].restype = ctypes.c_size_t
        for function in ("fake_reset", "fake_option", "fake_knows", "fake_pause"):
            library[function].restype = ctypes.c_bool
        library.fake_set_driver(int(major) * 1000 + int(minor) * 10)
        self.reset()

    def reset(self, gpu: str | None = "h200", topology: str = "plain", **options: int) -> None:
        """Start afresh: forget every handle, fault and record, end every stream.

        Two things stay, as they would with a real driver: that ``cuInit`` was called, and references to the primary
        context taken before (``cuda.core`` keeps one for each thread).

        Args:
            gpu: One of ``GPUS``, or None for a machine without a device.
            topology: "refuses-aligned": SM counts that are odd multiples of the alignment fit no cluster.
            options: ``short_rest=n``: every remainder lacks n SMs; ``short_context=n``: every green context does;
                ``events_per_primary=1``: an event may be recorded in any stream of its primary context;
                ``context_bytes=n``, ``graph_bytes=n``: device memory that each green context and each executable
                graph takes; ``mps=1``: this process is a client of an MPS daemon; ``mps_sms=n``: MPS leaves it so many
                SMs; ``initialised=0``: ``cuInit`` was not called.
        """
        if topology not in ("plain", "refuses-aligned"):
            raise ValueError(f"unknown topology {topology}")
        if not self._library.fake_reset((gpu or "none").encode()):
            raise ValueError(f"unknown GPU {gpu}: {', '.join(GPUS)}")
        self.live_excused = False
        options["refuses_aligned"] = topology == "refuses-aligned"
        for name, value in options.items():
            if not self._library.fake_option(name.encode(), ctypes.c_long(value)):
                raise ValueError(f"unknown option {name}")

    def fail(self, name: str, nth: int = 1, code: int = 2, times: int | None = 1) -> None:
        """Make the nth call of this name from now on return a code, without effect; and further ones, up to times."""
        plain = self._plain(name)
        self._library.fake_fail(plain, ctypes.c_uint(nth), ctypes.c_long(-1 if times is None else times), int(code))

    def fail_async(self, code: int, after: int = 1) -> None:
        """Report an asynchronous error at the nth call from now that may; a sticky one then poisons the device."""
        self._library.fake_fail_async(int(code), ctypes.c_uint(after))

    @contextmanager
    def held(self, name: str) -> Iterator[None]:
        """Calls of this name stay inside the driver as long as this lasts."""
        self._library.fake_hold(self._plain(name))
        try:
            yield
        finally:
            self._library.fake_hold(None)

    def wait_held(self) -> None:
        """Wait until a call is being held."""
        self._library.fake_wait_held()

    @contextmanager
    def paused(self, stream: int | None = None) -> Iterator[None]:
        """No stream, or not this one, starts further work as long as this lasts."""
        self.pause(stream)
        try:
            yield
        finally:
            self.resume(stream)

    def pause(self, stream: int | None = None) -> None:
        """Let no stream, or not this one, start further work."""
        self._pause(stream, True)

    def resume(self, stream: int | None = None) -> None:
        """End a pause."""
        self._pause(stream, False)

    def calls(self, name: str | None = None) -> list[tuple[Any, ...]]:
        """Every call since the last reset or ``forget_calls``, or those of one name: (name, args...), in order."""
        text, args = ctypes.c_char_p(), (ctypes.c_longlong * 8)()
        found = []
        for at in range(self._library.fake_call_count()):
            count = self._library.fake_call(ctypes.c_size_t(at), ctypes.byref(text), args)
            called = (text.value or b"").decode()
            if name in (None, called):
                found.append((called, *args[:count]))
        return found

    def forget_calls(self) -> None:
        """Empty the record of calls."""
        self._library.fake_forget_calls()

    def misuse(self) -> list[str]:
        """Every rule broken so far: "cuStreamDestroy: stream 3 not drained"."""
        count = self._library.fake_misuse_count()
        return [self._library.fake_misuse(ctypes.c_size_t(at)).decode() for at in range(count)]

    def take_misuse(self) -> list[str]:
        """The records of misuse, which are then forgotten: for a test that breaks rules on purpose."""
        records = self.misuse()
        self._library.fake_forget_misuse()
        return records

    def launches(self) -> list[Launch]:
        """Every kernel that has run since the last reset, in the order in which they did."""
        numbers, bits = (ctypes.c_uint64 * 10)(), (ctypes.c_uint64 * 4)()
        found = []
        for at in range(self._library.fake_launch_count()):
            name = self._library.fake_launch(ctypes.c_size_t(at), numbers, bits).decode()
            sms = frozenset(sm for sm in range(256) if bits[sm // 64] >> sm % 64 & 1)
            stream, context, stream_context, *sizes, from_graph = numbers
            grid, block = tuple(sizes[:3]), tuple(sizes[3:])
            found.append(Launch(name, stream, context, stream_context, sms, grid, block, bool(from_graph)))
        return found

    def live(self) -> dict[str, int]:
        """What was made or retained since the last reset and still is, by kind; no entry for none."""
        counts = {}
        kind = 0
        while name := self._library.fake_kind(kind):
            if count := self._library.fake_live(kind):
                counts[name.decode()] = count
            kind += 1
        return counts

    def excuse_live(self) -> None:
        """Let what is alive be: for a test that leaves things behind on purpose."""
        self.live_excused = True

    def _pause(self, stream: int | None, paused: bool) -> None:
        if not self._library.fake_pause(ctypes.c_void_p(int(stream) if stream else None), paused):
            raise ValueError(f"no stream {stream}")

    def _plain(self, name: str) -> bytes:
        plain = re.sub(r"_v\d+$", "", name).encode()
        if not self._library.fake_knows(plain):
            raise ValueError(f"the fake has no {name}")
        return plain


def _error_names(header: Path) -> str:
    """C initialisers {code, name} of every CUresult."""
    names = re.findall(r"^\s+(CUDA_(?:SUCCESS|ERROR_\w+))\s*=\s*\d+", header.read_text(), re.MULTILINE)
    return "".join(f'{{{name}, "{name}"}},\n' for name in names)
