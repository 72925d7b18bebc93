"""The cost of stages: sums over units, a parameter once a stage, and cuts that do not divide refused."""

from dataclasses import replace

import pytest

from shoal.decide.cost import Link, ModelCost, Unit, parameter_bytes, stage_costs
from shoal.decide.footprint import Activations
from shoal.errors import UsageError

UNITS = (
    Unit(
        name="embeddings", forward_s=1, backward_s=2, parameters=(("table", 100), ("norm", 4)), saved_bytes=10
    ),
    Unit(name="layer.0", forward_s=3, backward_s=5, parameters=(("layer.0", 40),), saved_bytes=70),
    Unit(name="layer.1", forward_s=4, backward_s=7, parameters=(("layer.1", 50),), saved_bytes=80),
    Unit(name="head", forward_s=2, backward_s=3, parameters=(("table", 100),), saved_bytes=20),
)
COST = ModelCost(units=UNITS, relay_bytes=(8, 16, 32))


def test_a_stage_is_the_sum_of_its_units():
    first, second = stage_costs(COST, [2])
    assert (first.forward_s, first.backward_s, first.saved_bytes) == (4, 7, 80)
    assert (second.forward_s, second.backward_s, second.saved_bytes) == (6, 10, 100)
    assert (first.relay_bytes, second.relay_bytes) == (16, 0)
    assert (first.parameter_bytes, second.parameter_bytes) == (144, 150)


def test_a_tied_parameter_counts_once_in_a_stage_and_in_every_stage_that_uses_it():
    (whole,) = stage_costs(COST, [])
    assert whole.parameter_bytes == 100 + 4 + 40 + 50
    assert [stage.parameter_bytes for stage in stage_costs(COST, [1, 2, 3])] == [104, 40, 50, 100]
    assert parameter_bytes([UNITS[0], UNITS[3]]) == 104


def test_larger_micro_batches_cost_in_proportion_and_parameters_stay():
    scaled = COST.scaled(2.5)
    (stage,) = stage_costs(scaled, [])
    assert (stage.forward_s, stage.backward_s, stage.saved_bytes) == (25.0, 42.5, 450)
    assert scaled.relay_bytes == (20, 40, 80)
    assert replace(COST, recomputed_bytes=8).scaled(2.5).recomputed_bytes == 20
    assert stage.parameter_bytes == 194


def test_counted_activations_are_shared_and_copies_of_weights_do_not_grow():
    """Of 180 bytes the second layer keeps 80; of 294 bytes of parameters in all units it has 50."""
    kept = COST.keeping(Activations(sample_bytes=900, fixed_bytes=2_940), 2)
    assert kept.units[2].saved_bytes == 2 * 900 * 80 // 180 + 2_940 * 50 // 294
    (whole,) = stage_costs(kept, [])
    (grown,) = stage_costs(kept.scaled(4), [])
    assert (whole.saved_bytes, grown.saved_bytes) == (2 * 900 + 2_940, 8 * 900 + 2_940)
    again = Activations(sample_bytes=900, once_sample_bytes=70, once_fixed_bytes=5)
    assert COST.keeping(again, 2).recomputed_bytes == 145


def test_a_message_takes_latency_and_bytes_and_none_takes_nothing():
    link = Link(bytes_per_s=1000.0, latency_s=0.5)
    assert link.seconds(250) == 0.75
    assert link.seconds(0) == 0.0


@pytest.mark.parametrize("cuts", [[0], [4], [2, 2], [3, 1], [-1], [1, 5]])
def test_cuts_that_do_not_divide_are_refused(cuts):
    with pytest.raises(UsageError, match=r"do not divide 4 units: they must grow and lie between 1 and 3"):
        stage_costs(COST, cuts)


def test_a_cost_that_does_not_fit_together_is_refused():
    with pytest.raises(UsageError, match="4 units and 2 relay_bytes; it needs one for each of the 3 places"):
        ModelCost(units=UNITS, relay_bytes=(8, 16))
    with pytest.raises(UsageError, match="no units"):
        ModelCost(units=(), relay_bytes=())
