"""Every mutant is a module of its own that Python takes."""

import ast
from pathlib import Path

import pytest
from mutants import mutants
from mutate import EQUIVALENT, SUITES, equivalents

PARTITION = Path(__file__).resolve().parents[2] / "smpart" / "partition"


@pytest.mark.parametrize("name", ["cuda/events", "cuda/timeline"])
def test_mutants_differ_from_the_module_and_from_each_other(name: str) -> None:
    source = (PARTITION / f"{name}.py").read_text()
    made = list(mutants(source))
    trees = {ast.dump(ast.parse(mutant.write())) for mutant in made}
    assert len(made) > 20 and ast.dump(ast.parse(source)) not in trees
    assert len(trees) > 0.9 * len(made)  # two ways may lead to one mistake
    assert len({(mutant.first, mutant.line, mutant.change) for mutant in made}) == len(made)


def test_every_mutant_that_is_let_live_exists_and_has_a_reason() -> None:
    assert EQUIVALENT.is_file()
    for name in SUITES:
        entries = equivalents(name)
        made = {(mutant.line, mutant.change) for mutant in mutants((PARTITION / f"{name}.py").read_text())}
        assert {(each["line"], each["change"]) for each in entries} <= made
        assert all(each["reason"] for each in entries)
