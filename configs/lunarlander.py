"""LunarLander-v3 from its state vector.

  python -m launchers.local --config=configs/lunarlander.py --link=rtt_ms=50,rate_mbit=20

Time: about a minute on 2 cores (62 and 63 s and 71 and 70 thousand environment steps with seeds 1 and 2).
Score: mean greedy return over 20 episodes at least 200, where the run ends as solved.

The 256x256 network, learning rate 6.3e-4, batch 128, replay of 50,000, target copied every 250 updates and discount
0.99 are those of RL Baselines3 Zoo's DQN for LunarLander (hyperparams/dqn.yml), which makes four times as many updates:
`--config.replay.samples_per_insert=128` does so too, takes half the environment steps and twice the time.
Prioritized replay, n-step 3, double and dueling targets and the exploration ladder are Ape-X's (Horgan et al. 2018).
"""

from ml_collections import config_dict

from longhaul import config as config_lib


def get_config() -> config_dict.ConfigDict:
    config = config_lib.default()
    config.env.id = "LunarLander-v3"
    config.replay.capacity = 50_000
    config.replay.samples_per_insert = 32.0
    config.learner.batch_size = 128
    config.learner.minibatches_per_pull = 8
    config.learner.learning_rate = 6.3e-4
    config.learner.target_period_updates = 250
    config.learner.max_updates = 100_000
    config.evaluation.max_steps = 1_000
    config.evaluation.target_return = 200.0
    return config
