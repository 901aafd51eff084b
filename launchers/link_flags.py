"""The flags of the long-haul link, read by its far end and passed on to it by `local`."""

import random
import threading

from absl import flags
from ml_collections import config_dict

from longhaul.link import LinkClient
from longhaul.security import Credentials

BUDGET = flags.DEFINE_float(
    "link_budget", 0.0, "bytes/s that the link may carry in each direction; 0 is no limit", lower_bound=0.0
)
DEADLINE_S = flags.DEFINE_float(
    "link_deadline_s", 0.0, "give up after an outage of this many seconds; 0 tries for ever", lower_bound=0.0
)


def arguments() -> list[str]:
    """Returns the link's flags as words for a learner's command line."""
    return [f"--link_budget={BUDGET.value}", f"--link_deadline_s={DEADLINE_S.value}"]


def client(
    config: config_dict.ConfigDict, address: str, credentials: Credentials | None, stop: threading.Event
) -> LinkClient:
    """Returns the far end of the link to a site, as the flags have it."""
    return LinkClient(
        address,
        config,
        random.getrandbits(64),
        stop,
        deadline_s=DEADLINE_S.value or None,
        credentials=credentials,
        budget_bytes_per_s=BUDGET.value,
    )
