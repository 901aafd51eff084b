"""Pong from pixels (Arcade Learning Environment): Breakout's settings, on another game.

  python -m launchers.local --config=configs/pong.py --link=rtt_ms=50,rate_mbit=100

Time: days on 2 cores, since the published score took 200 million frames; a GPU and more actors shorten it.
Score: 20.9 (of 21) for Rainbow at that length (Hessel et al. 2018, no-op starts).

Preprocessing, network and hyperparameters, and where they come from: configs/breakout.py.
"""

from ml_collections import config_dict

from configs import breakout


def get_config() -> config_dict.ConfigDict:
    config = breakout.get_config()
    config.env.id = "ALE/Pong-v5"
    return config
