"""Small mistakes made in a module on purpose, one at a time: what a suite that does its work must notice."""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift,
    ast.RShift: ast.LShift, ast.Pow: ast.Mult,
}  # fmt: skip
_MEMBERS = {"PREFILL": "DECODE", "DECODE": "PREFILL", "start": "end", "end": "start"}
"""Names of attributes that stand in pairs."""

_ORDER = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)

_ANY_ORDER = ("max", "min")
"""Functions that make nothing of the order of their arguments."""

_QUIET = ("logger.info", "logger.debug")
"""Calls that tell of progress: no behaviour."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A module with one mistake in it.

    Attributes:
        first, last: the lines of the statement that was changed, in the original.
        line: the changed line of the original, without its indentation.
        change: what became of what; numbered where one line has the same change twice.
        everywhere: it is run when the module is imported, so that no single test can be named that runs it.
        write: gives the text of the broken module.
    """

    first: int
    last: int
    line: str
    change: str
    everywhere: bool
    write: Callable[[], str] = field(repr=False, compare=False)


def mutants(source: str) -> Iterator[Mutant]:
    """Every mutant of a module.

    >>> [mutant.change for mutant in mutants("def larger(a, b):\\n    return a if a > b else b\\n")]
    ['return a if a > b else b -> return None', 'a > b -> True', 'a > b -> False', 'a > b -> a >= b']
    """
    tree = ast.parse(source)
    lines = source.splitlines()
    stored = Counter(
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )
    once = frozenset(name for name, count in stored.items() if count == 1)
    seen: Counter[tuple[int, str]] = Counter()
    for place in _places(tree, None, inside=False):
        for new in _mistakes(place.node, place.condition, once):
            line, change = place.node.lineno, f"{_short(place.node)} -> {_short(new) if new else 'nothing'}"
            seen[line, change] += 1
            if (count := seen[line, change]) > 1:
                change += f" ({count})"
            first, last = place.statement.lineno, _last_line(place.statement, place.node)
            yield Mutant(
                first, last, lines[line - 1].strip(), change, not place.inside, partial(_write, tree, place, new)
            )


def _write(tree: ast.Module, place: _Place, new: Any) -> str:
    place.put(new or ast.Pass())
    text = ast.unparse(tree)
    place.put(place.node)
    return text


@dataclass(frozen=True, slots=True)
class _Place:
    node: Any
    put: Callable[[Any], None]
    statement: ast.stmt
    inside: bool
    condition: bool


_SEEN = ast.stmt, ast.expr, ast.ExceptHandler
_PASSED = *_SEEN, ast.arguments, ast.keyword, ast.withitem, ast.comprehension
_UNSEEN = "annotation", "returns", "decorator_list", "bases", "ctx"


def _places(parent: ast.AST, statement: ast.stmt | None, *, inside: bool) -> Iterator[_Place]:
    """Every statement and expression below a node; `inside` a function or not."""
    for name, value in ast.iter_fields(parent):
        within = inside or (name == "body" and isinstance(parent, ast.FunctionDef | ast.Lambda))
        condition = name == "test" and isinstance(parent, ast.If | ast.IfExp)
        for index, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
            text = isinstance(parent, ast.JoinedStr) and isinstance(node, ast.Constant)
            if name in _UNSEEN or not isinstance(node, _PASSED) or text or _is_left_alone(node):
                continue
            here = node if isinstance(node, ast.stmt) else statement
            if isinstance(node, _SEEN) and here is not None:
                yield _Place(node, _setter(parent, name, index), here, within, condition)
            yield from _places(node, here, inside=within)


def _is_left_alone(node: ast.AST) -> bool:
    match node:
        case ast.Expr(value=ast.Constant()):  # a docstring
            return True
        case ast.Expr(value=ast.Call(func=function)):
            return ast.unparse(function) in _QUIET
        case ast.Import() | ast.ImportFrom():
            return True
        case ast.Assign(targets=[ast.Name(id="logger" | "__all__")]):
            return True
    return False


def _setter(parent: ast.AST, name: str, index: int | None) -> Callable[[Any], None]:
    if index is None:
        return lambda new: setattr(parent, name, new)
    return lambda new: getattr(parent, name).__setitem__(index, new)


def _last_line(statement: ast.stmt, node: ast.AST) -> int:
    """Of a compound statement only its header counts: its body is run by fewer tests."""
    body = getattr(statement, "body", None)
    if isinstance(body, list) and body and node is not statement:
        return max(statement.lineno, body[0].lineno - 1)
    return statement.end_lineno or statement.lineno


def _short(node: Any) -> str:
    text = " ".join(ast.unparse(node).split()) if not isinstance(node, list) else "; ".join(map(_short, node))
    return text if len(text) <= 100 else f"{text[:80]} ... {text[-15:]}"


def _with(node: Any, **fields: Any) -> Any:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _is_fixed(argument: ast.expr) -> bool:
    """The name of a call, say: in another place it would mean nothing."""
    return isinstance(argument, ast.Starred) or (isinstance(argument, ast.Constant) and isinstance(argument.value, str))


def _mistakes(node: Any, condition: bool, once: frozenset[str]) -> Iterator[Any]:
    """What a node is replaced by; None: nothing. Mistakes that any run would stumble over are left out."""
    match node:
        case ast.Assign(targets=[ast.Name(id=name)]) if name in once:  # without it the name is unknown
            return
        case ast.Constant() if condition:
            return
    if condition:
        yield from (ast.Constant(True), ast.Constant(False))
        if isinstance(node, ast.UnaryOp) or (isinstance(node, ast.Compare) and not isinstance(node.ops[0], _ORDER)):
            return  # its negation is worse than one of those
    yield from _in_statement(node) if isinstance(node, ast.stmt | ast.ExceptHandler) else _in_expression(node)


def _in_statement(node: Any) -> Iterator[Any]:
    match node:
        case ast.Assign() | ast.AugAssign() | ast.Expr() | ast.Raise() | ast.Delete() | ast.Break() | ast.Continue():
            yield None
        case ast.AnnAssign(value=ast.expr()):
            yield None
        case ast.Return(value=None):
            yield None
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield _with(node, value=ast.Constant(None))
        case ast.With(items=items, body=body):
            for item in items:
                if item.optional_vars is None:
                    others = [other for other in items if other is not item]
                    yield _with(node, items=others) if others else ast.If(ast.Constant(True), body, [])
        case ast.Try(body=body, orelse=orelse, finalbody=finalbody):
            if finalbody:
                yield _with(node, finalbody=[ast.Pass()])
            for handler in node.handlers:
                others = [other for other in node.handlers if other is not handler]
                if others or finalbody:
                    yield _with(node, handlers=others)
                else:
                    yield ast.If(ast.Constant(True), [*body, *orelse], [])
        case ast.ExceptHandler(body=[ast.Raise(exc=None)]):
            yield _with(node, body=[ast.Pass()])
        case ast.For():
            yield _with(node, iter=ast.List([], ast.Load()))


def _in_expression(node: Any) -> Iterator[Any]:
    match node:
        case ast.Compare(ops=[op]) if type(op) in _COMPARED:
            yield _with(node, ops=[_COMPARED[type(op)]()])
        case ast.BinOp(op=op) if type(op) in _COMPUTED:
            yield _with(node, op=_COMPUTED[type(op)]())
        case ast.BoolOp(op=op, values=values):
            yield _with(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())
            yield from (_with(node, values=[v for v in values if v is not left]) for left in values if len(values) > 2)
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield operand
        case ast.Constant(value=bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            yield ast.Constant(value + 1)
        case ast.Constant(value=str() as value):
            yield ast.Constant(f"XX{value}")
        case ast.Attribute(attr=name) if name in _MEMBERS:
            yield _with(node, attr=_MEMBERS[name])
        case ast.Call(args=args, keywords=keywords):
            for at, (one, other) in enumerate(pairwise(args)) if ast.unparse(node.func) not in _ANY_ORDER else ():
                if not (_is_fixed(one) or _is_fixed(other) or ast.dump(one) == ast.dump(other)):
                    yield _with(node, args=[*args[:at], other, one, *args[at + 2 :]])
            yield from (_with(node, keywords=[k for k in keywords if k is not gone]) for gone in keywords)
        case ast.ListComp(generators=[only]) | ast.SetComp(generators=[only]) | ast.GeneratorExp(generators=[only]):
            for gone in only.ifs:
                kept = _with(only, ifs=[test for test in only.ifs if test is not gone])
                yield _with(node, generators=[kept])
