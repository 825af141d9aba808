"""`kdtr diff --rule "*.router_logits:atol=1e-4"`: a rule for tensors as one text, or as a table of [tool.kdtr]."""

from collections.abc import Mapping
from typing import Any

import click

from kdtr_cli.errors import InputError
from kdtr_cli.parity.tolerances import TensorRule

__all__ = ["TensorRuleType"]

_BOUNDS = {"atol": float, "rtol": float, "max_ulp": int}


class TensorRuleType(click.ParamType):
    """PATTERN:BOUND=VALUE[,BOUND=VALUE]; the pattern is all before the last colon."""

    name = "rule"
    #: What a list of such tables is called in a file: [[tool.kdtr.diff.rules]].
    table_key = "rules"

    def text_of(self, table: Mapping[str, Any]) -> str:
        """One table as the text that a person would have typed. ValueError: what is wrong with it."""
        keys = {key.replace("-", "_"): value for key, value in table.items()}
        if len(keys) < len(table):
            raise ValueError("it sets one bound twice")
        for key in keys:
            if key != "tensor" and key not in _BOUNDS:
                raise ValueError(f"it has the key {key!r}; a rule has tensor, {', '.join(_BOUNDS)}")
        pattern = keys.pop("tensor", None)
        if not isinstance(pattern, str):
            raise ValueError("tensor must be a string, the pattern of a name")
        for key, value in keys.items():
            whole = _BOUNDS[key] is int
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
                raise ValueError(f"{key} must be a {'whole ' if whole else ''}number")
        return pattern + ":" + ",".join(f"{key}={value!r}" for key, value in keys.items())

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> TensorRule:
        if isinstance(value, TensorRule):
            return value
        pattern, colon, bounds = value.rpartition(":")
        if not colon:
            self.fail(f"{value!r}: PATTERN:atol=X[,rtol=X,max_ulp=N]", param, ctx)
        found: dict[str, Any] = {}
        for part in bounds.split(",") if bounds.strip() else ():
            name, _, number = part.strip().partition("=")
            name = name.replace("-", "_")
            if name not in _BOUNDS or name in found:
                why = "stands twice" if name in found else f"is none of {', '.join(_BOUNDS)}"
                self.fail(f"{value!r}: {name!r} {why}", param, ctx)
            try:
                found[name] = _BOUNDS[name](number)
            except ValueError:
                kind = "a whole number" if _BOUNDS[name] is int else "a number"
                self.fail(f"{value!r}: {name} is {number!r}, not {kind}", param, ctx)
        try:
            return TensorRule(pattern.strip(), **found)
        except InputError as error:
            self.fail(str(error), param, ctx)
