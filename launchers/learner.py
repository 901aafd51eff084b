"""The learner, at the far end of the link: draws batches from the site's replay and trains on them.

  python -m launchers.learner --config=configs/cartpole.py --gateway=127.0.0.1:7720 --workdir=runs/mine

Waits for the site if it is not there yet. Goes on from the newest checkpoint in --workdir if there is one. Runs in an
environment without TensorFlow, Reverb or gymnasium (requirements/learner.lock).
"""

import time

from absl import flags, logging
from ml_collections import config_dict

from launchers import command_line, connection, exporting, link_flags
from longhaul import workers

flags.adopt_module_key_flags(command_line)
flags.adopt_module_key_flags(exporting)
flags.adopt_module_key_flags(connection)
flags.adopt_module_key_flags(link_flags)


def main(config: config_dict.ConfigDict, signals: workers.StopSignals) -> None:
    address, credentials = connection.to_gateway("learner")
    import orbax.checkpoint  # noqa: F401 (takes a second or more: now, not amid training or an orderly stop)

    from longhaul.learner import Learner  # brings JAX: not for --help or a mistyped flag

    workdir = command_line.workdir_or_new()
    workdir.mkdir(parents=True, exist_ok=True)
    logging.info("the run's folder is %s", workdir)
    metrics = exporting.writer(workdir, "learner", config.metrics.tensorboard)
    link = link_flags.client(config, address, credentials, signals.stop)
    try:
        spec = link.describe().spec
        # Grows with each start on any host with a clock, so that a restarted learner's weights win at the site.
        epoch = time.time_ns() // 1_000_000
        Learner(config, spec, link, metrics, workdir, signals.stop, epoch).run()
    finally:
        link.close()
        metrics.close()


if __name__ == "__main__":
    command_line.run(main, "learner")
