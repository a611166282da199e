"""The LoRA files of the teachers that :class:`~lit_vgrpo.objectives.OPD` distils."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch

from lit_vgrpo.core.snapshots import trainable_parameters
from lit_vgrpo.objectives.base import Objective
from lit_vgrpo.objectives.opd import OPD
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.policies.lora_file import KEY, put_lora
from lit_vgrpo.system.hub import LoadError
from lit_vgrpo.training.saved_weights import LoraPlace, find_lora, start_hashes

TEACHERS = "model.objective.teachers"


def teacher_errors(objective: Objective, policy: Policy) -> list[str]:
    """Return why the teachers cannot be used, one line each, without loading the pipeline's weights."""
    if isinstance(objective, OPD) and policy.lora_rank is None:
        return [f"{TEACHERS} are LoRAs, but the policy trains full weights. Set model.policy.lora_rank to their rank."]
    errors = []
    for name, view in _views(objective, policy):
        try:
            error = _place(view).error(view)
        except LoadError as reason:
            error = str(reason)
        errors += [] if error is None else [_named(error, name)]
    return errors


@torch.no_grad()
def load_teachers(objective: Objective, policy: Policy) -> None:
    """Load the teachers into an objective's copies, after its ``setup``; the policy's weights do not change.

    Raises:
        LoadError: A file is not a LoRA of the policy's network, or does not fit into its adapter.
    """
    for name, view in _views(objective, policy):
        teacher = objective.copies[OPD.copy_of(name)]
        with teacher.swapped_into(policy):
            for weight_name, weight in trainable_parameters(policy).items():
                if ".lora_B." in weight_name:  # for ranks and layers that the file lacks
                    weight.zero_()
            try:
                put_lora(view, _place(view).fetch())
            except LoadError as error:
                raise LoadError(_named(str(error), name)) from error
            teacher.move_towards(policy, decay=0.0)


def teacher_hashes(objective: Objective, policy: Policy) -> dict[str, str]:
    """Return hashes of the teachers' files; raise LoadError if one cannot be read."""
    hashes = ((name, start_hashes(view)) for name, view in _views(objective, policy))
    return {f"{name} {part}": value for name, parts in hashes for part, value in parts.items()}


def _views(objective: Objective, policy: Policy) -> Iterator[tuple[str, Policy]]:
    """Yield each teacher's name, and the policy as if it started from that teacher; its weights are the policy's."""
    for name, path in objective.teachers.items() if isinstance(objective, OPD) else ():
        view = copy.copy(policy)
        vars(view).update(start_from=path, start_weights="trained")
        yield name, view


def _place(view: Policy) -> LoraPlace:
    place = find_lora(view)
    if place is None:
        raise LoadError(f"{KEY}={view.start_from} is not a LoRA. Give a LoRA folder, such as RUN/export of a run.")
    return place


def _named(error: str, name: str) -> str:
    return error.replace(KEY, f"{TEACHERS}.{name}")
