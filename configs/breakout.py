"""Breakout from pixels (Arcade Learning Environment), with the standard preprocessing.

  python -m launchers.local --config=configs/breakout.py --link=rtt_ms=50,rate_mbit=100

Time: days on 2 cores, since the published score took 200 million frames; a GPU and more actors shorten it.
Score: 417.5 for Rainbow at that length (Hessel et al. 2018, no-op starts). A run of minutes shows a return that
starts to rise, no more.

Preprocessing as in Mnih et al. 2015, set out by Machado et al. 2018: 4 frames an action, the maximum of the last two,
grey, 84x84, 4 frames stacked, rewards clipped to their sign, up to 30 no-ops at the start, no sticky actions. Network:
the Nature CNN, dueling. From Rainbow (Hessel et al. 2018): batch 32, 8 samples drawn per step, first sample at 20,000,
Adam at 6.25e-5 with epsilon 1.5e-4, n-step 3, priority exponent 0.5, target copied every 8,000 steps (2,000 updates).
From Ape-X (Horgan et al. 2018): the exploration ladder. Replay is a tenth of Rainbow's million. With a GPU, Ape-X's
batch of 512 makes better use of it: --config.learner.batch_size=512.
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
    config.actor.groups = 2  # the network takes as long as the game
    config.agent.network = "nature"
    config.agent.hidden = (512,)
    config.replay.capacity = 100_000
    config.replay.min_size = 20_000
    config.replay.priority_exponent = 0.5
    config.replay.beta_updates = 5_000_000
    config.learner.batch_size = 32
    config.learner.learning_rate = 6.25e-5
    config.learner.adam_epsilon = 1.5e-4
    config.learner.target_period_updates = 2_000
    config.learner.max_updates = 5_000_000
    config.learner.cache_bytes = 1 * 2**30
    config.evaluation.episodes = 5
    config.evaluation.period_s = 300.0
    return config
