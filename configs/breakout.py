"""Breakout from pixels (Arcade Learning Environment), with the standard preprocessing.

  python -m launchers.local --config=configs/breakout.py --link=rtt_ms=50,rate_mbit=100

Time: days on 2 cores; the published scores took 50 million agent steps. A GPU for the learner and more actors shorten it.
Score: Rainbow reports 379.5 for the prioritized double DQN and 417.5 for itself (Hessel et al. 2018, table 6, no-op
starts, median human-normalised protocol); short runs here show a return that rises, no more.

Preprocessing as in Mnih et al. 2015, set out by Machado et al. 2018: 4 frames an action, maximum over two frames, grey, 84x84,
4 frames stacked, rewards clipped to their sign, up to 30 no-ops at the start, no sticky actions. Network: Nature CNN,
dueling. Learner: Adam at 6.25e-5 with epsilon 1.5e-4, n-step 3, importance weights from 0.4 to 1 (Rainbow); batch,
priority exponent 0.6, exploration ladder and target period in updates as Ape-X (Horgan et al. 2018), the batch a quarter of its 512 so that
2 cores can follow.
"""

from ml_collections import config_dict

from longhaul import config as config_lib


def get_config() -> config_dict.ConfigDict:
    config = config_lib.default()
    config.env.id = "ALE/Breakout-v5"
    # The preprocessing skips frames itself, so the environment must not.
    config.env.kwargs = config_dict.ConfigDict({"frameskip": 1, "repeat_action_probability": 0.0})
    config.env.stack = 4
    config.env.atari.preprocess = True
    config.agent.network = "nature"
    config.agent.hidden = (512,)
    config.replay.capacity = 100_000
    config.replay.min_size = 10_000
    config.replay.beta_updates = 1_000_000
    config.learner.batch_size = 128
    config.learner.learning_rate = 6.25e-5
    config.learner.adam_epsilon = 1.5e-4
    config.learner.max_grad_norm = 40.0
    config.learner.target_period_updates = 2_500
    config.learner.max_updates = 5_000_000
    config.learner.cache_bytes = 1 * 2**30
    config.evaluation.episodes = 5
    config.evaluation.period_s = 300.0
    return config
