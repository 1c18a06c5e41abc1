# SPDX-License-Identifier: Apache-2.0
"""Mutants of Python sources: one place in a file's syntax tree changed, the text around it kept.

Comparisons get another operator, `and` becomes `or`, `not` is dropped, numbers are incremented,
conditions that are names or calls are negated, statements are removed, and the first two arguments
of a call are swapped. Strings are kept (most are messages), and so are log calls and
`assert_never()`.
"""

import ast
from collections.abc import Iterator
from typing import NamedTuple

OTHER = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
"""The replacements of each comparison."""

OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}


class PythonMutant(NamedTuple):
    """A file below the root, a place in it (line from 1, and byte offsets), the text there, and the
    mutant's text.
    """

    file: str
    line: int
    start: int
    end: int
    old: str
    new: str

    @property
    def name(self) -> str:
        """A readable name, in one line."""
        return f"{self.file}:{self.line}: {_short(self.old)} -> {_short(self.new)}"

    def applied(self, source: str) -> str:
        """The text of the file with the mutant."""
        raw = source.encode()
        assert raw[self.start : self.end].decode() == self.old, self.name
        return (raw[: self.start] + self.new.encode() + raw[self.end :]).decode()


def _short(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= 80 else f"{words[:38]} ... {words[-37:]}"


def mutants(file: str, source: str) -> list[PythonMutant]:
    """All mutants of a file, in the order of its text."""
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found: dict[tuple[int, int, str], PythonMutant] = {}
    for node, new in _changes(ast.parse(source), in_annotation=False):
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        old = source.encode()[start:end].decode()
        text = new if isinstance(new, str) else f"({ast.unparse(new)})"
        found[start, end, text] = PythonMutant(file, node.lineno, start, end, old, text)
    return sorted(found.values(), key=lambda mutant: (mutant.start, mutant.end, mutant.new))


Place = ast.expr | ast.stmt
Change = tuple[Place, ast.expr | str]


def _changes(node: ast.AST, in_annotation: bool) -> Iterator[Change]:
    if isinstance(node, ast.stmt) and (_is_kept(node) or _is_for_types(node)):
        return
    if not in_annotation:
        for kind, change in CHANGES:
            if isinstance(node, kind):
                yield from change(node)
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _changes(child, in_annotation or name in {"annotation", "returns"})


def _is_kept(node: ast.stmt) -> bool:
    call = node.value if isinstance(node, ast.Expr) else None
    name = ast.unparse(call.func) if isinstance(call, ast.Call) else ""
    return name.startswith("log.") or name == "assert_never"  # mypy checks assert_never()


def _is_for_types(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def _comparison(node: ast.Compare) -> Iterator[Change]:
    for i, operator in enumerate(node.ops):
        for other in OTHER[type(operator)]:
            ops = [*node.ops[:i], other(), *node.ops[i + 1 :]]
            yield node, ast.Compare(node.left, ops, node.comparators)


def _boolean(node: ast.BoolOp) -> Iterator[Change]:
    yield node, ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)


def _negation(node: ast.UnaryOp) -> Iterator[Change]:
    if isinstance(node.op, ast.Not):
        yield node, node.operand


def _number(node: ast.Constant) -> Iterator[Change]:
    if isinstance(node.value, bool):
        yield node, str(not node.value)
    elif isinstance(node.value, int | float):
        yield node, repr(node.value + 1)


def _operation(node: ast.BinOp) -> Iterator[Change]:
    text = (ast.JoinedStr, ast.List, ast.Tuple)
    sides = (node.left, node.right)
    if any(isinstance(s, text) or isinstance(getattr(s, "value", None), str) for s in sides):
        return  # subtracting texts or tuples is only an error
    if type(node.op) in OPERATORS:
        yield node, ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)


def _condition(node: ast.If | ast.While | ast.IfExp) -> Iterator[Change]:
    if isinstance(node.test, ast.Name | ast.Attribute | ast.Call):
        yield node.test, ast.UnaryOp(ast.Not(), node.test)


def _filter(node: ast.comprehension) -> Iterator[Change]:
    for test in node.ifs:
        yield test, "True"


def _statement(node: ast.stmt) -> Iterator[Change]:
    match node:
        case ast.Expr(value=ast.Call() | ast.Yield() | ast.YieldFrom()):
            yield node, "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
            yield node, "pass"
        case ast.AugAssign() | ast.Delete() | ast.Raise() | ast.Continue() | ast.Break():
            yield node, "pass"


def _call(node: ast.Call) -> Iterator[Change]:
    match node.args:
        case [first, second, *more] if not isinstance(first, ast.Starred) and not isinstance(second, ast.Starred):
            if ast.dump(first) != ast.dump(second):
                yield node, ast.Call(node.func, [second, first, *more], node.keywords)


CHANGES = (
    (ast.Compare, _comparison),
    (ast.BoolOp, _boolean),
    (ast.UnaryOp, _negation),
    (ast.Constant, _number),
    (ast.BinOp, _operation),
    ((ast.If, ast.While, ast.IfExp), _condition),
    (ast.comprehension, _filter),
    (ast.stmt, _statement),
    (ast.Call, _call),
)
