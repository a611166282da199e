"""Values of a recipe that come from the environment; a run's files keep them as written, since they may be secrets."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping
from functools import reduce
from operator import getitem
from typing import Any

from omegaconf import OmegaConf
from omegaconf.resolvers import oc

from lit_vgrpo.config.tree import Place, leaves, replaced

ENVIRONMENT = "oc.env"


def environment_texts(plain: Mapping[Any, Any]) -> dict[Place, str]:
    """Return each value that depends on the environment, as written.

    Args:
        plain: Recipe, not resolved, whose interpolations can be resolved.

    >>> environment_texts({"data": {"train": "${oc.env:HOME}"}, "copies": ["${data.train}", "${other}"], "other": 1})
    {('data', 'train'): '${oc.env:HOME}', ('copies', 0): '${data.train}'}
    """
    texts = {place: text for place, text in leaves(plain) if isinstance(text, str) and "${" in text}
    if not any(ENVIRONMENT in text for text in texts.values()):
        return {}
    config: Any = OmegaConf.create(dict(plain))
    names: list[str] = []
    dependent = {}

    def read(name: str, *default: Any) -> Any:
        names.append(name)
        return oc.env(name, *default)

    _resolve_with(read)
    try:
        for place, text in texts.items():
            names.clear()
            value = reduce(getitem, place, config)
            if OmegaConf.is_config(value):
                OmegaConf.to_container(value, resolve=True)
            if names:
                dependent[place] = text
    finally:
        _resolve_with(oc.env)
    return dependent


def _resolve_with(resolver: Callable[..., Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the method's name differs between releases
        OmegaConf.register_new_resolver(ENVIRONMENT, resolver, replace=True)


def unchanged_texts(texts: Mapping[Place, str], before: Any, after: Any) -> dict[Place, str]:
    """Return the texts of values that are the same in two resolved recipes.

    >>> unchanged_texts({("a",): "${oc.env:A}", ("b", 0): "${oc.env:B}"}, {"a": 1, "b": [2]}, {"a": 3, "b": [2]})
    {('b', 0): '${oc.env:B}'}
    """
    old, new = dict(leaves(before)), dict(leaves(after))
    return {place: text for place, text in texts.items() if place in old and new.get(place) == old[place]}


def with_fingerprints(recipe: Any, texts: Mapping[Place, str]) -> Any:
    """Return a resolved recipe with a short hash in place of each text from the environment; numbers are not secret.

    >>> with_fingerprints({"url": "http://me:password@host"}, {("url",): "${oc.env:URL}"})
    {'url': '${oc.env:URL} (value #69905c)'}
    """

    def hashed(text: str, value: Any) -> Any:
        if isinstance(value, Mapping | list):
            inner = {place: text for place, _ in leaves(value) if place and place[-1] != "class_path"}
            return replaced(value, inner, hashed)
        # Class names are not secret either, and decide which settings are compared.
        return f"{text}{_fingerprint(value)}" if isinstance(value, str) else value

    kept = {place: text for place, text in texts.items() if place[-1] != "class_path"}
    return replaced(recipe, kept, hashed)


def is_same_value(saved: Any, value: Any) -> bool:
    """Return True if a saved value, or the hash saved in its place, is that of ``value``."""
    return bool(saved == value) or (isinstance(saved, str) and saved.endswith(_fingerprint(value)))


def _fingerprint(value: Any) -> str:
    # Six digits detect a change, and are too few to reveal a password.
    return f" (value #{hashlib.sha256(str(value).encode()).hexdigest()[:6]})"
