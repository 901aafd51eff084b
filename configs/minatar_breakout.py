"""Breakout of MinAtar, 10x10 booleans: what pixels ask of a learner, on a CPU.

  python -m launchers.local --config=configs/minatar_breakout.py --link=rtt_ms=50,rate_mbit=20

Time: some seven minutes on 2 cores for 600 thousand environment steps and 75 thousand updates.
Score: mean greedy return over 20 episodes of 12 to 20 from the fourth minute on (seed 1); untrained 0.4.

The network (16 filters of 3x3, 128 units), replay of 100,000, first sample at 5,000 transitions, target copied every
1,000 updates, step size 2.5e-4, discount 0.99 and sticky actions are those of MinAtar's DQN (Young & Tian 2019), the
optimizer is Adam instead of its RMSProp. Prioritized replay, n-step 3, double and dueling targets and the exploration
ladder are Ape-X's (Horgan et al. 2018). `--config.env.id=MinAtar/Freeway-v1` and the like plays the other games:
Asterix, Freeway, Seaquest and SpaceInvaders.
"""

from ml_collections import config_dict

from longhaul import config as config_lib


def get_config() -> config_dict.ConfigDict:
    config = config_lib.default()
    config.env.id = "MinAtar/Breakout-v1"
    config.agent.network = "minatar"
    config.agent.hidden = (128,)
    config.replay.min_size = 5_000
    config.learner.minibatches_per_pull = 8
    config.learner.learning_rate = 2.5e-4
    config.learner.target_period_updates = 1_000
    config.learner.max_updates = 200_000
    config.evaluation.period_s = 30.0
    return config
