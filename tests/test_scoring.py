"""Scores of what has crossed the link: by hand, and the learner's own."""

import jax
import numpy as np
import pytest

from longhaul import networks, scoring
from longhaul.types import Batch
from tests.memory_link import SPEC, Run, make_config, writers_closed  # noqa: F401 (a fixture)


def random_transitions(count, seed=0):
    rng = np.random.default_rng(seed)
    return (
        rng.standard_normal((count, 2 * SPEC.stack, *SPEC.row_shape)).astype(np.float32),
        rng.integers(0, SPEC.num_actions, count).astype(np.int32),
        rng.standard_normal(count).astype(np.float32),
        rng.choice([0.0, 0.729], count).astype(np.float32),
    )


def by_hand(config, params, rows, actions, returns, discounts):
    network = networks.make_network(SPEC, config)
    q_tm1 = np.asarray(network.apply(params, rows[:, : SPEC.stack]))
    q_t = np.asarray(network.apply(params, rows[:, SPEC.stack :]))
    errors = np.abs(returns + discounts * q_t.max(axis=1) - q_tm1[np.arange(len(actions)), actions])
    losses = np.where(errors <= 1, errors**2 / 2, errors - 0.5)
    return errors + config.replay.priority_epsilon, losses


@pytest.mark.parametrize("double", [True, False])
def test_a_score_is_the_td_errors_size_and_hubers_loss_under_one_network(double):
    config = make_config(**{"agent.double": double, "replay.priority_epsilon": 0.25})
    params = networks.init_params(networks.make_network(SPEC, config), SPEC, 5)
    transitions = random_transitions(50)
    found = scoring.Scorer(SPEC, config).score(params, *transitions)
    for one, expected in zip(found, by_hand(config, params, *transitions)):
        np.testing.assert_allclose(one, expected, rtol=1e-4)


def test_a_tally_keeps_first_crossings_apart_and_begins_anew_when_read():
    tally = scoring.ArrivalTally()
    tally.add(np.array([1.0, 2.0, 6.0], np.float32), np.array([True, False, True]))
    tally.add(np.array([3.0], np.float32), np.array([[False]]))
    assert tally.read() == {
        "arrival_priority": 3.0,
        "arrival_draws": 4,
        "arrival_priority_first": 3.5,
        "arrival_first_crossings": 2,
    }
    assert np.isnan(tally.read()["arrival_priority"])
    tally.add(np.array([5.0], np.float32), np.zeros(0, np.bool_))
    found = tally.read()
    assert found["arrival_priority"] == 5.0 and found["arrival_first_crossings"] == 0


@pytest.mark.parametrize("asked", [True, False])
def test_a_learner_scores_each_batch_before_it_trains_on_it_if_asked(tmp_path, asked):
    config = make_config(**{"metrics.score_transfers": asked, "learner.max_updates": 2})
    batches: list[Batch] = []

    def mark(batch):
        marked = batch._replace(first_crossings=np.arange(batch.actions.size).reshape(batch.actions.shape) % 2 == 0)
        batches.append(marked)
        return marked

    run = Run(tmp_path, config, change=mark)
    line = run.lines[-1]
    if not asked:
        assert "arrival_priority" not in line
        return
    (batch,) = batches
    params = jax.device_get(networks.init_params(networks.make_network(SPEC, config), SPEC, config.seed))
    rows = run.link.rows[batch.slots.reshape(-1, 2 * SPEC.stack)]
    columns = (column.reshape(-1) for column in (batch.actions, batch.returns, batch.discounts))
    priorities, _ = by_hand(config, params, rows, *columns)
    assert line["arrival_draws"] == batch.actions.size and line["arrival_first_crossings"] == batch.actions.size // 2
    assert line["arrival_priority"] == pytest.approx(priorities.mean(), rel=1e-4)
    assert line["arrival_priority_first"] == pytest.approx(priorities[::2].mean(), rel=1e-4)
