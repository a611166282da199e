#!/usr/bin/env bash
# diffusers: add_noise of a new DPM-Solver, UniPC or DEIS scheduler gives time t the noise of time 999 - t
#
# One would guess: add_noise(latents, noise, timesteps) of a scheduler that was just made or loaded adds the noise that
# the network was trained with at these times, as DDPMScheduler does.
#
# What happens (diffusers 0.42.1, torch 2.13.0): before set_timesteps, timesteps fall from 999 to 0, and sigmas rise.
# add_noise looks a time up in the first and takes that place of the second. Share of noise, with SD's schedule:
#   time                                                           10       100      500      900
#   DDPM, DDIM, PNDM, Euler, Heun, LMS, KDPM2, SASolver, LCM       0.098    0.325    0.851    0.993
#   DPMSolverMultistep, DPMSolverSinglestep, UniPC, DEIS           0.997    0.993    0.850    0.323
#   the same, after set_timesteps(1000)                            0.098    0.325    0.851    0.993
#   the same, after set_timesteps(20)                              0.220    0.325    0.851    0.220
# In the last line, 10 and 900 are not on the grid of 20 and get another level. Euler and its relatives raise an
# IndexError there. With use_flow_sigmas, a new DPM-Solver or UniPC multiplies the noise by 142 at time 10. Nothing is
# logged.
#
# Why it matters: PixArt, Sana and Wan come with one of these schedulers, and pipeline.scheduler.add_noise in a training
# loop is an obvious call. The network is told "almost clean" for nearly pure noise. Take
# DDPMScheduler.from_config(pipeline.scheduler.config) for these noise schedules, or call set_timesteps(1000) first.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 scipy==1.17.1
cat > "$folder/check.py" <<'PY'
import diffusers
import torch

print(f"diffusers {diffusers.__version__}, torch {torch.__version__}")
TIMES = torch.tensor([10, 100, 500, 900])
common = dict(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
exact = (1 - diffusers.DDPMScheduler(**common).alphas_cumprod).sqrt()


def shares(scheduler, times=TIMES):
    """Return the share of noise, level / sqrt(signal ** 2 + level ** 2), that add_noise gives each time."""
    ones, zeros = torch.ones(len(times), 1), torch.zeros(len(times), 1)
    level, signal = (scheduler.add_noise(*given, times).flatten() for given in ((zeros, ones), (ones, zeros)))
    return level / (signal**2 + level**2).sqrt()


def rounded(values):
    return [round(value, 3) for value in values.tolist()]


print(f"times {TIMES.tolist()}, trained noise {rounded(exact[TIMES])}, noise of 999 - t {rounded(exact[999 - TIMES])}")
turned, right = [], []
for name in ("DPMSolverMultistep", "DPMSolverSinglestep", "UniPCMultistep", "DEISMultistep", "DDPM", "DDIM", "PNDM",
             "EulerDiscrete", "EulerAncestralDiscrete", "HeunDiscrete", "LMSDiscrete", "KDPM2Discrete", "SASolver",
             "LCM"):
    scheduler = getattr(diffusers, f"{name}Scheduler")(**common)
    found = shares(scheduler)
    kind = right if torch.allclose(found, exact[TIMES], atol=2e-3) else turned
    kind.append(name)
    if kind is turned:
        assert torch.allclose(found, exact[999 - TIMES], atol=2e-3), f"changed: {name}"
    print(f"{name}, new: noise {rounded(found)}", "" if kind is right else "that of 999 - t")
assert turned == ["DPMSolverMultistep", "DPMSolverSinglestep", "UniPCMultistep", "DEISMultistep"], "changed: which"

for name in turned:
    scheduler = getattr(diffusers, f"{name}Scheduler")(**common)
    assert scheduler.timesteps[0] > scheduler.timesteps[-1] and scheduler.sigmas[0] < scheduler.sigmas[-1]
    scheduler.set_timesteps(1000)
    every = shares(scheduler)
    scheduler.set_timesteps(20)
    on, off = scheduler.timesteps[[3, 9]], TIMES
    kept, wrong = shares(scheduler, on), shares(scheduler, off)
    print(f"{name}: after set_timesteps(1000) {rounded(every)}; after set_timesteps(20) on its grid, {on.tolist()}, "
          f"{rounded(kept)} of {rounded(exact[on.long()])}; at {off.tolist()} {rounded(wrong)}")
    assert torch.allclose(every, exact[TIMES], atol=0.02), f"changed: {name} with all timesteps"
    assert torch.allclose(kept, exact[on.long()], atol=0.02) and wrong[-1] < 0.5, f"changed: {name} with 20 timesteps"
for name in ("DPMSolverMultistep", "UniPCMultistep"):
    scheduler = getattr(diffusers, f"{name}Scheduler")(use_flow_sigmas=True, prediction_type="flow_prediction")
    level = scheduler.add_noise(torch.zeros(4, 1), torch.ones(4, 1), TIMES).flatten()
    print(f"{name} of a flow, new: the noise is multiplied by {rounded(level)}, right would be {rounded(TIMES / 1000)}")
    assert level[0] > 100, f"changed: {name} of a flow"
print("as described: add_noise of a new DPM-Solver, UniPC or DEIS scheduler turns the times round")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py"
