"""Verify a policy class on a checkpoint: ``python -m lit_vgrpo.policies.verify my_models.MyPolicy checkpoint=FOLDER``.

Prints one line per check. The options are those of ``model.policy`` in a recipe; without ``lora_rank`` or
``train_only`` it trains an adapter of rank 4. It computes in float32, on a GPU if there is one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

import torch
import yaml

from lit_vgrpo.errors import UserError, one_line, report, say
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.policies.checks import Broken, checks_of
from lit_vgrpo.system.hub import LoadError
from lit_vgrpo.system.paths import import_from_here

USAGE = "usage: python -m lit_vgrpo.policies.verify CLASS checkpoint=FOLDER_OR_HUB_NAME [option=value ...]"


def main(words: Sequence[str] | None = None) -> int:
    """Run all checks on a policy.

    Args:
        words: ``my_models.MyPolicy checkpoint=/a/folder height=512``; ``None`` reads the command line.

    Returns:
        0, 1 if a check fails, 2 for an error in the arguments.
    """
    words = sys.argv[1:] if words is None else list(words)
    if not words or words[0] in ("-h", "--help"):
        print(USAGE, file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    try:
        policy = build_policy(words).load()
    except (UserError, LoadError, ImportError, AttributeError, TypeError, ValueError) as error:
        report([one_line(error)])
        return 2
    if torch.cuda.is_available():
        torch.backends.cudnn.allow_tf32 = False  # less precise than the differences to detect
        policy.to("cuda")
    return 1 if run_checks(policy) else 0


def build_policy(words: Sequence[str]) -> Policy:
    """Build a policy, without loading it, from its class and its options, whose values are YAML."""
    import_from_here()
    module, _, name = words[0].rpartition(".")
    options = {key: yaml.safe_load(text) for key, _, text in (word.partition("=") for word in words[1:])}
    if "train_only" not in options:
        options.setdefault("lora_rank", 4)
    policy: Policy = getattr(import_module(module or "lit_vgrpo.policies"), name)(**options)
    return policy


def run_checks(policy: Policy) -> int:
    """Run all checks of a loaded policy, print a line for each, and return the number that fail."""
    failed = 0
    for title, check in checks_of(policy):
        try:
            mark, message = "ok", check(policy)
        except Exception as error:  # the family's and the pipeline's code may raise anything
            kind = "" if isinstance(error, Broken) else f"{type(error).__name__}: "
            mark, message = "NO", f"{kind}{error}"
        failed += mark == "NO"
        say(f"{mark}  {title}: {one_line(message)}")
    name = type(policy).__name__
    say(f"{failed} of the checks fail." if failed else f"{name} samples and trains like {policy.pipeline_class}.")
    return failed


if __name__ == "__main__":
    sys.exit(main())
