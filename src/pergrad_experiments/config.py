"""What a run is: everything that is needed to run it again."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from typing import Any

from .errors import BadInput, unknown

FORMAT = 1
SCHEDULES = ("constant", "cosine", "linear")


@dataclasses.dataclass(frozen=True)
class Config:
    """The content of `config.json`; `tasks.configure` makes one, with a preset's values for what is not given."""

    task: str
    optimizer: str
    preset: str
    seed: int
    steps: int
    batch_size: int
    learning_rate: float
    schedule: str = "constant"  # after the warm-up; "cosine" and "linear" go to zero
    warmup: int = 0
    clip_norm: float | None = None
    microbatch_size: int | None = None
    eval_every: int = 100
    stats_every: int = 50
    checkpoint_every: int = 100
    task_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    optimizer_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    format: int = FORMAT

    def __post_init__(self):
        for name, least in (("steps", 1), ("batch_size", 1), ("warmup", 0), ("seed", 0)):
            if getattr(self, name) < least:
                raise BadInput(f"{name} is {getattr(self, name)}: expected at least {least}.")
        if self.seed >= 2**32:
            raise BadInput(f"seed is {self.seed}: expected a number below 2^32.")
        for name in ("eval_every", "stats_every", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} is {getattr(self, name)}: expected a number of steps, at least 1.")
        if not 0 <= self.learning_rate < math.inf:
            raise BadInput(f"learning_rate is {self.learning_rate}: expected a number that is not negative.")
        if self.clip_norm is not None and not 0 < self.clip_norm < math.inf:
            raise BadInput(f"clip_norm is {self.clip_norm}: expected a positive number, or to leave it out.")
        if self.microbatch_size is not None and self.microbatch_size < 1:
            raise BadInput(
                f"microbatch_size is {self.microbatch_size}: expected a positive number, or to leave it out."
            )
        if self.schedule not in SCHEDULES:
            raise unknown("schedule", self.schedule, SCHEDULES)

    def to_json(self) -> dict[str, Any]:
        first = {"format": self.format}
        return first | dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Any, where: str) -> Config:
        """A configuration out of a file, which may be anyone's: checked, field by field."""
        if not isinstance(data, dict):
            raise BadInput(f"{where} holds {type(data).__name__}; expected the configuration of a run.")
        if data.get("format") != FORMAT:
            raise BadInput(
                f"{where} is of format {data.get('format')!r}, and this version of pergrad reads format {FORMAT}. Install the "
                "version that wrote it, or start a new run."
            )
        fields = {field.name: field for field in dataclasses.fields(cls)}
        for name in data:
            if name not in fields:
                raise unknown("entry", name, fields, f" in {where}")
        missing = [name for name, f in fields.items() if name not in data and required(f)]
        if missing:
            raise BadInput(f"{where} has no {', '.join(map(repr, missing))}: it is damaged, or not from a run.")
        hints = typing.get_type_hints(cls)
        return cls(**{name: checked(value, hints[name], f"{name} in {where}") for name, value in data.items()})


def required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


# ------------------------------------------------------------------------------------- options by name


def options_from(cls: type, given: dict[str, Any], defaults: Any, kind: str) -> Any:
    """``defaults`` (of the dataclass ``cls``) with what was ``given``: values, or the words of a command line."""
    hints = typing.get_type_hints(cls)
    for name in given:
        if name not in hints:
            raise unknown(f"option of {kind}", name, hints)
    return dataclasses.replace(
        defaults, **{name: checked(value, hints[name], f"{name} of {kind}") for name, value in given.items()}
    )


def checked(value: Any, hint: Any, where: str) -> Any:
    """``value`` as the type ``hint`` says, or `BadInput`. A string is read as on a command line."""
    choices = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if value is None or (isinstance(value, str) and value.lower() == "none" and str not in choices):
        if type(None) in choices:
            return None
        raise BadInput(f"{where} is None: expected {_named(hint)}.")
    for choice in choices:
        try:
            return _as(value, choice)
        except (TypeError, ValueError):
            continue
    raise BadInput(f"{where} is {value!r}: expected {_named(hint)}.")


def _as(value, kind):
    if typing.get_origin(kind) is typing.Literal:
        if value in typing.get_args(kind):
            return value
        raise ValueError
    if typing.get_origin(kind) is dict or kind is dict:
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            return value
        raise ValueError
    if kind is bool:
        if isinstance(value, bool):
            return value
        return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[value.lower()]
    if isinstance(value, bool):
        raise ValueError
    if kind is int:
        if isinstance(value, float) and value != int(value):
            raise ValueError
        return int(value)
    if kind is float:
        return float(value)
    if kind is str and isinstance(value, str):
        return value
    raise ValueError


def _named(hint) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return "one of " + ", ".join(map(str, typing.get_args(hint)))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_named(choice) for choice in typing.get_args(hint))
    words = {int: "an integer", float: "a number", bool: "true or false", str: "a word", type(None): "none"}
    return words.get(hint, getattr(hint, "__name__", str(hint)))


def words_to_options(words: typing.Iterable[str], flag: str) -> dict[str, str]:
    """``["b1=0.9", …]`` as a dict."""
    options = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise BadInput(f"{flag} was given {word!r}: expected NAME=VALUE. Write, for example, `{flag} b1=0.95`.")
        options[name.replace("-", "_")] = value
    return options
