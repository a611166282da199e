"""Small policies whose pipelines are read from their folders once a process, for tests that load many."""

from copy import deepcopy
from functools import cache

from lit_vgrpo.policies.loading import read_pipeline


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
    policy = policy_class(str(folder), **options)
    own = (*policy.network_names, "scheduler")
    shared = {id(part): part for name, part in pipeline.components.items() if name not in own}
    return policy.adopt(deepcopy(pipeline, shared))
