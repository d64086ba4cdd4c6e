"""Choose few rows of switches in which every pair of values meets: a covering array with rules.

A fault in a program that depends on switches is most often one of a single value, or of two values that meet. All pairs
of fifteen switches fit in about thirty rows, where their product has millions.

Example: three switches of two values have eight rows, and four of them hold all twelve pairs::

    >>> rows = covering_rows({"a": (0, 1), "b": (0, 1), "c": (0, 1)})
    >>> len(rows) < 8, len(pairs_of(rows))
    (True, 12)

A rule is a function of some switches, by their names, that returns whether their values may meet::

    >>> def one_at_most(a, b): return not (a and b)
    >>> any(row["a"] and row["b"] for row in covering_rows({"a": (0, 1), "b": (0, 1)}, [one_at_most]))
    False

A pair that no row can have, because of one rule or of several together, is left out. Every other pair is in a row.
"""

from __future__ import annotations

import inspect
import itertools
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

Row = dict[str, Any]
Rule = Callable[..., bool]
Pair = tuple[int, int, int, int]
"""A switch and the number of its value, then another switch, of a higher number, and the number of its value; or the
same twice, as a value has to be in a row even if it need not meet any other."""


def covering_rows(
    switches: Mapping[str, Sequence[Any]],
    rules: Iterable[Rule] = (),
    *,
    meets: Mapping[str, Collection[str]] | None = None,
    wanted: Iterable[Row] = (),
    seed: int = 0,
    tries: int = 20,
) -> list[Row]:
    """Return rows, a value for each switch, that keep to ``rules`` and in which every possible pair of values meets.

    The same arguments give the same rows.

    Raises:
        ValueError: no row can have what is ``wanted``.

    Args:
        switches: the values of each.
        rules: which values may meet.
        meets: of a switch the others that its values have to meet, where these are not all.
        wanted: values of more than two switches that have to meet in a row, each as a part of a row.
        tries: candidates for each row, of which the one with most new pairs is taken; more of them make fewer rows.
    """
    array = _Array(switches, rules, meets or {}, seed)
    return [array.named(row) for row in [*array.rows_with(wanted), *array.rows(tries)]]


def needs(switch: str, value: Any, **others: Iterable[Any]) -> list[Rule]:
    """Return rules: ``switch`` has ``value`` only where each of ``others`` has one of these values.

    Each of them is over two switches. So a pair that cannot be is found at once, which a rule over many of them would
    find by trying out their values.
    """
    rules: list[Rule] = []
    for other, allowed in others.items():
        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in (switch, other)]
        rule = partial(_needs, switch, value, other, tuple(allowed))
        rule.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        rules.append(rule)
    return rules


def _needs(switch: str, value: Any, other: str, allowed: tuple[Any, ...], /, **has: Any) -> bool:
    return has[switch] != value or has[other] in allowed


def pairs_of(rows: Iterable[Row]) -> set[tuple[str, Any, str, Any]]:
    """Return the pairs of values that meet in ``rows``, whose switches are in one order."""
    return {(a, row[a], b, row[b]) for row in rows for a, b in itertools.combinations(row, 2)}


class _Array:
    """Switches and values by number, and the pairs that have not met."""

    def __init__(
        self,
        switches: Mapping[str, Sequence[Any]],
        rules: Iterable[Rule],
        meets: Mapping[str, Collection[str]],
        seed: int,
    ) -> None:
        self.names, self.values = list(switches), [list(values) for values in switches.values()]
        self.random = random.Random(seed)
        number = {name: index for index, name in enumerate(self.names)}
        self.rules = [(rule, [number[name] for name in inspect.signature(rule).parameters]) for rule in rules]
        self.rules_of: list[list[tuple[Rule, list[int]]]] = [
            [rule for rule in self.rules if index in rule[1]] for index in range(len(self.names))
        ]
        self.weights = [max((len(over) for _, over in rules), default=0) for rules in self.rules_of]
        self.missing: dict[Pair, None] = {  # a dict, because the order of a set is not the same in every process
            (i, a, j, b): None
            for (i, name), (j, other) in itertools.combinations_with_replacement(enumerate(self.names), 2)
            if i == j or (other in meets.get(name, (other,)) and name in meets.get(other, (name,)))
            for a in range(len(self.values[i]))
            for b in range(len(self.values[j]))
            if i != j or a == b
        }

    def named(self, row: Sequence[int]) -> Row:
        return {name: self.values[index][row[index]] for index, name in enumerate(self.names)}

    def rows_with(self, wanted: Iterable[Row]) -> Iterator[list[int]]:
        """Yield a row for each of ``wanted`` that no earlier one has."""
        done: list[list[int]] = []
        for part in wanted:
            number = {
                index: self.values[index].index(part[name]) for index, name in enumerate(self.names) if name in part
            }
            if any(all(row[index] == value for index, value in number.items()) for row in done):
                continue
            begun = [number.get(index) for index in range(len(self.names))]
            row = self._complete(begun) if all(self._allowed(begun, index) for index in number) else None
            if row is None:
                raise ValueError(f"wanted: expected values that the rules let meet, got {part}")
            for pair in self._new_pairs(row):
                del self.missing[pair]
            done.append(row)
            yield row

    def rows(self, tries: int) -> Iterator[list[int]]:
        """Yield rows until no possible pair is missing."""
        while self.missing:
            best: list[int] = []
            most = 0
            for _ in range(tries):
                row = self._row_with(self.random.choice(list(self.missing)))
                gain = 0 if row is None else len(self._new_pairs(row))
                if row is not None and gain > most:
                    best, most = row, gain
                if not self.missing:
                    break
            for pair in self._new_pairs(best) if best else ():
                del self.missing[pair]
            if best:
                yield best

    def _new_pairs(self, row: Sequence[int]) -> list[Pair]:
        pairs = ((i, row[i], j, row[j]) for i, j in itertools.combinations_with_replacement(range(len(row)), 2))
        return [pair for pair in pairs if pair in self.missing]

    def _row_with(self, pair: Pair) -> list[int] | None:
        """Return a row that has ``pair``; None if there is none, and then the pair is no longer missing."""
        row: list[int | None] = [None] * len(self.names)
        i, a, j, b = pair
        row[i], row[j] = a, b
        done = self._complete(row) if self._allowed(row, i) and self._allowed(row, j) else None
        if done is None:
            self.missing.pop(pair, None)
        return done

    def _complete(self, row: list[int | None]) -> list[int] | None:
        """Give the other switches values, each the one that makes most pairs meet, and go back where rules forbid all.

        Switches of the largest rules come first, so that a dead end is found before values of switches that have
        nothing to do with it.
        """
        free = [index for index, value in enumerate(row) if value is None]
        if not free:
            return [value for value in row if value is not None]
        largest = max(self.weights[index] for index in free)
        index = self.random.choice([index for index in free if self.weights[index] == largest])
        order = list(range(len(self.values[index])))
        self.random.shuffle(order)
        for value in sorted(order, key=lambda value: -self._gain(row, index, value)):
            row[index] = value
            if self._allowed(row, index) and (done := self._complete(row)) is not None:
                return done
        row[index] = None
        return None

    def _gain(self, row: Sequence[int | None], index: int, value: int) -> int:
        """Count the missing pairs of ``value`` and the values that ``row`` has."""
        return ((index, value, index, value) in self.missing) + sum(
            ((k, other, index, value) if k < index else (index, value, k, other)) in self.missing
            for k, other in enumerate(row)
            if other is not None and k != index
        )

    def _allowed(self, row: Sequence[int | None], index: int) -> bool:
        """Return whether no rule of the switch ``index`` forbids ``row``, and a rule with one switch left leaves it a
        value."""
        for rule, over in self.rules_of[index]:
            left = [k for k in over if row[k] is None]
            if len(left) > 1:
                continue
            known = {self.names[k]: self.values[k][value] for k in over if (value := row[k]) is not None}
            if not left:
                if not rule(**known):
                    return False
                continue
            name = self.names[left[0]]
            if not any(rule(**known, **{name: value}) for value in self.values[left[0]]):
                return False
        return True
