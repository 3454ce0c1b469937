"""The jobs of tenants as the database has them, and the lines of their metrics."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import sqlalchemy as sa
import sqlalchemy.exc

from jaxlora.common.job_name import is_plain_name
from jaxlora.config import LoraJob
from jaxlora.run.job_progress import JobProgress
from jaxlora.run.saved_fields import type_adapter
from jaxlora.serve.database import Database, metadata
from jaxlora.serve.ids import ONLY, Ids
from jaxlora.serve.registry import Taken

_JOBS = sa.Table(
    "jobs",
    metadata,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("tenant", sa.String(63), nullable=False, index=True),
    sa.Column("state", sa.Text, nullable=False),
)
_LINES = sa.Table(
    "job_metrics",
    metadata,
    sa.Column("job", sa.String(32), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("line", sa.Text, nullable=False),
)
_NAMES = sa.Table(
    "job_names",
    metadata,
    sa.Column("tenant", sa.String(63), primary_key=True),
    sa.Column("name", sa.String(200), primary_key=True),
    sa.Column("job", sa.String(32), nullable=False, unique=True),
    sa.Column("is_over", sa.Boolean, nullable=False),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """A tenant's request to stop or to pause a job.

    Attributes:
        reason: Is shown with the job's status.
        at: Optimizer steps after which it takes effect. They were submitted before it
            was made, and a job that continues after a crash submits them again.
    """

    reason: str
    at: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Copy:
    """A copy of a job's whole state that another job starts from.

    Attributes:
        job: Id of the other job.
        at: Optimizer steps that it has.
    """

    job: str
    at: int


@dataclasses.dataclass(kw_only=True, eq=False)
class Job:
    """A job of a tenant.

    Attributes:
        id: Its id, 128 random bits in hexadecimal digits; also that of its model.
        tenant: The tenant that owns it.
        settings: Its settings as the tenant gave them: data by their names.
        created_at: When it was made, in Unix seconds.
        num_steps: Its optimizer steps.
        batch_tokens: Mean number of tokens of a global batch.
        rank: Largest rank of its modules.
        num_modules: Number of linears that it adapts.
        fingerprint: Hash of its training samples.
        progress: Its progress, which is that of the operations before `next_seq`.
        next_seq: Number of the first operation of its model that is not done.
        num_lines: Lines of its metrics.
        stop: The request to stop it; None: there is none.
        pause: The request to pause it; None: there is none.
        copies: Copies that are to be made.
        is_ready: Whether the copy that it starts from is there; true if it is none.
        adapter: Key of its exported adapter in the storage; None: there is none.
    """

    id: str
    tenant: str
    settings: LoraJob
    created_at: float
    num_steps: int
    batch_tokens: float
    rank: int
    num_modules: int
    fingerprint: str
    progress: JobProgress = dataclasses.field(default_factory=JobProgress)
    next_seq: int = 1
    num_lines: int = 0
    stop: Asked | None = None
    pause: Asked | None = None
    copies: tuple[Copy, ...] = ()
    is_ready: bool = True
    adapter: str | None = None

    @property
    def name(self) -> str:
        """Its name, which is unique among the tenant's jobs."""
        return self.settings.name

    @property
    def key(self) -> tuple[str, str]:
        """Its tenant and its name, whose case does not count."""
        return self.tenant, self.name.lower()

    def file(self, name: str, job: str | None = None) -> str:
        """Returns the key in the storage of a file or folder.

        Args:
            name: Its name.
            job: Id of the job, of the same tenant; None: this one.
        """
        return f"{self.tenant}/jobs/{job or self.id}/{name}"

    def update(self, **changes: Any) -> None:
        """Changes some fields of its progress."""
        self.progress = dataclasses.replace(self.progress, **changes)


def is_of_job(model: str) -> bool:
    """Whether a model of the hub is that of a job, or its reference, by its id.

    Ids of clients' models have colons.
    """
    return ":" not in model


class JobTable:
    """The jobs of all tenants in the database.

    An engine runs its own jobs, and reads those of others.
    """

    def __init__(self, database: Database, ids: Ids = ONLY):
        """Makes the object; `ids` are those of this engine."""
        self._database, self._ids = database, ids

    def load(self) -> list[Job]:
        """Returns the jobs of this engine, the oldest first."""
        jobs = self._read(self._ids.are_in(_JOBS.c.id))
        with self._database.reading() as connection:
            named = {*connection.scalars(sa.select(_NAMES.c.job))}
        # An earlier version has made those without one.
        if missing := [_name(job) for job in jobs if job.id not in named]:
            with self._database.writing() as connection:
                connection.execute(_NAMES.insert(), missing)
        return jobs

    def others(self, tenant: str) -> list[Job]:
        """Returns a tenant's jobs on other engines, the oldest first."""
        is_others = sa.not_(self._ids.are_in(_JOBS.c.id))
        return self._read(sa.and_(_JOBS.c.tenant == tenant, is_others))

    def find(self, tenant: str, name: str) -> Job | None:
        """Returns a tenant's job on any engine; None: there is none."""
        if (id := self.id_of(tenant, name)) is None:
            return None
        return next(iter(self._read(_JOBS.c.id == id)), None)

    def id_of(self, tenant: str, name: str) -> str | None:
        """Returns the id of a tenant's job on any engine; None: there is none."""
        c = _NAMES.c
        if not is_plain_name(name):
            return None
        found = sa.select(c.job).where(c.tenant == tenant, c.name == name.lower())
        with self._database.reading() as connection:
            return connection.scalar(found)

    def live(self) -> dict[str, str]:
        """Returns the tenants of all jobs that have not ended, by their ids."""
        c = _NAMES.c
        with self._database.reading() as connection:
            rows = connection.execute(
                sa.select(c.job, c.tenant).where(sa.not_(c.is_over))
            )
            return {row.job: row.tenant for row in rows}

    def _read(self, which: sa.ColumnElement[bool]) -> list[Job]:
        read = type_adapter(Job)
        with self._database.reading() as connection:
            rows = connection.execute(sa.select(_JOBS.c.state).where(which)).all()
        jobs = [read.validate_json(row.state) for row in rows]
        return sorted(jobs, key=lambda job: job.created_at)

    def write(
        self,
        jobs: Iterable[Job],
        lines: Sequence[tuple[Job, int, str]],
        new: Sequence[Job] = (),
    ) -> None:
        """Writes jobs and new lines of metrics, all or none.

        Args:
            jobs: Jobs that have changed.
            lines: Lines with their jobs and numbers.
            new: Jobs that are new.

        Raises:
            Taken: The tenant of a new job has another one by its name.
            StorageError: The database cannot be written.
        """
        jobs, dump = [*jobs, *new], type_adapter(Job).dump_json
        over = [job.id for job in jobs if job.progress.is_over]
        rows = [
            {
                "id": job.id,
                "tenant": job.tenant,
                # A setting that was left out still counts as left out.
                "state": dump(job, exclude_unset=True).decode(),
            }
            for job in jobs
        ]
        added = [{"job": j.id, "number": n, "line": line} for j, n, line in lines]
        with self._database.writing() as connection:
            for job in new:
                try:
                    connection.execute(_NAMES.insert().values(_name(job)))
                except sa.exc.IntegrityError:
                    raise Taken(
                        f"you have a job {job.name!r} already. Choose another name."
                    ) from None
            if rows:
                ids = [row["id"] for row in rows]
                connection.execute(_JOBS.delete().where(_JOBS.c.id.in_(ids)))
                connection.execute(_JOBS.insert(), rows)
            if over:
                ended = _NAMES.update().where(_NAMES.c.job.in_(over))
                connection.execute(ended.values(is_over=True))
            # A transaction may be on disk although the connection broke before the
            # database said so. It is then written again.
            for job in {job.id: job for job, *_ in lines}.values():
                first = min(number for one, number, _ in lines if one is job)
                c = _LINES.c
                old = _LINES.delete().where(c.job == job.id, c.number >= first)
                connection.execute(old)
            if added:
                connection.execute(_LINES.insert(), added)

    def delete(self, job: Job) -> None:
        """Deletes a job and its metrics."""
        with self._database.writing() as connection:
            connection.execute(_LINES.delete().where(_LINES.c.job == job.id))
            connection.execute(_JOBS.delete().where(_JOBS.c.id == job.id))
            connection.execute(_NAMES.delete().where(_NAMES.c.job == job.id))

    def lines(self, job: Job, after: int, limit: int) -> list[str]:
        """Returns lines of a job's metrics from a number on, each a JSON object."""
        c = _LINES.c
        found = (
            sa.select(c.line)
            .where(c.job == job.id, c.number >= after)
            .order_by(c.number)
            .limit(limit)
        )
        with self._database.reading() as connection:
            return [row.line for row in connection.execute(found)]


def _name(job: Job) -> dict[str, Any]:
    """Returns the row with the name of a job."""
    tenant, name = job.key
    is_over = job.progress.is_over
    return {"tenant": tenant, "name": name, "job": job.id, "is_over": is_over}
