"""Teachers for the tests of OPD: LoRA folders of weights that differ, and a student's module and data."""

from helpers import make_data, make_module, prompt_file
from pair_methods import nudge
from policy_copies import load_copy

from lit_vgrpo import OPD, OptimizerConfig, RolloutSpec, SD3Policy

LORA = {"lora_rank": 2, "max_sequence_length": 1}


def save_teachers(folder, place, names, policy_class=SD3Policy, options=LORA):
    """Save a LoRA of each name below a folder if there is none, and return ``{name: LoRA folder}``."""
    if not all((place / name).exists() for name in names):
        policy = load_copy(policy_class, folder, **options)
        for seed, name in enumerate(names):
            nudge(policy, seed)
            policy.save(place / name)
    return {name: str(place / name) for name in names}


def make_student(folder, place, reward=None, **options):
    objective = OPD(save_teachers(folder, place, ("one", "two")), RolloutSpec(steps=3), **options)
    adam = OptimizerConfig(lr=1e-4, eps=1e-6)
    return make_module(folder, objective, reward, policy=SD3Policy(str(folder), **LORA), optimizer=adam)


def make_task(**options):
    """Data in which one prompt of four has the second teacher."""
    file = prompt_file("shapes_train.jsonl")
    sources = [{"path": file, "teacher": "one", "weight": 3}, {"path": file, "teacher": "two"}]
    return make_data(**{"train": sources, "prompts_per_iteration": 4, "micro_batch_size": 4, **options})
