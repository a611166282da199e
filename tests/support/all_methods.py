"""Every training method in a small setting, and what it costs."""

from lit_vgrpo import (
    AWM,
    CRD,
    DGPO,
    EPG,
    RAM,
    VGRPO,
    DanceGRPO,
    DiffusionNFT,
    FlowGRPO,
    MixGRPO,
    RewardGradient,
    RolloutSpec,
)
from lit_vgrpo.core.surrogate import TimeGrid

S = 6  # sampling steps: enough for MixGRPO's window of four
SDE = {"solver": "flow_sde", "steps": S}
SHARED = {**SDE, "shared_noise": True}
WIDENING = {"noisiest": 2, "widen_over": 2}
GUIDED = RolloutSpec(**SDE, guidance=2.0)
PURE_NOISE = {"share_pairs": "group", "share_passes": "pure_noise"}
ANCHOR = {"anchor_weight": 1.0, "anchor_decay": 0.3}


def shared_passes(**options):
    return VGRPO(RolloutSpec("dpm++", S), 3, share_passes="group", times=TimeGrid(8), **ANCHOR, **options)


# Network passes an image: rollout, train with gradient, train without. One update an iteration, but where split.
COSTS = {
    "V-GRPO, one step": (lambda: VGRPO(RolloutSpec(steps=S)), 1, (S, 4, 0)),
    "V-GRPO, three steps": (lambda: VGRPO(RolloutSpec(steps=S), clip=0.01), 3, (S, 3 * 4, 4)),
    "Flow-GRPO, guidance, KL": (lambda: FlowGRPO(GUIDED, kl_weight=0.04), 1, (2 * S, 2 * (S - 1), 2 * (S - 1))),
    "MixGRPO, window 4": (lambda: MixGRPO(RolloutSpec(**SHARED), window_size=4), 1, (S, 4, 0)),
    "DiffusionNFT": (lambda: DiffusionNFT(RolloutSpec(steps=S)), 1, (S, S - 1, 2 * (S - 1))),
    "DGPO, no guidance": (lambda: DGPO(RolloutSpec("dpm++", S), noisiest=5), 1, (S, 4, 8)),
    "AWM": (lambda: AWM(RolloutSpec(steps=S)), 1, (S, 6, 12)),
    "V-GRPO, pure noise": (lambda: VGRPO(RolloutSpec(steps=S), share_passes="pure_noise"), 1, (S, 3 + 1 / 4, 0)),
}
METHODS = {
    **COSTS,
    "DiffusionNFT, on-policy": (lambda: DiffusionNFT(RolloutSpec(steps=S), old_decay=0.0), 1, (S, S - 1, S - 1)),
    "V-GRPO, shared passes": (lambda: shared_passes(clip=0.01), 2, (S, 2 * 3 / 4, 2 * 3 / 4)),
    "V-GRPO, widening": (lambda: VGRPO(RolloutSpec(steps=S), **WIDENING), 1, (S, 4, 0)),
    "Flow-GRPO, fast": (lambda: FlowGRPO(RolloutSpec(**SDE), fast=True, kl_weight=0.04), 1, (S, 3, 3)),
    "Flow-GRPO, cps": (lambda: FlowGRPO(RolloutSpec("cps", S), kl_weight=0.0), 1, (S, S - 1, 0)),
    "Flow-GRPO, guard": (lambda: FlowGRPO(RolloutSpec(**SDE), guard=True, kl_weight=0.0), 1, (S, S - 1, 0)),
    "MixGRPO, old anew": (
        lambda: MixGRPO(RolloutSpec(**SHARED), window_size=4, recompute_old=True),
        2,
        (S, 2 * 4, 4),
    ),
    "MixGRPO, Flash": (lambda: MixGRPO(RolloutSpec(**SHARED), window_size=4, flash=True), 1, (4 + 1, 4, 0)),
    "DanceGRPO": (lambda: DanceGRPO(RolloutSpec("dance_sde", S, shared_noise=True)), 1, (S, 3, 0)),
    "DGPO, moving": (lambda: DGPO(RolloutSpec("dpm++", S), noisiest=5, reference="moving"), 1, (S, 4, 8)),
    "EPG": (lambda: EPG(RolloutSpec(steps=S)), 1, (S, S - 1, 2 * (S - 1))),
    "PEPG, on-policy": (lambda: EPG(RolloutSpec(steps=S), old_decay=0.0, proximal=True), 2, (S, 2 * S - 2, 2 * S - 2)),
    "RAM": (lambda: RAM(RolloutSpec(steps=S), 4), 1, (S, 4, 8)),
    "RAM, pure noise": (lambda: RAM(RolloutSpec(steps=S), 2, **PURE_NOISE), 2, (S, 2 + 2 / 4, 2 * (1 + 1 / 4))),
    "CRD": (lambda: CRD(RolloutSpec("dpm++", S), noisiest=5), 1, (S, 4, 8)),
    "CRD, pure noise": (
        lambda: CRD(RolloutSpec("dpm++", S), 2, temperature=0.2, sampler_decay=0.0, share_passes="pure_noise"),
        2,
        (S, 2 * (1 + 1 / 4), 3 * (1 + 1 / 4)),
    ),
    "RVM": (lambda: RAM(RolloutSpec(steps=S), 4, old_decay=0.0, kl_weight=0.0), 1, (S, 4, 0)),
    "AWM, anchor": (lambda: AWM(RolloutSpec(steps=S), kl_weight=0.0, ema_weight=0.0, **ANCHOR), 1, (S, 6, 6)),
    "FlowBP": (lambda: RewardGradient(RolloutSpec(steps=S)), 1, (S, 4, 0)),
    "ReFL": (lambda: RewardGradient(RolloutSpec(steps=S), "refl"), 1, (S, 1, 1)),
    "DRaFT-K": (lambda: RewardGradient(RolloutSpec(steps=S), "draft_k", num_steps=2), 2, (S, 2 * 2, 0)),
    "DRaFT-LV": (lambda: RewardGradient(RolloutSpec(steps=S), "draft_lv"), 1, (S, 3, 3)),
    "MixGRPO, anchor": (lambda: MixGRPO(RolloutSpec(**SHARED), window_size=4, **ANCHOR), 1, (S, 4, 4)),
}
REPLAYED = {"V-GRPO, replay": (lambda: shared_passes(replay=True, clip=0.01), 2, None)}
"""Costs differ between the first iteration and the others."""
REUSED = {"Flow-GRPO, reused": (lambda: FlowGRPO(RolloutSpec("cps", S), kl_weight=0.0, reuse_rollout=True), 1, None)}
"""Needs the images of a rank in one micro-batch."""
VARIANTS = (
    "V-GRPO, pure noise",
    "V-GRPO, one step",
    "V-GRPO, widening",
    "DiffusionNFT, on-policy",
    "PEPG, on-policy",
    "RVM",
    "CRD, pure noise",
    "Flow-GRPO, cps",
    "Flow-GRPO, guard",
    "MixGRPO, old anew",
    "MixGRPO, Flash",
    "ReFL",
    "DRaFT-K",
    "DRaFT-LV",
)
"""Another setting of a method, with no state between iterations of its own."""
