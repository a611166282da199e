"""Loading of a policy's diffusers pipeline, from a folder or the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from lit_vgrpo.errors import one_line
from lit_vgrpo.policies.contract import PolicyContract
from lit_vgrpo.policies.pipeline_folder import KEY, config_folder, folder_errors
from lit_vgrpo.system.hub import LoadError, local_folder, only_errors_of, quiet_libraries


def read_pipeline(policy: PolicyContract) -> Any:
    """Load a policy's pipeline with its weights, in the types that the policy trains and computes in.

    Raises:
        LoadError: it cannot be downloaded, is damaged or belongs to another family.
    """
    import diffusers

    # Trained weights and the VAE must not be rounded when loaded.
    network_dtype = torch.float32 if policy.lora_rank is None else policy.dtype
    dtypes = {policy.network_name: network_dtype, "vae": torch.float32, "default": policy.dtype}
    with quiet_libraries():
        family = getattr(diffusers, policy.pipeline_class)  # imports lazily
    folder = fetch(policy, family)
    for message in folder_errors(policy, folder):
        raise LoadError(message)
    options: dict[str, Any] = {"variant": policy.variant, "torch_dtype": dtypes, **policy.null_components(folder)}
    if not any(folder.glob("*/*.safetensors")):
        options["use_safetensors"] = False  # otherwise diffusers reports each missing file as an error
    with quiet_libraries():
        try:
            return family.from_pretrained(folder, **options)
        except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
            raise LoadError(
                f"Cannot load {policy.checkpoint}: {one_line(error)[:200]}. Download or save it again, "
                f"or set {KEY} to a different pipeline."
            ) from error


def fetch(policy: PolicyContract, family: Any) -> Path:
    """Return the folder of a policy's pipeline; missing files of a hub name are downloaded.

    Args:
        policy: need not be loaded.
        family: the pipeline's class.

    Raises:
        LoadError: the download failed.
    """
    folder = local_folder(policy.checkpoint)
    if folder is not None:
        return folder
    index = config_folder(policy.checkpoint, policy.revision)
    left_out = {} if index is None else policy.null_components(index)
    try:
        # Keep the download's progress bars: it may be the slowest part of the start.
        with only_errors_of("diffusers", "huggingface_hub"):
            return Path(
                family.download(policy.checkpoint, revision=policy.revision, variant=policy.variant, **left_out)
            )
    except Exception as error:  # the hub's client has a separate class for each cause
        raise LoadError(
            f"Cannot load {policy.checkpoint}: {one_line(error)[:200]}. Run: hf download {policy.checkpoint}, "
            f"or set {KEY}=/a/local/folder."
        ) from error
