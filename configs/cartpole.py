"""CartPole-v1 from its state vector: the newcomer's run.

  python -m launchers.local --config=configs/cartpole.py --link=rtt_ms=50,rate_mbit=20     (`make train`)

Time: half a minute on 2 cores (seeds 1 to 4: 18 to 36 s), some ten seconds of it starting processes.
Score: mean greedy return over 20 episodes at least 475 (of 500), where the run ends as solved.

The 256x256 network, batch 64, an update for every two environment steps, replay of 100,000, first sample at 1,000
transitions and discount 0.99 are those of RL Baselines3 Zoo's DQN for CartPole-v1 (hyperparams/dqn.yml). Prioritized
replay, n-step 3, double and dueling targets and the exploration ladder are Ape-X's (Horgan et al. 2018). The rest was
tuned for time on 2 cores.
"""

from ml_collections import config_dict

from longhaul import config as config_lib


def get_config() -> config_dict.ConfigDict:
    config = config_lib.default()
    config.env.id = "CartPole-v1"
    config.replay.samples_per_insert = 32.0
    config.learner.minibatches_per_pull = 8
    config.evaluation.target_return = 475.0
    return config
