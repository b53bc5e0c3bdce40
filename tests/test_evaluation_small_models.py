"""The drift report of the models that ship."""

from __future__ import annotations

import pytest

from mamba_checkpoint_cache.evaluation.options import EvalOptions
from mamba_checkpoint_cache.evaluation.run import run
from mamba_checkpoint_cache.small_models import SMALL_MODELS


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL_MODELS)
def test_int8_is_good_enough_for_it(name: str) -> None:
    """Without a codec the KL is 0; with int8 it is within the budget, and recall is the uncached one within its interval."""
    result = run(EvalOptions(model=name, prompt_count=6))

    assert {row["kl_mean"] for row in result["rows"] if row["codec"] == "none"} == {0.0}
    assert {row["task"] for row in result["rows"]} == {"text", "recall"}
    assert result["verdict"]["within"]
    assert result["verdict"]["control"]["sound"]
    for recall in result["recall"].values():
        assert recall["ci"][0] <= recall["uncached"] <= recall["ci"][1]
    assert abs(result["bits_per_byte"]["int8"]["cached"] - result["bits_per_byte"]["none"]["cached"]) < 0.01
