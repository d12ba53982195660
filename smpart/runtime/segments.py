"""Memory that processes share: anonymous memory files, handed from process to process as descriptors.

A memfd needs no name and no `/dev/shm` (64 MB in many containers), and goes away with its last user, however that
one ends. It is sparse: a page takes memory when it is first touched.
"""

from __future__ import annotations

import mmap
import os
import weakref

from smpart.errors import SmpartError
from smpart.partition.cgroups import memory_available

_MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", None)


class SharedSegment:
    """One shared, zeroed, sparse run of bytes.

    Attributes:
        fd: descriptor of the memory file; send it to another process, which calls `attach`. -1 when closed.
        size: bytes.
        buffer: the bytes, writable. Arrays and tensors over it stay valid after `close` for as long as they live.
    """

    def __init__(self, fd: int, *, huge_pages: bool = False) -> None:
        self.fd = fd
        self.size = os.fstat(fd).st_size
        mapping = mmap.mmap(fd, self.size)
        if huge_pages and _MADV_HUGEPAGE is not None:
            mapping.madvise(_MADV_HUGEPAGE)
        self.buffer = memoryview(mapping)
        self._release = weakref.finalize(self, os.close, fd)

    @classmethod
    def create(cls, size: int, name: str, *, frees: int = 0, huge_pages: bool = False) -> SharedSegment:
        """Make a segment of `size` bytes; `name` shows up in /proc/PID/maps and in errors.

        `frees` are bytes that the caller gives back while it fills the segment.
        With `huge_pages` the kernel is asked for transparent huge pages; it may decline, and nothing depends on it.

        Raises:
            SmpartError: there is not that much memory, or the system refuses.
        """
        if size <= 0:
            raise ValueError(f"segment {name}: size must be positive, got {size}")
        available = memory_available() + frees
        if size > available:
            raise SmpartError(
                f"{name} needs {_mib(size)} of memory and {_mib(available)} are available: "
                "free some, or use a smaller model or KV memory"
            )
        fd = os.memfd_create(f"smpart-{name}", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size)
            return cls(fd, huge_pages=huge_pages)
        except OSError as error:
            os.close(fd)
            raise SmpartError(f"{name}: the system refused a shared segment of {_mib(size)}: {error}") from error

    @classmethod
    def attach(cls, fd: int) -> SharedSegment:
        """Map a segment that another process made. Takes over `fd`."""
        return cls(fd)

    def resident(self) -> int:
        """Bytes that take up memory at the moment (pages touched)."""
        return os.fstat(self.fd).st_blocks * 512

    def close(self) -> None:
        """Give up the descriptor, and the memory once no array uses it. Idempotent."""
        if self._release.alive:
            self._release()
            self.fd = -1
            self.buffer = memoryview(b"")  # never release(): torch keeps the view object, not an export of it


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
