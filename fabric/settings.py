"""Typed settings of a process. Knows four sources, in order: command line, environment, YAML file, preset."""

from __future__ import annotations

import argparse
import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, NoReturn, TypeVar, get_args, get_origin

import pydantic_settings
import yaml
from pydantic import BaseModel, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from fabric import faults
from fabric.errors import StartError

# By the end of a setting's name, the first that fits: three years, 256 TiB, and what a message's field carries.
_MOST: Mapping[str, int] = {"_s": 100_000_000, "_bytes": 1 << 48, "": (1 << 31) - 1}
SettingsT = TypeVar("SettingsT", bound="Settings")
Tree = Mapping[str, Any]


class SettingsError(StartError):
    """A setting is unknown, missing or wrong; the message names its path and the source it came from."""


class Section(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """Base of nested settings: dots on the command line, nesting in YAML, `__` in the environment."""


class Settings(BaseSettings):
    """Base of every settings class. Subclasses set `env_prefix` in their class line and may declare `presets`."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", env_nested_delimiter="__", allow_inf_nan=False)
    presets: ClassVar[Mapping[str, Tree]] = {}

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what `load` merged (or a test passed) counts: nothing is read behind its back."""
        return (init_settings,)

    def printable(self) -> dict[str, Any]:
        """All settings as JSON types, secrets masked."""
        return self.model_dump(mode="json")


class ServiceSettings(Settings):
    """What every service can be told."""

    # Reflection tells whoever reaches a port all that can be asked there.
    presets: ClassVar[Mapping[str, Tree]] = {"production": {"reflection": False}}
    # Settings that name a host:port to listen on.
    doors: ClassVar[tuple[str, ...]] = ("listen", "metrics")

    listen: str = Field("127.0.0.1:0", description="host:port to serve gRPC on; port 0 takes a free one")
    advertise: str = Field("", description="host:port at which others reach this service; default: where it listens")
    metrics: str = Field("127.0.0.1:0", description="host:port of the Prometheus endpoint")
    discovery: str = Field(
        "etcd://127.0.0.1:2379", description="etcd://host:port, static://service=host:port,... or memory://"
    )
    discovery_wait_s: float = Field(30.0, gt=0, description="seconds to wait at start for discovery to answer")
    instance: str = Field("", description="name of this instance; default: made from the address and the epoch")
    drain_s: float = Field(20.0, ge=0, description="seconds that running calls get to finish after SIGTERM")
    reflection: bool = Field(True, description="serve gRPC reflection; turn off in production")
    ready_file: Path | None = Field(None, description="file to write the ready line to")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe level to log")
    failpoints: str = Field("", description="for tests alone: where this process shall fail (docs/faults.md)")

    @classmethod
    def service_name(cls) -> str:
        """Name in discovery, logs and metrics: "decode" for the prefix DEEPINFER_DECODE_."""
        return str(cls.model_config.get("env_prefix", "")).upper().removeprefix("DEEPINFER_").strip("_").lower()


@dataclass(frozen=True, slots=True)
class Loaded(Generic[SettingsT]):
    """Settings with what the command line asked to do with them."""

    settings: SettingsT
    print_config: bool
    check: bool
    sources: Mapping[str, Tree]

    def spelled(self, field: str) -> str:
        """What whoever gave the setting calls it: its flag, its variable, or its path in a file. A setting that nobody
        gave goes by its flag, and what is none by its own name."""
        name, bracket, inside = field.partition("[")
        leaf = next((leaf for leaf in _leaves(type(self.settings)) if leaf.dotted == name), None)
        return field if leaf is None else _spelled(leaf, type(self.settings), self.sources, bracket + inside)


@dataclass(frozen=True, slots=True)
class _Leaf:
    """One setting: its path from the root and its declaration."""

    path: tuple[str, ...]
    info: FieldInfo

    @property
    def dotted(self) -> str:
        return ".".join(self.path)

    @property
    def flag(self) -> str:
        return "--" + self.dotted.replace("_", "-")

    def env(self, prefix: str) -> str:
        return (prefix + "__".join(self.path)).upper()


def load(cls: type[SettingsT], argv: Sequence[str], prog: str = "") -> Loaded[SettingsT]:
    """Merges all sources and validates once.

    Args:
        cls: the settings class.
        argv: command line without the program's name. `--help` prints and raises SystemExit(0).
        prog: program name shown by `--help`.

    Raises:
        SettingsError: naming every wrong setting and how to right it.
    """
    leaves = list(_leaves(cls))
    prefix = str(cls.model_config.get("env_prefix", ""))
    parser = _parser(cls, leaves, prefix, prog)
    _refuse_unknown_flags(parser, argv)
    arguments = vars(parser.parse_args(list(argv)))
    config = arguments.pop("config") or os.environ.get(f"{prefix}CONFIG")
    preset = arguments.pop("preset") or os.environ.get(f"{prefix}PRESET")
    print_config, check = arguments.pop("print_config"), arguments.pop("check")
    _refuse_unknown_environment(leaves, prefix)
    sources = {
        "command line": _tree(arguments),
        "environment": _environment(cls, prefix),
        f"file {config}": _read_yaml(Path(config), cls) if config else {},
        f"preset {preset}": _preset(cls, preset) if preset else {},
    }
    loaded = Loaded(_validate(cls, sources), print_config, check, sources)
    for leaf in leaves:
        _refuse_absurd(leaf, loaded)
    return loaded


def _refuse_absurd(leaf: _Leaf, loaded: Loaded[SettingsT]) -> None:
    """Numbers beyond all use fit no message and no timer."""
    value: Any = loaded.settings
    for part in leaf.path:
        value = getattr(value, part)
    most = next(most for ending, most in _MOST.items() if leaf.path[-1].endswith(ending))
    if isinstance(value, int | float) and value > most:
        raise SettingsError("out of range", field=loaded.spelled(leaf.dotted), fix=f"use at most {most}")


def _environment(cls: type[Settings], prefix: str) -> Tree:
    try:
        return EnvSettingsSource(cls)()
    except pydantic_settings.SettingsError as error:  # its words say which field; of a list or a section it reads JSON
        named = re.search(r'field "(\w+)"', str(error))
        name = (prefix + named[1]).upper() if named else prefix
        raise SettingsError("not JSON", field=name, fix="give its value as JSON, or use --config") from error


def _spelled(leaf: _Leaf, cls: type[Settings], sources: Mapping[str, Tree], inside: str = "") -> str:
    """inside: the place within a setting that is a list or a tree, with the dot or bracket before it."""
    origin = _origin(leaf.path, sources)
    if origin == "environment":
        return leaf.env(str(cls.model_config.get("env_prefix", ""))) + inside
    in_file = origin.startswith(("file ", "preset "))
    return f"{leaf.dotted}{inside} in {origin}" if in_file else leaf.flag + inside


def _validate(cls: type[SettingsT], sources: Mapping[str, Tree]) -> SettingsT:
    merged: dict[str, Any] = {}
    for tree in sources.values():
        merged = _merge(merged, tree)
    try:
        return cls(**merged)
    except ValidationError as error:
        lines = [_describe(item, cls, sources) for item in error.errors(include_url=False, include_input=False)]
        raise SettingsError("; ".join(lines), fix="see --help") from error


def _describe(fault: ErrorDetails, cls: type[Settings], sources: Mapping[str, Tree]) -> str:
    said = faults.words(fault["type"], fault.get("ctx", {}))
    path = tuple(map(str, fault["loc"]))
    leaf = next((leaf for leaf in _leaves(cls) if leaf.path == path[: len(leaf.path)]), None)
    if leaf is None:  # a section that is none
        return f"{'.'.join(path)} in {_origin(path, sources)}: {said.message}, {said.fix}"
    inside = "".join(f".{part}" for part in path[len(leaf.path) :])
    return f"{_spelled(leaf, cls, sources, inside)}: {said.message}, {said.fix}"


def _origin(path: tuple[str, ...], sources: Mapping[str, Tree]) -> str:
    """The source that has the last word on a setting; empty where nobody gave it."""
    return next((name for name, tree in sources.items() if _holds(tree, path)), "")


def _holds(tree: Any, path: tuple[str, ...]) -> bool:
    for part in path:
        if not isinstance(tree, Mapping) or part not in tree:
            return False
        tree = tree[part]
    return True


def _merge(strong: Tree, weak: Tree) -> dict[str, Any]:
    """Both trees; where both have a leaf, the strong one's."""
    merged = dict(weak)
    for key, value in strong.items():
        below = merged.get(key)
        merged[key] = _merge(value, below) if isinstance(value, Mapping) and isinstance(below, Mapping) else value
    return merged


def _tree(flat: Mapping[str, Any]) -> dict[str, Any]:
    """{"a.b": 1} -> {"a": {"b": 1}}, without the options that were not given."""
    root: dict[str, Any] = {}
    for dotted, value in flat.items():
        if value is None:
            continue
        *parents, last = dotted.split(".")
        node = root
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = value
    return root


def _section(info: FieldInfo) -> type[BaseModel] | None:
    kind = info.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _leaves(model: type[BaseModel], parents: tuple[str, ...] = ()) -> Iterator[_Leaf]:
    for name, info in model.model_fields.items():
        section = _section(info)
        if section is None:
            yield _Leaf((*parents, name), info)
        else:
            yield from _leaves(section, (*parents, name))


class _Parser(argparse.ArgumentParser):
    """What is wrong with the command line is a SettingsError: its usage would fill a screen."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(message, fix="see --help")


def _parser(cls: type[Settings], leaves: Iterable[_Leaf], prefix: str, prog: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=prog or None,
        description=(cls.__doc__ or "").strip(),
        epilog="Order: command line, environment, --config, --preset, default.",
        allow_abbrev=False,
        argument_default=None,
    )
    parser.add_argument("--config", metavar="FILE", help=f"YAML file with settings [env {prefix}CONFIG]")
    parser.add_argument(
        "--preset", choices=sorted(cls.presets) or None, help=f"named set of values [env {prefix}PRESET]"
    )
    parser.add_argument("--print-config", action="store_true", help="print all settings, secrets masked, and exit")
    parser.add_argument("--check", action="store_true", help="validate the settings and exit")
    for leaf in leaves:
        _add_option(parser, leaf, prefix)
    return parser


def _add_option(parser: argparse.ArgumentParser, leaf: _Leaf, prefix: str) -> None:
    text = f"{leaf.info.description or leaf.dotted}{_default(leaf.info)} [env {leaf.env(prefix)}]".replace("%", "%%")
    kind = leaf.info.annotation
    if kind is bool:
        parser.add_argument(leaf.flag, dest=leaf.dotted, action=argparse.BooleanOptionalAction, default=None, help=text)
        return
    is_text = kind is str or "Secret" in str(kind)
    choices = ",".join(map(str, get_args(kind))) if get_origin(kind) is Literal else ""
    metavar = f"{{{choices}}}" if choices else "VALUE"
    parser.add_argument(leaf.flag, dest=leaf.dotted, type=str if is_text else _value, metavar=metavar, help=text)


def _default(info: FieldInfo) -> str:
    """The default as `--help` shows it; of an empty one the description says what it means."""
    if info.is_required():
        return " (required)"
    value = str(info.get_default(call_default_factory=True))
    return f" (default {value})" if value not in ("", "None") else ""


def _value(text: str) -> Any:
    """A number, list or mapping in YAML notation, else the text itself; pydantic checks the type."""
    if not text.startswith(("[", "{")):
        return text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise argparse.ArgumentTypeError(f"not valid YAML: {text!r}") from error


def _refuse_unknown_flags(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    known = set(parser._option_string_actions)
    for argument in argv:
        name = argument.split("=", 1)[0]
        if name.startswith("--") and name not in known:
            raise SettingsError(f"unknown option {name}", field=name, fix=_suggest(name, known, "--"))


def _refuse_unknown_environment(leaves: Iterable[_Leaf], prefix: str) -> None:
    """A misspelt variable must not be ignored. JSON for a whole section is allowed, as pydantic-settings reads it."""
    if not prefix:
        return
    known = {f"{prefix}CONFIG", f"{prefix}PRESET"}
    for leaf in leaves:
        known |= {_Leaf(leaf.path[: depth + 1], leaf.info).env(prefix) for depth in range(len(leaf.path))}
    for name in os.environ:
        if name.upper().startswith(prefix.upper()) and name.upper() not in known:
            fix = _suggest(name.upper(), known, prefix.upper())
            raise SettingsError(f"unknown environment variable {name}", field=name, fix=fix)


def _suggest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Names what is spelt most alike. prefix: what all names begin with and what makes none of them alike."""
    rests = [one.removeprefix(prefix) for one in known if one.startswith(prefix)]
    close = difflib.get_close_matches(name.removeprefix(prefix), rests, n=1, cutoff=0.6)
    return f"did you mean {prefix}{close[0]}?" if close else "see --help"


def _read_yaml(path: Path, cls: type[BaseModel]) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text())
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}", field="--config") from error
    except yaml.YAMLError as error:
        raise SettingsError(f"{path} is not valid YAML: {error}", field="--config") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise SettingsError(f"{path} must hold a mapping of settings", field="--config")
    _refuse_unknown_keys(tree, cls, str(path), "")
    return tree


def _refuse_unknown_keys(tree: Tree, model: type[BaseModel], where: str, parents: str) -> None:
    for key, value in tree.items():
        info = model.model_fields.get(key)
        if info is None:
            path = f"{parents}{key}"
            raise SettingsError(f"unknown setting in {where}", field=path, fix=_suggest(str(key), model.model_fields))
        section = _section(info)
        if section is not None and isinstance(value, Mapping):
            _refuse_unknown_keys(value, section, where, f"{parents}{key}.")


def _preset(cls: type[Settings], name: str) -> Tree:
    try:
        return cls.presets[name]
    except KeyError:
        raise SettingsError(f"unknown preset {name!r}", field="--preset", fix=f"one of {sorted(cls.presets)}") from None
