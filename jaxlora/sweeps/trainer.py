"""The trainer of a run, which may be a sweep."""

from jaxlora.config import RunConfig
from jaxlora.errors import ConfigError
from jaxlora.hf.load import FrozenModel
from jaxlora.sweeps.control import SweepControl
from jaxlora.sweeps.ranking import SweepReport
from jaxlora.train.trainer import RunTrainer


class Trainer(RunTrainer[SweepReport]):
    """Trains the jobs of a run together, each exactly as if it were alone.

    If the run is a sweep, its rules decide which jobs end early, and which follow.

    Attributes:
        model: The frozen base.
        jobs: The jobs, in the order in which they were given.
        reader: Reads the data of jobs, with the tokenizer of the base.
        output_dir: Folder of the run.
    """

    def __init__(
        self,
        config: RunConfig,
        model: FrozenModel | None = None,
        *,
        replan: bool = False,
    ):
        """Loads the base model and every job's data; trains nothing yet.

        The programs of the run are loaded or compiled meanwhile. They are kept in
        ~/.cache/jaxlora, unless JAX's settings of the compilation cache say otherwise.

        Args:
            config: The run.
            model: The base model, if it is loaded already.
            replan: If the run has begun, choose what is `auto` anew for the jobs that
                have not ended; otherwise, what was chosen when it began stays.

        Raises:
            JaxloraError: A setting, the model or a job's data cannot be used, a GPU is
                visible and JAX does not use it, or the sweep has several groups.
        """
        if config.sweep is not None and config.sweep.has_groups:
            raise ConfigError(
                f"sweep.groups is {config.sweep.groups_text}, and a Trainer trains one "
                "group. Call jaxlora.sweeps.engine.run.run_groups(config), or run "
                "jaxlora sweep."
            )
        super().__init__(config, model, SweepControl(config), replan=replan)
