"""The module's part of a checkpoint: the trained weights and the state of the run."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from lit_vgrpo.core.snapshots import trainable_parameters
from lit_vgrpo.training.saved_weights import OF_MODULE

PARTS = ("ledger", "evaluator", "guard", "objective", "replay")
"""Attributes of the module whose state is saved."""


def save_state(module: Any, checkpoint: dict[str, Any]) -> None:
    """Keep only the trained weights in a checkpoint, and add the state of the run; all ranks must call it."""
    trained = _trained(module)
    checkpoint["state_dict"] = {name: value for name, value in checkpoint["state_dict"].items() if name in trained}
    # Include the images of an unfinished iteration, so that no rollout is repeated.
    iteration = None if module.iteration is None else module.iteration.state_dict()
    checkpoint["lit_vgrpo"] = {name: getattr(module, name).state_dict() for name in PARTS} | {"iteration": iteration}


def load_state(module: Any, checkpoint: dict[str, Any]) -> None:
    """Restore the state of the run, and let ``fit`` continue it.

    Raises:
        RuntimeError: Trained weights are missing, or the checkpoint was written with another method.
    """
    trained, state = _trained(module), checkpoint["lit_vgrpo"]
    if missing := trained - checkpoint["state_dict"].keys():
        raise RuntimeError(
            f"The checkpoint lacks {len(missing)} of {len(trained)} trained tensors, e.g. {min(missing)}. "
            "Resume with the recipe that wrote it (RUN/config.yaml)."
        )
    for name in PARTS:
        getattr(module, name).load_state_dict(state[name])
    with suppress(RuntimeError):  # without a trainer, only the weights are needed
        if module.trainer.state.fn == "fit":
            progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
            module.continuation.load(state["iteration"], progress)


def _trained(module: Any) -> set[str]:
    return {f"{OF_MODULE}{name}" for name in trainable_parameters(module.policy)}
