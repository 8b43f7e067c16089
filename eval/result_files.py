"""The files of a result: `result.json`, of one strict schema; `prompts.jsonl`, a prompt a line."""

import dataclasses
import json
import types
import typing
from collections.abc import Sequence
from dataclasses import MISSING, Field
from pathlib import Path
from typing import Any

from headstart.eval.result import SCHEMA_VERSION, PromptRow, Result, check_names
from headstart.files import read_json, write_json, write_text


def write_result(directory: Path, result: Result, prompt_rows: Sequence[PromptRow]) -> Path:
    """Write prompts.jsonl, then result.json, each whole or not at all; return the latter's path.

    Raises ValueError when a figure is not finite.
    """
    lines = [json.dumps(dataclasses.asdict(row), allow_nan=False) for row in prompt_rows]
    write_text(directory / "prompts.jsonl", "".join(line + "\n" for line in lines))
    write_json(directory / "result.json", dataclasses.asdict(result))
    return directory / "result.json"


def read_result(path: Path) -> Result:
    """Read a result.json, or the one in a directory.

    A field with a default may be missing: the file is older than it. Raises FileNotFoundError, and
    ValueError naming the file and the key that is missing, unknown or of the wrong type, or the
    schema version found.
    """
    path = path / "result.json" if path.is_dir() else path
    data = read_json(path)
    if not isinstance(data, dict):
        raise ValueError(f"{path}: found {type(data).__name__} instead of a result's keys")
    _check_version(path, data.get("schema_version"))
    try:
        return _from_json(Result, data, "result")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _check_version(path: Path, found: Any) -> None:
    if type(found) is not int or found < 1:
        raise ValueError(
            f"{path}: schema_version={found!r}: not a result; give one that headstart eval wrote"
        )
    if found < SCHEMA_VERSION:
        raise ValueError(
            f"{path}: schema_version={found}: written by an older headstart, this one reads "
            f"{SCHEMA_VERSION}; run headstart eval again with the same options"
        )
    if found > SCHEMA_VERSION:
        raise ValueError(
            f"{path}: schema_version={found}: written by a newer headstart, this one reads "
            f"{SCHEMA_VERSION}; upgrade headstart"
        )


def _has_default(of: Field) -> bool:
    return of.default is not MISSING or of.default_factory is not MISSING


def _from_json(kind: Any, value: Any, where: str) -> Any:
    """Build `kind` (dataclass, list, dict, union or scalar type) from JSON, refusing misfits."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        hints = typing.get_type_hints(kind)
        fields = dataclasses.fields(kind)
        check_names(where, value, set(hints), {f.name for f in fields if _has_default(f)})
        return kind(**{k: _from_json(hints[k], v, f"{where}.{k}") for k, v in value.items()})
    if origin is list and isinstance(value, list):
        return [_from_json(arguments[0], v, f"{where}[{i}]") for i, v in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return {k: _from_json(arguments[1], v, f"{where}.{k}") for k, v in value.items()}
    if origin is types.UnionType:
        return _from_json(_member(arguments, value), value, where)
    if kind is Any or type(value) is kind or (kind is float and type(value) is int):
        return value
    raise ValueError(f"{where}={value!r}: expected {getattr(kind, '__name__', kind)}")


def _member(arguments: Sequence[Any], value: Any) -> Any:
    """Pick the member of a union by the JSON type of `value`; the first one when none fits."""
    for kind in arguments:
        raw = typing.get_origin(kind) or (dict if dataclasses.is_dataclass(kind) else kind)
        if type(value) is raw or (raw is float and type(value) is int):
            return kind
    return arguments[0]
