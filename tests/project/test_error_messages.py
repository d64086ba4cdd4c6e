"""The form of error messages: every one says what was expected, what moelink got, and what to do.

Three kinds of message have that form in three ways:

* ArgumentError and ConfigError carry ``name``, ``expected`` and ``got``; "expected" says what to pass.
* Errors whose classes build their message (PeerTimeoutError, CapacityError ...) are constructed here.
* All other moelink errors are raised with a text ``<where>: expected <what>, got <what>; <what to do>``. The texts are
  read from the syntax trees of the package, with ``{}`` where a value stands.
"""

import ast
import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import moelink
import moelink_bench
from moelink import errors
from moelink.integrations.transformers.checkpoint import CheckpointError

ROOTS = [Path(package.__file__).parent for package in (moelink, moelink_bench)]
NOT_WALKED = ("moelink_bench/contenders.py", "moelink_bench/peers.py", "moelink_bench/layer/contenders.py")
"""Their UnsupportedErrors say, in a table, why a column of a benchmark is empty."""

CLASSES = {
    name: value
    for name, value in {**vars(errors), "CheckpointError": CheckpointError}.items()
    if isinstance(value, type) and issubclass(value, errors.MoelinkError)
}
NAMED = ("ArgumentError", "ConfigError")
"""Called with (name, expected, got)."""
BUILT = ("ConfigMismatchError", "ClosedError", "CapacityError", "RoutingError", "PeerAbortedError", "PeerTimeoutError",
         "PeerLostError", "PeerLeftError", "ConcurrencyError", "ForkedError", "UndeliveredError",
         "NetworkTimeoutError", "ExpiredRowsError", "MembershipError", "RankMaskedError")  # fmt: skip
"""Their classes build the message."""

ACTIONS = (
    "admit", "allocate", "call", "change", "check", "choose", "close", "complete", "copy", "correct", "detach",
    "download", "enlarge", "give", "init", "install", "issue", "leave", "load", "lower", "make", "move", "number",
    "pass", "raise", "repeat", "run", "set", "start", "switch", "unset", "use", "write",
)  # fmt: skip
"""What to do begins with one of these verbs."""

VAGUE = ("a value", "something else", "wrong", "invalid", "bad", "nonsense", r"cannot be(?! \w+ed)")
"""Patterns of words that do not say what came, or what was expected."""


def problems(text: str) -> list[str]:
    """What is wrong with the message ``text`` of an error that carries no ``name``, ``expected`` and ``got``."""
    found = []
    said, semicolon, todo = text.rpartition("; ")
    if not semicolon:
        return ["it does not say what to do after a semicolon"]
    if not re.search(r"(^|[:,] |\b)expected \S.*, got \S", said):
        found.append("it does not say 'expected ..., got ...'")
    if todo.split()[0].rstrip("(),") not in ACTIONS:
        found.append(f"what to do begins with {todo.split()[0]!r}, which is no known verb")
    found += [f"it says {words!r}" for words in VAGUE if re.search(rf"\b{words}\b", text)]
    if text.endswith("."):
        found.append("it ends with a full stop")
    return found


def named_problems(name: str, expected: str, got: str) -> list[str]:
    """What is wrong with the parts of an ArgumentError or ConfigError."""
    found = []
    if not re.fullmatch(r"[a-z_{][\w.{}\[\]]*|[A-Z][A-Z_]*", name):
        found.append(f"name {name!r} is no name of an argument, a field or a variable of the environment")
    for part, text in (("expected", expected), ("got", got)):
        if not text.strip() or text != text.strip() or text.endswith("."):
            found.append(f"{part} is {text!r}")
        found += [f"{part} says {words!r}" for words in VAGUE if re.fullmatch(rf".*\b{words}\b.*", text)]
    if re.match(r"(expected|must|should|not|no)\b", expected):
        found.append(f"expected begins with {expected.split()[0]!r}: it says what to pass")
    return found


@dataclass(frozen=True)
class Raised:
    """One call of an error's class."""

    where: str
    name: str
    call: ast.Call
    constants: dict[str, str]

    @property
    def texts(self) -> list[str]:
        """The texts of its arguments by position."""
        return [text_of(arg, self.constants) for arg in self.call.args]


def text_of(node: ast.expr, constants: dict[str, str]) -> str:
    """The text of an expression, with ``{}`` for each value that is not in the tree."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part, constants) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return text_of(node.value, constants)
    return constants.get(node.id, "{}") if isinstance(node, ast.Name) else "{}"


def constants_of(tree: ast.Module) -> dict[str, str]:
    """Names that a file binds once, to a text."""
    bound: dict[str, list[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.setdefault(node.id, []).append("{}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if len(bound[name]) == 1:
                bound[name] = [text_of(node.value, {})]
    return {name: texts[0] for name, texts in bound.items() if len(texts) == 1 and texts[0] != "{}"}


@functools.cache
def all_calls() -> list[Raised]:
    """Every call in the packages of a function or class by its name."""
    found = []
    for path, part in ((path, path.relative_to(root.parent)) for root in ROOTS for path in sorted(root.rglob("*.py"))):
        if part.as_posix() in NOT_WALKED:
            continue
        tree = ast.parse(path.read_text(), str(path))
        constants = constants_of(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                found.append(Raised(f"{part}:{node.lineno}", node.func.id, node, constants))
    return found


def calls(names: Iterable[str]) -> list[Raised]:
    """Every call of a class of ``names`` in the package."""
    names = set(names)
    return [raised for raised in all_calls() if raised.name in names]


def written() -> list[Raised]:
    """The errors whose message stands where they are raised."""
    return [raised for raised in calls(CLASSES) if raised.name not in (*NAMED, *BUILT)]


WRAPPERS = {
    "rank {}: {}": "a CheckpointError of that rank",
    "{}: {}": "an error of the dispatcher, which Megatron-core builds anew from its message alone",
    "rank {} could not set up its memory: {}": "the error of that rank",
}
"""Messages that repeat another rank's, which has the form, and what they repeat."""


def test_the_walk_finds_the_errors_of_the_package() -> None:
    found = calls(CLASSES)
    assert len(found) > 200
    assert {raised.name for raised in found} == CLASSES.keys() - {"PeerError"}
    assert {raised.texts[0] for raised in written()} >= WRAPPERS.keys()


def test_refused_arguments_carry_name_expected_and_got() -> None:
    named = calls(NAMED)
    others = [raised.where for raised in named if len(raised.call.args) != 3 or raised.call.keywords]
    assert not others, "call the class with (name, expected, got)"
    found = {raised.where: named_problems(*raised.texts) for raised in named}
    assert not {where: what for where, what in found.items() if what}


def test_messages_say_what_was_expected_what_came_and_what_to_do() -> None:
    found = {}
    for raised in written():
        # Three messages put a refusal by another module in the middle, which the next test reads.
        text = re.sub(
            r"(is refused|stopped|malformed data in \{\}): \{\};", r"\1: expected {}, got {};", raised.texts[0]
        )
        if text not in WRAPPERS and problems(text):
            found[raised.where] = (text, problems(text))
    assert not found


def test_refusals_in_the_middle_of_a_message_have_its_form() -> None:
    bad_messages = calls({"BadMessageError"})
    assert len(bad_messages) >= 4
    for raised in bad_messages:
        assert len(raised.call.args) == 3, f"{raised.where}: (source, expected, got)"
        assert not named_problems("rows", *raised.texts[1:]), raised.where
    records = [
        raised for raised in calls({"ValueError"}) if raised.where.startswith(("moelink/memory/", "moelink/control/"))
    ]
    assert len(records) >= 10
    for raised in records:
        assert re.match(r"expected \S", raised.texts[0]), raised.where


def timeout(kind: type[errors.PeerTimeoutError], **fields: object) -> errors.PeerTimeoutError:
    """An error of rank 0 about rank 2 in call 5 of dispatch, but for ``fields``."""
    usual = dict(rank=0, peer=2, phase="dispatch", call=5, expected=5, got=4)
    return kind(**{**usual, **fields})  # type: ignore[arg-type]


EXAMPLES = {
    "ArgumentError": lambda: errors.ArgumentError("x", "shape [any, 32]", "[3, 31]"),
    "ConfigError": lambda: errors.ConfigError("topk", "an integer >= 1", 0),
    "ConfigMismatchError": lambda: errors.ConfigMismatchError("topk", {"2": [0, 2], "3": [1]}),
    "ClosedError": lambda: errors.ClosedError("dispatch"),
    "ConcurrencyError": lambda: errors.ConcurrencyError("dispatch"),
    "ForkedError": lambda: errors.ForkedError("dispatch", owner=7, child=8),
    "PeerLeftError": lambda: errors.PeerLeftError(rank=0, peer=1, phase="dispatch", call=5, interrupted=False),
    "PeerLeftError, interrupted": lambda: errors.PeerLeftError(
        rank=0, peer=1, phase="dispatch", call=5, interrupted=True
    ),
    "CapacityError": lambda: errors.CapacityError(0, 7, 3),
    "RoutingError": lambda: errors.RoutingError(0, 3, 6),
    "PeerAbortedError": lambda: errors.PeerAbortedError(rank=0, peer=1, phase="combine", call=4),
    "PeerTimeoutError": lambda: timeout(errors.PeerTimeoutError),
    "PeerTimeoutError, silent": lambda: timeout(errors.PeerTimeoutError, got=None, detail="reported by rank 1"),
    "PeerTimeoutError, itself": lambda: timeout(errors.PeerTimeoutError, peer=0),
    "PeerTimeoutError, unknown": lambda: timeout(errors.PeerTimeoutError, peer=-1, got=None),
    "PeerTimeoutError, init": lambda: timeout(errors.PeerTimeoutError, phase="init", call=0, expected=0, got=None),
    "PeerTimeoutError, recover": lambda: timeout(
        errors.PeerTimeoutError, phase="recover", call=0, expected=0, got=None, detail="it has not called recover"
    ),
    "PeerLostError": lambda: timeout(errors.PeerLostError, got=None, detail="its process is gone", node=1),
    "UndeliveredError": lambda: errors.UndeliveredError(rank=0, peer=1, phase="dispatch", call=5, expected=5, node=1),
    "MembershipError": lambda: errors.MembershipError(0, [1]),
    "RankMaskedError": lambda: errors.RankMaskedError(rank=0, by=1, phase="dispatch", call=5),
    "ExpiredRowsError": lambda: errors.ExpiredRowsError("recv.tokens", "a look at them before", "one after"),
    "NetworkTimeoutError": lambda: errors.NetworkTimeoutError("NVSHMEM's start", rank=0, node=0, seconds=60.0),
}


def test_every_class_that_builds_its_message_has_an_example() -> None:
    assert {name.split(",")[0] for name in EXAMPLES} == {*NAMED, *BUILT}


def test_classes_build_messages_of_the_form() -> None:
    for make in EXAMPLES.values():
        error = make()
        text = str(error)
        if isinstance(error, errors.ConfigError | errors.ArgumentError):
            where = error.name if isinstance(error, errors.ArgumentError) else error.field
            assert text.startswith(f"{where}: expected {error.expected}, got ")
            assert not named_problems(where, error.expected, str(error.got))
        elif isinstance(error, errors.ClosedError):  # what came is what it says
            assert re.fullmatch(r"dispatch: the communicator is closed; make .*", text)
        else:
            assert not problems(text), text
        if isinstance(error, errors.PeerError):
            assert text.startswith("rank 0: ")
            assert error.peer == -1 or f"rank {error.peer}" in text.removeprefix("rank 0: ")


def test_every_class_says_how_to_recover() -> None:
    for name, kind in CLASSES.items():
        text = kind.__doc__ or ""
        assert text, name
        if name not in ("MoelinkError", "StateError", "PeerError"):  # bases
            assert re.search(r"\b[Rr]ecover\b", text), f"{name} does not say how to recover"
        assert name == "CheckpointError" or name in (errors.__doc__ or ""), f"the tree in errors.py lacks {name}"


def test_the_rules_refuse() -> None:
    for text in (
        "rank 0: rank 1 sent counts or indices that cannot be, by call 3 of dispatch; they were ignored",
        "rank 0: rank 1 did not arrive in recover: expected it, got nothing (it came, and went while ranks met again)",
        "this torch has no NVSHMEM; use transport='collective'",
        "x: expected a tensor, got a value; pass a tensor",
        "x: expected a tensor, got None; tensors are needed",
        "x: expected a tensor, got None; pass a tensor.",
        "x: expected a tensor, got None",
    ):
        assert problems(text), text
    assert not problems("x: expected a tensor, got None; pass a tensor")


def test_the_rules_refuse_parts() -> None:
    for parts in (
        ("the input", "a tensor", "None"),
        ("x", "expected a tensor", "None"),
        ("x", "must be a tensor", "None"),
        ("x", "a tensor", "a value"),
        ("x", "", "None"),
        ("x", "a tensor.", "None"),
    ):
        assert named_problems(*parts), parts
    assert not named_problems("x", "a tensor", "None")
