"""The existing approach's far end of the link: takes a site's experience as it comes into a replay beside the learner.

  python -m launchers.buffer --config=configs/cartpole.py --port=7730                           (beside the learner)
  python -m launchers.forward --config=configs/cartpole.py --gateway=SITE:7720 --cloud_gateway=127.0.0.1:7730
  python -m launchers.learner --config=configs/cartpole.py --gateway=127.0.0.1:7730

The site's buffer node runs with --order=arrival. `python -m launchers.local --replay=learner` starts all of it.
"""

import time

from absl import flags
from ml_collections import config_dict

from launchers import command_line, connection, exporting, link_flags
from longhaul import security, workers

_CLOUD_GATEWAY = flags.DEFINE_string(
    "cloud_gateway", "127.0.0.1:7730", "the gateway of the buffer node beside the learner, HOST:PORT on the loopback"
)
flags.adopt_module_key_flags(command_line)
flags.adopt_module_key_flags(exporting)
flags.adopt_module_key_flags(connection)
flags.adopt_module_key_flags(link_flags)


def main(config: config_dict.ConfigDict, signals: workers.StopSignals) -> None:
    address, credentials = connection.to_gateway("learner")
    host, _ = command_line.parse_address(_CLOUD_GATEWAY.value, "cloud_gateway")
    security.check_plaintext(host, None, False, "--cloud_gateway")
    from longhaul.forwarder import Forwarder  # brings JAX: not for --help or a mistyped flag
    from longhaul.site_client import SiteClient

    metrics = exporting.writer(command_line.workdir(), "forwarder", config.metrics.tensorboard)
    replay_site = SiteClient(_CLOUD_GATEWAY.value, "actor", signals.stop)
    link = link_flags.client(config, address, credentials, signals.stop)
    try:
        spec = link.describe().spec
        Forwarder(config, spec, link, replay_site, metrics, signals.stop, time.time_ns() // 1_000_000).run()
    finally:
        link.close()
        replay_site.close()
        metrics.close()


if __name__ == "__main__":
    command_line.run(main, "forward")
