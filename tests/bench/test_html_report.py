from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import gpu_samples
import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from smpart import cli
from smpart.bench.fit import Fitted
from smpart.bench.heldout import Held, Measured
from smpart.bench.judgement import OURS, Judgement
from smpart.bench.pages.accuracy_parts import errors_by_phase, parity, slowdowns
from smpart.bench.pages.bound_parts import bounds, calibration
from smpart.bench.pages.ink import draw
from smpart.bench.pages.machine_parts import conditions, noise
from smpart.bench.pages.make import write_report
from smpart.bench.pages.page import Drawing, Page, Section, Table, Text
from smpart.bench.pages.regions import bucket, gather, load, phase, split
from smpart.errors import UsageError
from smpart.partition import Shape
from smpart.profiler.sample import Point, Pressure, Sample

PROFILE_SECTIONS = [
    "Error by phase",
    "Error by shape",
    "Error by split",
    "Predicted against measured",
    "Slowdown beside a neighbour",
    "Upper bounds",
    "Published forms side by side",
    "Noise of the machine",
    "Conditions",
    "Whose profile this is",
]
VOID = {"meta", "img", "link", "br", "hr", "input"}


class Reader(HTMLParser):
    """What a browser would make of a page: elements, text, headings, where links lead; that all is closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text = ""
        self.headings: list[str] = []
        self.links: list[str] = []
        self.targets: list[str] = []
        self.loads: list[str] = []
        self.tags: set[str] = set()
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in VOID:
            self._open.append(tag)
        if tag == "h2":
            self.headings.append("")
        for name, value in attributes:
            assert not name.startswith("on") and "\n<" not in (value or "")
            if name in ("src", "srcset", "data", "poster") or (name == "href" and tag != "a"):
                self.loads.append(value or "")
            if name == "href" and tag == "a":
                self.links.append(value or "")
            if name == "id":
                self.targets.append(value or "")

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._open and self._open[-1] == "h2":
            self.headings[-1] += data


def check(html: str) -> Reader:
    """A page that loads nothing from anywhere, whose contents list leads to every section."""
    read = Reader(html)
    assert not {"script", "link", "iframe", "object", "embed", "base"} & read.tags
    assert all(each.startswith(("data:image/", "#")) for each in read.loads)
    assert set(re.findall(r"url\(([^)]*)\)", html)) <= {f"#{name}" for name in read.targets}
    assert "@import" not in html and "http://" not in html and "https://" not in html
    assert len(read.targets) == len(set(read.targets))
    assert [f"#{name}" for name in read.targets if f"#{name}" in read.links] == read.links
    assert len(read.links) == len(read.headings)
    return read


def smpart(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments))


def test_the_page_of_a_profile(fitted: tuple[Path, Fitted]) -> None:
    folder, made = fitted
    result = smpart("report", str(folder), "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout.splitlines()[-1])["page"] == str(folder / "report.html")
    html = (folder / "report.html").read_text()
    read = check(html)
    assert read.headings == PROFILE_SECTIONS
    assert gpu_samples.NASTY in read.text  # shown, not run
    assert read.tags >= {"svg", "table", "figure", "nav"}
    for figure in (made.report["solo"]["median_ape"], made.report["corun"]["p95_ape"]):
        assert f"{100 * figure:.3g} %" in read.text
    for name in ("muxwise", "bullet", "nexus", "semipd", made.report["fingerprint"], "measured (ms)", "SM clock"):
        assert name in read.text
    assert "prefers-color-scheme: dark" in html and "@media print" in html and "currentColor" in html
    assert len(html) < 2_000_000


@pytest.mark.slow
def test_a_profile_that_was_not_fitted_since_is_fitted_first(
    fitted: tuple[Path, Fitted], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def fit(folder: Path, say: object) -> Fitted:
        asked.append(folder)
        return fitted[1]

    monkeypatch.setattr("smpart.bench.pages.profile_page.fit_folder", fit)
    folder = gpu_samples.write(tmp_path / "profile", gpu_samples.samples(3))
    said: list[str] = []
    assert write_report(folder, tmp_path / "page.html", said.append) == tmp_path / "page.html"
    assert asked == [folder] and "not fitted" in said[0]
    check((tmp_path / "page.html").read_text())
    assert not (folder / "report.html").exists()


def test_the_page_of_a_bench(tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["bench", "--backend", "sim:h100", "--model", "llama-3.1-8b", "--dtype", "bfloat16", "--limit", "12"]
    done = smpart(
        *arguments, "--policy", "mixed,chunked", "--rate", "4,8", "--repeat", "2", "--out", str(out), "--json"
    )
    assert done.exit_code == 0, done.output
    result = smpart("report", str(out))
    assert result.exit_code == 0 and result.stdout.strip() == str(out / "report.html")
    html = (out / "report.html").read_text()
    read = check(html)
    assert read.headings == ["The policies compared", "Pictures", "Every run", "How it was run"]
    assert html.count("data:image/png;base64,") == 3
    ttft = json.loads(done.stdout.splitlines()[-1])["runs"][0]["slo"]["ttft_ms"]
    for name in ("mixed", "chunked", "TTFT p95", "options.policies", "llama-3.1-8b", json.dumps(ttft)):
        assert name in read.text
    assert "At 4 requests a second" in read.text and "At 8 requests a second" in read.text


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("nothing.txt", "", "neither a profile folder"),
        ("results.json", "{", "cannot be read"),
        ("results.json", '{"schema": 2, "runs": []}', "not written by this version"),
        ("results.json", '{"schema": 1, "runs": [{"policy": "mixed"}], "host": {}}', "another version"),
        ("results.json", '{"schema": 1, "runs": [], "host": {}}', "another version"),
        ("profile.json", "{", "damaged"),
    ],
)
def test_a_folder_of_neither_kind_is_one_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    result = smpart("report", str(tmp_path))
    assert result.exit_code == 2 and result.stdout == ""
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("smpart: ") and message in line


def test_a_page_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smpart.bench.pages.make.bench_page", lambda folder: Page("t", "s", []))
    (tmp_path / "results.json").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        write_report(tmp_path, tmp_path / "results.json" / "page.html")


def test_everything_in_a_page_is_escaped() -> None:
    bad = "<b onclick='x'>&"
    page = Page(bad, bad, [Section("A & B", [Text(bad), Table([bad], [[bad, bad]], bad)])], [(bad, bad, bad)])
    read = check(page.html())
    assert read.text.count(bad) == 11 and "b" not in read.tags
    assert read.links == ["#a-b"]


def test_a_drawing_takes_the_ink_of_the_page_and_shares_no_names() -> None:
    drawn = [draw(name, lambda axes: axes[0].plot([1, 2]), size=(2, 2)) for name in ("one", "a < b")]
    for svg in drawn:
        assert svg.startswith("<svg role=") and "currentColor" in svg and "xmlns" not in svg and "#123457" not in svg
    assert 'aria-label="a &lt; b"' in drawn[1]
    names = [set(re.findall(r'\bid="([^"]*)"', svg)) for svg in drawn]
    assert names[0] and not names[0] & names[1]


def test_regions() -> None:
    assert [bucket(v, 2).label for v in (0, 1, 2, 3, 4, 5)] == ["0", "1", "2", "3–4", "3–4", "5–8"]  # noqa: RUF001
    step, prompt = Shape.decode(3, 300), Shape.prefill([(70, 0)])
    assert [phase(s) for s in (step, prompt, step.join(prompt))] == ["decode", "prefill", "hybrid"]
    assert load(step) < load(prompt) < load(step.join(prompt))
    assert split(Point(step, 4)).label == "4" and split(Point(step, 4, prompt, 8)).label == "4 | 8"
    grid = gather([(bucket(9, 4), bucket(1, 4)), (bucket(1, 4), bucket(1, 4)), (bucket(9, 4), bucket(1, 4))], [3, 5, 1])
    assert (grid.rows, grid.columns) == (["1", "5–16"], ["1"])  # noqa: RUF001
    assert grid.values.tolist() == [[5], [2]] and grid.counts.tolist() == [[1], [2]]


def judged(points: list[Point], seconds: list[float], held: Held | str, test: str) -> Judgement:
    measured = Measured.of([Sample(p, (s,)) for p, s in zip(points, seconds, strict=True)])
    return Judgement(measured, {OURS: {**dict.fromkeys(("solo", "corun", "scaling"), "not tested"), test: held}})


def test_the_slowdown_map_compares_with_the_forward_alone_on_the_same_units() -> None:
    step, prompt, other = Shape.decode(2, 100), Shape.prefill([(50, 0)]), Shape.decode(2, 200)
    points = [Point(step, 4), Point(step, 8), Point(step, 4, prompt, 8), Point(other, 4, Shape(), 8, Pressure("copy"))]
    nan = float("nan")
    held = Held(
        np.array([nan, nan, 3.3, 2.0]), np.full(4, nan), np.array([nan, nan, 2.2, 1.0]), np.array([-1, -1, 0, 1])
    )
    section = slowdowns(judged(points, [2.0, 1.0, 3.0, 1.7], held, "corun"))
    drawing, text = section.blocks
    assert isinstance(drawing, Drawing) and isinstance(text, Text)
    shown = re.findall(r">([\d.]+)×<", drawing.svg)  # noqa: RUF001
    assert sorted(shown) == sorted(
        ["1.50", "1.70", "1.50", "2.00"]
    )  # measured 3/2 and 1.7/1.0, predicted 3.3/2.2 and 2/1
    assert "Of 2 points, 1 have a measurement alone" in drawing.caption and ">copy<" in drawing.svg


def test_calibration_takes_quantiles_from_the_other_folds() -> None:
    """Both folds lie 10 % above their prediction, one of them with one repeat at 50 %."""
    points = [Point(Shape.decode(n, 100 * n), 1) for n in (1, 2)]
    samples = [Sample(points[0], (1.1, 1.1, 1.1, 1.1)), Sample(points[1], (1.1, 1.1, 1.1, 1.5))]
    held = Held(np.ones(2), np.full(2, 1.2), np.ones(2), np.array([0, 1]))
    measured = Measured.of(samples)
    assert calibration(measured, held, np.array([0.5, 0.99])).tolist() == [7 / 8, 7 / 8]
    judgement = Judgement(measured, {OURS: {"solo": held, "corun": "none there", "scaling": "no"}})
    section = bounds(judgement, 0.99, {"solo": 0.125, "corun": None})
    *_, whole, least = next(block.rows for block in section.blocks if isinstance(block, Table))
    assert least == ["the machine's noise alone, alone", "99 %", "12.5 %", ""]
    assert whole == ["all, alone", "87.5 %", f"{100 * np.mean(1.2 / np.array([1.1] * 7 + [1.5]) - 1):.3g} %", "8"]
    assert any(isinstance(block, Text) and "none there" in block.text for block in section.blocks)


def test_what_was_not_tested_is_said() -> None:
    points = [Point(Shape.decode(n, 100 * n), 1) for n in (1, 2)]
    judgement = judged(points, [1.0, 1.0], "too little of it", "solo")
    for section in (errors_by_phase(judgement), parity(judgement)):
        assert "too little of it" in Page("t", "s", [section]).html()


def test_a_machine_that_tells_nothing_and_repeats_nothing() -> None:
    samples = [Sample(Point(Shape.decode(1, 10), 1), (1.0,))]
    figures = {"solo": None, "corun": None, "anchors": {"solo": None, "corun": None}}
    read = check(Page("t", "s", [noise(samples, figures), conditions(samples)]).html())
    assert "no point was measured twice" in read.text and "No clocks" in read.text
