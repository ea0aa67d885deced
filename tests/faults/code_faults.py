"""Plausible small faults in the package's own code: found in any module by its syntax, and written by hand."""

import ast
import copy
import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
SUMS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult
}  # fmt: skip
HARMLESS = {"init", "repr", "compare", "strict", "keepdim", "default", "frozen", "slots", "kw_only", "eq"}
"""Keywords whose other value is no fault that anyone could see, or is one of types."""
LARGEST = 2
"""Numbers up to it count or point to something; greater ones are settings, of which another would do as well."""
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class CodeFault:
    """One place of a module, changed.

    Attributes:
        module: path below the package's folder.
        function: qualified name of the function around it; empty where the module's own body is changed.
        kind: of the change.
        start, end: of the changed text, in characters.
        before, after: the text itself.
        line: the whole first line of it, stripped.
    """

    module: str
    function: str
    kind: str
    start: int
    end: int
    before: str
    after: str
    line: str

    def put_into(self, source: str) -> str:
        return source[: self.start] + self.after + source[self.end :]

    def key(self, source: str) -> str:
        """The same for the same fault in the same text of a module."""
        told = f"{self.module}\0{self.start}\0{self.before}\0{self.after}\0{source}"
        return hashlib.sha256(told.encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return f"{self.module} {self.function or 'module'}: `{self.line}`: {self.before!r} -> {self.after!r}"


def faults_in(module: str, source: str) -> list[CodeFault]:
    """Every fault that the module's syntax offers, in the order of its text."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    lines = source.splitlines()

    def place(line: int, column: int) -> int:
        """An offset in characters; columns of `ast` are bytes."""
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    faults = []
    for function, node, kind, after in _changes(ast.parse(source), ()):
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start, end = place(node.lineno, node.col_offset), place(node.end_lineno, node.end_col_offset)
        text = source[start:end]
        faults.append(CodeFault(module, function, kind, start, end, text, after, lines[node.lineno - 1].strip()))
    return sorted(faults, key=lambda fault: (fault.start, fault.after))


def some_of(faults: list[CodeFault], count: int, draw: random.Random) -> list[CodeFault]:
    """At most ``count`` faults, in different functions as long as there are any."""
    left, chosen = draw.sample(faults, len(faults)), []
    while left and len(chosen) < count:
        met: set[str] = set()
        for fault in list(left):
            if fault.function not in met and len(chosen) < count:
                met.add(fault.function)
                chosen.append(fault)
                left.remove(fault)
    return chosen


Change = tuple[str, ast.expr | ast.stmt, str, str]
"""The function around it, the node that is replaced, the kind, and what stands there instead."""


def _changes(node: ast.AST, within: tuple[str, ...]) -> Iterator[Change]:
    """Changes of what is in functions below this node.

    Annotations, docstrings, messages and f-strings stay as they are, and so do constants and defaults outside of
    functions: others would do as well.
    """
    function = ".".join(within)
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list") or isinstance(node, (ast.JoinedStr, ast.Raise)):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or _stays(child) or _is_digits(node, child):
                continue
            inner = within
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                inner = (*within, child.name, "<locals>")
            elif isinstance(child, ast.ClassDef):
                inner = (*within, child.name)
            if isinstance(child, (ast.expr, ast.stmt)) and function.endswith(".<locals>"):
                name = function.removesuffix(".<locals>")
                yield from ((name, place, kind, text) for place, kind, text in _changed(child))
            yield from _changes(child, inner)


def _stays(node: ast.AST) -> bool:
    match node:
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.Assign(targets=[ast.Name(id=name)]):
            return name == "__all__"
        case ast.keyword(arg=str(name)):
            return name in HARMLESS
        case ast.ClassDef(bases=bases):
            return any(isinstance(base, ast.Name) and base.id == "Protocol" for base in bases)
    return False


def _is_digits(node: ast.AST, child: ast.AST) -> bool:
    """Whether a child says to how many digits numbers are rounded that are shown: others would do as well."""
    match node:
        case ast.Call(func=ast.Name(id="round"), args=[_, digits]):
            return child is digits
    return False


def _changed(node: ast.expr | ast.stmt) -> Iterator[tuple[ast.expr | ast.stmt, str, str]]:
    match node:
        case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
            yield node, "comparison", _with(node, ops=[COMPARISONS[type(op)]()])
        case ast.BinOp(op=op) if type(op) in SUMS and not _is_text(node):
            yield node, "sum", _with(node, op=SUMS[type(op)]())
        case ast.BoolOp(op=op):
            yield node, "and or", _with(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node, "not", f"({ast.unparse(operand)})"
        case ast.Constant(value=int(number)) if not isinstance(number, bool) and number <= LARGEST:
            yield node, "number", f"({number + 1})"
        case ast.Constant(value=bool(flag)):
            yield node, "flag", str(not flag)
        case ast.Call(func=ast.Name(id=name) as called) if name in CALLS:
            yield called, "call", CALLS[name]
        case ast.IfExp(test=test, body=body, orelse=other):
            yield node, "branches", f"({ast.unparse(ast.IfExp(test, other, body))})"
        case ast.If(test=test):
            yield test, "condition", f"(not ({ast.unparse(test)}))"
        case ast.Subscript(slice=ast.Slice(lower=lower, upper=upper, step=None)):
            if lower is not None:
                yield lower, "slice", f"({ast.unparse(lower)}) + 1"
            if upper is not None:
                yield upper, "slice", f"({ast.unparse(upper)}) - 1"
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Delete():
            yield node, "statement", "pass"


def _with(node: ast.expr, **fields: object) -> str:
    other = copy.copy(node)
    for name, value in fields.items():
        setattr(other, name, value)
    return f"({ast.unparse(other)})"


def _is_text(node: ast.BinOp) -> bool:
    """Whether it joins strings: such a fault is a TypeError at once."""
    ends = (node.left, node.right)
    return any(isinstance(end, ast.JoinedStr) or (isinstance(end, ast.Constant) and isinstance(end.value, str))
               for end in ends)  # fmt: skip


def known_faults(package: Path) -> tuple[list[CodeFault], list[str]]:
    """The faults of `KNOWN`, wherever in the package their text stands, and a line for each whose text is gone."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(package.rglob("*.py"))}
    faults, gone = [], []
    for before, after in KNOWN:
        places = [(path, text) for path, text in texts.items() if before in text]
        if len(places) != 1 or places[0][1].count(before) != 1:
            gone.append(f"stands {sum(text.count(before) for _, text in places)} times in the package: {before!r}")
            continue
        path, source = places[0]
        start = source.index(before)
        line = source[source.rfind("\n", 0, start) + 1 :].partition("\n")[0].strip()
        module, function = str(path.relative_to(package)), _function_at(source, source.count("\n", 0, start) + 1)
        faults.append(CodeFault(module, function, "known", start, start + len(before), before, after, line))
    return faults, gone


def _function_at(source: str, line: int) -> str:
    def below(node: ast.AST, within: tuple[str, ...]) -> str:
        name = ".".join(within[:-1]) if within and within[-1] == "<locals>" else ""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                inner = (child.name,) if isinstance(child, ast.ClassDef) else (child.name, "<locals>")
                if child.lineno <= line <= (child.end_lineno or 0):
                    return below(child, (*within, *inner))
        return name

    return below(ast.parse(source), ())


KNOWN: tuple[tuple[str, str], ...] = (
    ("        del self._text[self.length :]\n", "        del self._text[length:]\n"),
    ("self._target is None or self._target.forms != forms", "self._target is None"),
    ("next_rank <= rank and rank >= 0", "next_rank < rank and rank >= 0"),
    ("        if 0 <= needed < begin:\n            left = min(left, needed)\n", ""),
    ("(resampled[:, [best]] - resampled).std(axis=0)", "resampled.std(axis=0)"),
    ("resampled.max(axis=1) - errors[chosen]", "resampled.max(axis=1)"),
    ("score(setting, traces, reported_on, costs)", "score(setting, traces, chosen_on, costs)"),
    ('self.head_ms[name] - self.signal_ms.get("accept_prob", 0.0)', "self.head_ms[name]"),
    ('> 1 else float("inf")\n    return found if found == found else float("inf")', "> 1 else 0.0\n    return found"),
    ("one.heard = monotonic()", "pass"),
    ("self.failures, self.careful = 0, max(0, self.careful - 1)", "self.careful = max(0, self.careful - 1)"),
    ("trace.prompt_tokens + len(trace.tokens) / 2 for trace in traces", "trace.prompt_tokens for trace in traces"),
    ("[list(word) for word in words if all(", "[list(word) for word in words if any("),
    ("seen < len(text) - 2", "seen < len(text) - 3"),
    ("end = drafted + 1 + AHEAD", "end = drafted + AHEAD"),
    ("before.searchsorted(part)", 'before.searchsorted(part, side="right")'),
)
EQUIVALENT: tuple[tuple[str, str], ...] = (
    ("while start < len(piece):", "(start <= len(piece))"),  # an empty rest is no piece
    ('seen: "torch.Tensor", *, hidden: bool = False', "True"),  # who calls it says so, or it is an interface
    ("self._seen = np.ones((1, 1), dtype=bool)", "(2)"),  # only its first place is read before it is another one
    ("[n / (n + 2) for n in range(LONGEST_RATED + 1)]", "(2)"),  # the last one is never asked for
    ("ends = range(min(len(piece), start + self._longest), start, -1)", "max"),  # no longer piece is a token
    ("self._told = 0  # rounds of the rest", "(1)"),  # the first row that rests sets it
    ("earlier: int = 0) -> None:", "(1)"),  # room for one token holds no answer
    ("_crossed(draft_length=(2, 5, 8),", "(3)"),  # which values are tried is a choice
    ("runner.extend(pending, keep=0)", "(1)"),  # a row of logits more, which nobody looks at
    ("any(any(layer.is_recurrent_states_initialized.values()) for layer in layers)", "all"),  # layers are alike
    ("written[: length + 1]) for length in range(len(written))", "(2)"),  # what is told stays so with more
    ('name="signs of life", daemon=True', "False"),  # the process ends without waiting for threads
    # Two speeds that were measured are never the same.
    ("if fastest <= found.oracle", "(fastest < found.oracle.score.tokens_per_second * 1.005)"),
)
"""Faults that change nothing anyone could see: part of the line, and what stands there instead."""
