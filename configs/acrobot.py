"""Acrobot-v1 from its state vector: a reward of -1 a step until the tip is high enough.

  python -m launchers.local --config=configs/acrobot.py --link=rtt_ms=50,rate_mbit=20

Time: half a minute on 2 cores (seeds 1 to 3, without a link: 23 to 34 s and 23 to 40 thousand environment steps).
Score: mean greedy return over 20 episodes at least -100, where the run ends as solved; at worst -500.

The 256x256 network, learning rate 6.3e-4, batch 128, replay of 50,000, target copied every 250 updates and discount
0.99 are those of RL Baselines3 Zoo's DQN for Acrobot-v1 (hyperparams/dqn.yml), which makes four times as many updates.
Prioritized replay, n-step 3, double and dueling targets and the exploration ladder are Ape-X's (Horgan et al. 2018).
"""

from ml_collections import config_dict

from longhaul import config as config_lib


def get_config() -> config_dict.ConfigDict:
    config = config_lib.default()
    config.env.id = "Acrobot-v1"
    config.replay.capacity = 50_000
    config.replay.samples_per_insert = 32.0
    config.learner.batch_size = 128
    config.learner.minibatches_per_pull = 8
    config.learner.learning_rate = 6.3e-4
    config.learner.target_period_updates = 250
    config.learner.max_updates = 100_000
    config.evaluation.max_steps = 500
    config.evaluation.target_return = -100.0
    return config
