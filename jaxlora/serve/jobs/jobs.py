"""The jobs of all tenants: those that run, those that wait, and requests for them."""

import asyncio
import collections
import dataclasses
import datetime
import json
import logging
import secrets
import threading
import time
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jaxlora.adapters.initial import check_drawn
from jaxlora.config import LoraJob
from jaxlora.data.tokenizer import load_tokenizer
from jaxlora.data.tokens.tokenize import DataReader
from jaxlora.errors import ConfigError, JaxloraError
from jaxlora.hf.files import tokenizer_folder
from jaxlora.plan.job.prepared_job import PreparedJob, prepare_job
from jaxlora.run.clone_settings import clone_settings
from jaxlora.run.events import Event
from jaxlora.run.job_progress import JobProgress
from jaxlora.serve.database import Database
from jaxlora.serve.jobs.batch_loss import check_objective
from jaxlora.serve.jobs.driver import Driver, Surroundings
from jaxlora.serve.jobs.record import Asked, Copy, Job, JobTable
from jaxlora.serve.jobs.tenant_data import LocalJob, TenantData
from jaxlora.serve.registry import NotFound, Taken
from jaxlora.session.engine import Engine
from jaxlora.train.job_state import progress_of_copy
from jaxlora.train.live_jobs import PAUSED, STOPPED
from jaxlora.train.open_run import start_job

logger = logging.getLogger(__name__)

_KEEP_SECONDS = 1.0  # between writes of the progress of jobs
_RETRY_SECONDS = 10.0  # before a job goes on whose operation was not accepted
