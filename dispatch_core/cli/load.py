"""Find what a command names as `package.module:attribute`."""

from __future__ import annotations

import difflib
import importlib
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from dispatch_core.errors import ConfigurationError, RelayDispatchError

__all__ = ["load_attribute"]

T = TypeVar("T")


def load_attribute(target: str, app_dir: Path, wanted: type[T], *, word: str, example: str) -> T:
    """Import what `target` names; `app_dir` comes first among the places where modules are looked for.

    `word` is what a person calls such a thing, `example` a target as it should be.

    Raises: ConfigurationError, which says what was wrong with the target and what there is instead.
    """
    directory = str(app_dir.resolve())
    if directory not in sys.path:
        sys.path.insert(0, directory)
    name, colon, attribute = target.partition(":")
    if name.endswith(".py") or "/" in name:
        raise ConfigurationError(
            f"{target}: give a module and not a file, as in {Path(name).stem}:{attribute or word}"
            " (--app-dir says where it lies)"
        )
    if not name or not all(part.isidentifier() for part in name.split(".")):
        raise ConfigurationError(f"{target}: give module:{word}, as in {example}")
    module = _import(name, directory)
    found = {key: value for key, value in vars(module).items() if isinstance(value, wanted)}
    kind = wanted.__name__
    holds = f"{name} holds {', '.join(f'{name}:{key}' for key in found)}" if found else f"{name} holds no {kind}"
    if not colon or not attribute:
        raise ConfigurationError(f"{target}: which {word}? {holds}")
    value: object = module
    for part in attribute.split("."):
        try:
            value = getattr(value, part)
        except AttributeError:
            near = difflib.get_close_matches(part, found)
            hint = f"did you mean {name}:{near[0]}?" if near else holds
            raise ConfigurationError(f"{target}: there is no {part!r} in it; {hint}") from None
    if not isinstance(value, wanted):
        raise ConfigurationError(f"{target} is {_article(type(value).__name__)} and not {_article(kind)}; {holds}")
    return value


def _import(name: str, directory: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if name == missing or name.startswith(f"{missing}."):
            raise ConfigurationError(
                f"there is no module {missing!r} in {directory}, nor in Python's path (--app-dir DIR adds a place)"
            ) from None
        raise ConfigurationError(f"importing {name} failed{_where(error)}: {error}") from error
    except RelayDispatchError as error:
        raise ConfigurationError(f"importing {name} failed{_where(error)}: {error}") from error
    except SyntaxError as error:
        raise ConfigurationError(f"importing {name} failed at {error.filename}:{error.lineno}: {error.msg}") from error
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise ConfigurationError(f"importing {name} failed{_where(error)}: {what}") from error


def _where(error: BaseException) -> str:
    """Return the deepest place in code that is neither Python's import machinery nor ours."""
    ours = tuple(str(Path(__file__).parents[2] / package) for package in ("dispatch_core", "gateway_sdk", "relay_sdk"))
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<frozen", *ours)) and "importlib" not in frame.filename
    ]
    return f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _article(name: str) -> str:
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
