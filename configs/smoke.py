"""CartPole-v1, as short as a run of all parts can be: for tests and for looking around.

  python -m launchers.local --config=configs/smoke.py

Time: some 20 seconds on 2 cores, most of it starting processes. Score: none to expect; it learns for 200 updates.
"""

from ml_collections import config_dict

from longhaul import config as config_lib


def get_config() -> config_dict.ConfigDict:
    config = config_lib.default()
    config.env.id = "CartPole-v1"
    config.env.num_envs = 2
    config.agent.hidden = (32, 32)
    config.replay.capacity = 5_000
    config.replay.min_size = 200
    config.learner.batch_size = 32
    config.learner.minibatches_per_pull = 4
    config.learner.max_updates = 200
    config.learner.publish_period_updates = 20
    config.learner.cache_bytes = 2**20
    config.evaluation.episodes = 2
    config.evaluation.max_steps = 200
    config.evaluation.period_s = 1.0
    config.metrics.period_s = 0.2
    config.metrics.tensorboard = False
    return config
