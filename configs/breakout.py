"""Breakout from pixels (Arcade Learning Environment), with the standard preprocessing.

  python -m launchers.local --config=configs/breakout.py --link=rtt_ms=50,rate_mbit=100

Time: days on 2 cores, since the published score took 200 million frames; a GPU and more actors shorten it.
Score: 417.5 for Rainbow at that length (Hessel et al. 2018, no-op starts). A run of minutes shows a return that
starts to rise, no more.

Preprocessing as in Mnih et al. 2015, set out by Machado et al. 2018: 4 frames an action, the maximum of the last two,
grey, 84x84, 4 frames stacked, rewards clipped to their sign, up to 30 no-ops at the start, no sticky actions. Network:
the Nature CNN, dueling. From Rainbow (Hessel et al. 2018): Adam at 6.25e-5 with epsilon 1.5e-4, n-step 3. From Ape-X
(Horgan et al. 2018): priority exponent 0.6, exploration ladder, target copied every 2,500 updates, gradient norm 40.
The batch is a quarter of Ape-X's 512 and replay a twentieth of its 2 million, so that 2 cores can follow.
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
