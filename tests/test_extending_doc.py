"""The objective that docs/extending.md shows, as it stands there."""

import re
from pathlib import Path

import pytest
from helpers import make_data, make_module, make_trainer, weights

from lit_vgrpo.core.types import RolloutSpec

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"


def shown_objective():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    (code,) = [block for block in blocks if "(Objective)" in block]
    return code


@pytest.mark.slow
def test_the_objective_of_the_page_trains_and_costs_what_it_says(tiny_sd3, tmp_path):
    names: dict = {}
    exec(shown_objective(), names)
    objective = names["BetterOnes"](RolloutSpec(steps=2), temperature=0.5)
    module, data = make_module(tiny_sd3, objective, policy_options={"lora_rank": 2}), make_data()
    module.configure_model()
    before = weights(module)
    make_trainer(tmp_path, 1).fit(module, datamodule=data)
    assert any(not value.equal(before[name]) for name, value in weights(module).items())
    assert module.ledger.counts["update"]["with_grad"] == 2 * 8
    expected = objective.passes_per_image(data.sizes)
    assert module.ledger.training_passes() == pytest.approx(sum(expected.values()) * 8)
