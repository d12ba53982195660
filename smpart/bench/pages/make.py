"""`smpart report`: finds out what a folder is, and writes its page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from smpart.bench.pages.bench_page import RESULTS, bench_page
from smpart.bench.pages.profile_page import profile_page
from smpart.durable import make_folder, write_whole
from smpart.errors import UsageError

FILE = "report.html"


def write_report(folder: Path, out: Path | None = None, say: Callable[[str], None] = lambda line: None) -> Path:
    """Write the page of a profile or bench folder, and return its path.

    Args:
        out: the file to write; ``report.html`` in the folder if None.
        say: is told what is going on, line by line.

    Raises:
        UsageError: the folder is neither, its files cannot be used, or the page cannot be written.
        BackendUnavailable: jinja2, matplotlib or pyarrow is missing.
    """
    if (folder / "profile.json").is_file():
        page = profile_page(folder, say)
    elif (folder / RESULTS).is_file():
        page = bench_page(folder)
    else:
        raise UsageError(
            f"{folder} is neither a profile folder (smpart profile --out) nor a bench folder (smpart bench --out)"
        )
    path = out or folder / FILE
    try:
        make_folder(path.parent)
        return write_whole(path, page.html().encode())
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror})") from None
