"""The sources compile for every architecture that is served, and binaries are kept, checked and shared."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from smpart import kernels
from smpart.errors import BackendUnavailable, UsageError

CSRC = Path(__file__).resolve().parents[2] / "csrc"
NAMES = sorted(path.stem for path in CSRC.glob("*.cu"))
ARCHES = {"sm_80": 80, "sm_90": 90, "sm_100": 100, "sm_120": 120}
ENTRIES = {
    "smid_probe": ["probe"],
    "handshake": ["meet"],
    "contenders": ["arithmetic", "memory"],
    "kv_blocks": ["gather", "scatter"],
}


def _no_nvrtc() -> str:
    try:
        kernels._nvrtc()
    except BackendUnavailable as error:
        return str(error)
    return ""


needs_nvrtc = pytest.mark.skipif(bool(_no_nvrtc()), reason=_no_nvrtc())


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SMPART_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


@needs_nvrtc
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", NAMES)
def test_compiles_to_a_binary_that_holds_its_kernels(name: str, arch: str) -> None:
    binary = kernels.compiled(name, arch).read_bytes()
    assert binary[:4] == b"\x7fELF"
    for kernel in ENTRIES[name]:
        assert f".text.{kernel}\0".encode() in binary


@needs_nvrtc
def test_the_second_time_nothing_is_compiled(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = kernels.compiled("smid_probe", "sm_90")
    assert first.parent == cache
    monkeypatch.setattr(kernels, "_compile", None)
    assert kernels.compiled("smid_probe", "sm_90") == first


@needs_nvrtc
def test_each_architecture_and_source_has_its_own() -> None:
    paths = {kernels.compiled(name, arch) for name in ("smid_probe", "handshake") for arch in ("sm_80", "sm_90")}
    assert len({path.read_bytes() for path in paths}) == 4


@needs_nvrtc
@pytest.mark.parametrize("changed", ["smid_probe.cu", "device.h"])
def test_a_changed_source_or_header_is_compiled_anew(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "csrc"
    folder.mkdir()
    for path in (CSRC / "smid_probe.cu", *CSRC.glob("*.h")):
        (folder / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(kernels, "_SOURCES", folder)
    before = kernels.compiled("smid_probe", "sm_90")
    with (folder / changed).open("a") as file:
        file.write("\n// another\n")
    assert kernels.compiled("smid_probe", "sm_90") != before


@needs_nvrtc
@pytest.mark.parametrize("damage", [b"", b"\x7fELF"])
def test_a_damaged_binary_is_replaced(damage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    path = kernels.compiled("smid_probe", "sm_90")
    whole = path.read_bytes()
    path.write_bytes(damage)
    assert kernels.compiled("smid_probe", "sm_90").read_bytes() == whole
    assert "damaged" in caplog.text
    caplog.clear()
    assert kernels.compiled("smid_probe", "sm_90").read_bytes() == whole
    assert not caplog.records


@needs_nvrtc
def test_a_cache_that_cannot_be_written_costs_a_log_line(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.parent.mkdir()
    cache.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        path = kernels.compiled("smid_probe", "sm_90")
    assert path.read_bytes()[:4] == b"\x7fELF"
    assert [record.name for record in caplog.records] == ["smpart.kernels"]
    assert "cache cannot be written" in caplog.text


@needs_nvrtc
def test_without_a_home_folder_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("SMPART_CACHE")
    monkeypatch.setattr(Path, "home", homeless)
    assert kernels.compiled("smid_probe", "sm_90").read_bytes()[:4] == b"\x7fELF"


@needs_nvrtc
def test_processes_that_compile_at_once_do_not_disturb_each_other(cache: Path) -> None:
    code = "from smpart import kernels; print(kernels.compiled('handshake', 'sm_90'))"
    both = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = {Path(process.communicate()[0].strip()) for process in both}
    assert all(process.returncode == 0 for process in both)
    assert {path.parent for path in paths} == {cache}
    assert all(path.read_bytes()[:4] == b"\x7fELF" for path in paths)
    assert {path.name for path in cache.iterdir()} == {path.name for path in paths}  # no half-written file is left


@needs_nvrtc
def test_all_are_compiled_for_one_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "csrc"
    folder.mkdir()
    for path in (CSRC / "smid_probe.cu", CSRC / "handshake.cu", *CSRC.glob("*.h")):
        (folder / path.name).symlink_to(path)
    monkeypatch.setattr(kernels, "_SOURCES", folder)
    paths = kernels.compile_all("sm_90")
    assert list(paths) == ["handshake", "smid_probe"]
    assert paths["handshake"] == kernels.compiled("handshake", "sm_90")


@needs_nvrtc
def test_an_error_in_a_source_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wrong.cu").write_text('extern "C" __global__ void wrong() { int a = nowhere; }')
    monkeypatch.setattr(kernels, "_SOURCES", tmp_path)
    with pytest.raises(
        BackendUnavailable, match=r'^wrong\.cu does not .*sm_90: .*error.*"nowhere" is undefined$'
    ) as info:
        kernels.compiled("wrong", "sm_90")
    assert "\n" not in str(info.value)


@needs_nvrtc
def test_an_architecture_that_nvrtc_does_not_know_is_one_line() -> None:
    with pytest.raises(BackendUnavailable, match=r"smid_probe\.cu does not compile with .*sm_10: .*error"):
        kernels.compiled("smid_probe", "sm_10")


@pytest.mark.parametrize("arch", ["", "90", "sm90", "sm_9x", "compute_90", "sm_90 --x"])
def test_what_is_no_architecture_is_refused(arch: str) -> None:
    with pytest.raises(UsageError, match="GPU architecture"):
        kernels.compiled("smid_probe", arch)
    with pytest.raises(UsageError, match="GPU architecture"):
        kernels.Kernels(arch)


def test_an_unknown_source_names_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"no kernel source 'nope' .*: there are contenders, handshake"):
        kernels.compiled("nope", "sm_90")


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    with pytest.raises(BackendUnavailable, match=r"need cuda, .*smpart\[cuda\]"):
        kernels.compiled("smid_probe", "sm_90")


def test_a_missing_library_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    class Bindings:
        @staticmethod
        def nvrtcVersion() -> None:  # noqa: N802
            raise RuntimeError("no libnvrtc.so")

    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", Bindings)
    with pytest.raises(BackendUnavailable, match=r"NVRTC library, which is not found: .*smpart\[cuda\]"):
        kernels.compiled("smid_probe", "sm_90")
