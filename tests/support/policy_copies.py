"""Small policies whose pipelines are read from their folders once a process, for tests that load many."""

from copy import deepcopy
from functools import cache
from pathlib import Path

from lit_vgrpo.policies.loading import read_pipeline

SHARED = ("tokenizer", "processor", "feature_extractor")  # nothing changes them


@cache
def read(policy_class, folder):
    return read_pipeline(policy_class(folder))


def load_copy(policy_class, folder, **options):
    """``policy_class(folder, **options).load()`` in a third of its time.

    The network and the scheduler are the policy's own; the text encoders and the VAE, which nothing trains, are shared.

    Args:
        options: in float32, and nothing that changes an encoder or the VAE.
    """
    pipeline = read(policy_class, str(folder))
    own = (policy_class.network_name, "scheduler")
    shared = {id(part): part for name, part in pipeline.components.items() if name not in own}
    return policy_class(str(folder), **options).adopt(deepcopy(pipeline, shared))


def reader_with_memory():
    """``read_pipeline`` that reads a folder once, until one of its files changes, and returns copies."""
    known = {}

    def copy_of(policy):
        folder = Path(policy.checkpoint)
        if not folder.is_dir():
            return read_pipeline(policy)
        files = tuple((str(file), file.stat().st_mtime_ns) for file in sorted(folder.rglob("*")))
        options = (type(policy), policy.variant, policy.dtype, policy.lora_rank is None)
        key = (files, options, *policy.null_components(folder))
        if key not in known:
            known[key] = read_pipeline(policy)
        parts = known[key].components.items()
        return deepcopy(known[key], {id(part): part for name, part in parts if name.startswith(SHARED)})

    return copy_of
