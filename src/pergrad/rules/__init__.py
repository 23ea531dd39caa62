"""The rules, one file each. A rule turns the equation that ends a parameter's gradient into a term.

``RULES[primitive](scope, eqn)`` gives the term, or None where the rule does not apply; `register` puts
it there, on the line below the rule's definition.
"""

from collections.abc import Callable
from typing import Any

RULES: dict[str, Callable[..., Any]] = {}


def register(*primitives: str) -> Callable[[Callable], Callable]:
    """Make a function the rule for equations of these primitives."""

    def add(rule):
        for primitive in primitives:
            RULES[primitive] = rule
        return rule

    return add


from . import conv, dense, embedding, reduction  # noqa: E402, F401  (they register themselves)
