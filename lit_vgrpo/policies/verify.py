"""Verify a policy class on a checkpoint: ``python -m lit_vgrpo.policies.verify my_models.MyPolicy checkpoint=FOLDER``.

Prints one line per check. The options are those of ``model.policy`` in a recipe; without ``lora_rank`` or
``train_only`` it trains an adapter of rank 4. It computes in float32, on a GPU if there is one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from lit_vgrpo.errors import UserError, one_line, report, say
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.policies.checks import Broken, checks_of
from lit_vgrpo.system.hub import LoadError

USAGE = "usage: python -m lit_vgrpo.policies.verify CLASS checkpoint=FOLDER_OR_HUB_NAME [option=value ...]"
ADAPTER = "lora_rank=4"


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
        policy = build_policy(words)
        if policy.start_from is not None:
            raise UserError(f"start_from={policy.start_from} is not used by these checks. Leave it out.")
        policy.load()
    except UserError as error:
        report(error.errors)
        return 2
    except LoadError as error:
        report([str(error)])
        return 2
    if torch.cuda.is_available():
        torch.backends.cudnn.allow_tf32 = False  # less precise than the differences to detect
        policy.to("cuda")
    return 1 if run_checks(policy) else 0


def build_policy(words: Sequence[str]) -> Policy:
    """Build a policy, without loading it, from its class and its options.

    Raises:
        UserError: with every error in the arguments.
    """
    from lit_vgrpo import policies  # noqa: F401  imported so that its classes go by short names
    from lit_vgrpo.config.parts import built_part
    from lit_vgrpo.config.tree import apply_override
    from lit_vgrpo.system.paths import import_from_here

    import_from_here()
    tree = {"policy": {"class_path": words[0]}}
    options = list(words[1:])
    if not any(word.startswith(("lora_rank=", "train_only=")) for word in options):
        options.append(ADAPTER)
    for word in options:
        key, equals, text = word.partition("=")
        if not equals:
            raise UserError(f"{word} is not an option of a policy. Options are written key=value.")
        apply_override(tree, f"policy.{key}", text)
    policy = built_part(tree, "policy", Policy)
    if policy.dtype != torch.float32:
        raise UserError("dtype is not float32: images are compared up to float error. Leave it out.")
    return policy


def run_checks(policy: Policy) -> int:
    """Run all checks of a loaded policy, print a line for each, and return the number that fail."""
    failed = 0
    for shown, check in checks_of(policy):
        try:
            mark, said = "ok", check(policy)
        except Broken as failure:
            mark, said = "NO", str(failure)
        except Exception as error:  # the family's and the pipeline's code may raise anything
            mark, said = "NO", f"{type(error).__name__}: {error}"
        failed += mark == "NO"
        say(f"{mark}  {shown}: {one_line(said)}")
    name = type(policy).__name__
    say(f"{failed} of the checks fail." if failed else f"{name} samples and trains like {policy.pipeline_class}.")
    return failed


if __name__ == "__main__":
    sys.exit(main())
