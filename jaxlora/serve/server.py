"""The object that holds the parts of a server. Routes are made with it."""

import dataclasses

from jaxlora.config.serve_config import ServeConfig
from jaxlora.serve.database import Database
from jaxlora.serve.hub import Hub
from jaxlora.serve.ids import Ids
from jaxlora.serve.jobs.jobs import Jobs
from jaxlora.serve.keys import Keys
from jaxlora.serve.limits import Limits
from jaxlora.serve.registry import Registry
from jaxlora.serve.storage import Links, Storage


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Server:
    """The parts of a server, which its routes use.

    Attributes:
        config: Its settings.
        database: Its database.
        ids: Makes ids, which tell the engine.
        hub: Runs operations of models.
        registry: What tenants have.
        keys: Their keys.
        storage: Files of checkpoints and uploads.
        limits: Limits and quotas.
        links: Signs links for downloads.
        jobs: Trains the jobs of tenants, by operations of the hub.
    """

    config: ServeConfig
    database: Database
    ids: Ids
    hub: Hub
    registry: Registry
    keys: Keys
    storage: Storage
    limits: Limits
    links: Links
    jobs: Jobs
