"""One actor process of a site: steps its environments and sends their experience to the site's buffer node.

  python -m launchers.actor --config=configs/cartpole.py --gateway=127.0.0.1:7720 --actor_index=0

Waits for the buffer node if it is not there yet, and goes on acting on its weights while the learner is away. Needs
neither Reverb nor TensorFlow: it also runs where those do not.
"""

from absl import flags
from ml_collections import config_dict

from launchers import command_line, connection, exporting
from longhaul import workers
from longhaul.errors import ConfigError

_ACTOR_INDEX = flags.DEFINE_integer(
    "actor_index", 0, "this actor's place on the exploration ladder, below config.actor.num_actors", lower_bound=0
)
flags.adopt_module_key_flags(command_line)
flags.adopt_module_key_flags(exporting)
flags.adopt_module_key_flags(connection)


def main(config: config_dict.ConfigDict, signals: workers.StopSignals) -> None:
    index = _ACTOR_INDEX.value
    if index >= config.actor.num_actors:
        raise ConfigError(
            f"--actor_index is {index}, and must be below config.actor.num_actors ({config.actor.num_actors})"
        )
    if config.actor.probe_share and command_line.workdir() is None:
        raise ConfigError("config.actor.probe_share needs --workdir, where the held-out transitions are kept")
    address, credentials = connection.to_gateway("actor")
    from longhaul.actor import Actor
    from longhaul.site_client import SiteClient

    site = SiteClient(address, "actor", signals.stop, credentials)
    workdir = command_line.workdir()
    metrics = exporting.writer(workdir, f"actor_{index}", config.metrics.tensorboard)
    try:
        Actor(config, index, site, metrics, signals.stop, workdir=workdir).run()
    finally:
        site.close()
        metrics.close()


if __name__ == "__main__":
    command_line.run(main, "actor")
