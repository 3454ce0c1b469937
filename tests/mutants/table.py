"""Small mistakes in the product's code, each with the tests that must notice it."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """A mistake.

    Attributes:
        wrong: Says what is wrong then.
        old: Text that occurs once in the product's code.
        new: The text in its place.
        tests: Tests of which at least one must fail.
    """

    wrong: str
    old: str
    new: str
    tests: tuple[str, ...]


def _mutant(wrong: str, old: str, new: str, *tests: str) -> Mutant:
    return Mutant(wrong=wrong, old=old, new=new, tests=tests)


_TRAIN, _SCHEDULER = "tests/jaxlora/train", "tests/scheduler"
_JOBS_OVER_HTTP = "tests/jaxlora/serve/jobs"

_ORDER_AND_RESUME = (
    _mutant(
        "each epoch has the order of the one before it",
        "return self._epoch(epoch)[places].copy()",
        "return self._epoch(max(0, epoch - 1))[places].copy()",
        "tests/jaxlora/data/test_order.py",
    ),
    _mutant(
        "the order of samples does not depend on the seed",
        "np.random.Philox(key=np.array([seed, stream], np.uint64))",
        "np.random.Philox(key=np.array([0, stream], np.uint64))",
        "tests/jaxlora/data/test_order.py",
    ),
    _mutant(
        "the last batch of an epoch loses its short rest",
        "slice(first, self.num_samples if is_last else first + self.batch_size)",
        "slice(first, first + self.batch_size - is_last)",
        "tests/jaxlora/data/test_order.py",
    ),
    _mutant(
        "a resumed run repeats samples whose step the checkpoint has",
        "s.owner for s in taken.samples if s.batch < steps[s.owner]",
        "s.owner for s in taken.samples if s.batch < steps[s.owner] - 1",
        f"{_TRAIN}/test_stream_plan.py",
    ),
    _mutant(
        "ticks that were taken and not finished are not saved",
        "for taken in (*self._taken, *self._fixed)\n"
        "                for part in taken.parts",
        "for taken in self._fixed\n                for part in taken.parts",
        f"{_TRAIN}/test_stream_plan.py",
    ),
    _mutant(
        "a resumed run takes the saved ticks of other jobs",
        "if saved.rules != self._described(jobs):",
        "if not saved.rules:",
        f"{_TRAIN}/test_stream_plan.py",
    ),
    _mutant(
        "a slot that was left is free while ticks in flight have its rows",
        "self._leaving[slot] = self._next_tick + self._width",
        "self._leaving[slot] = self._next_tick",
        f"{_TRAIN}/test_stream_plan.py",
    ),
    _mutant(
        "a restored job begins its optimizer anew: its moments are lost",
        "written = tuple(kept) if len(kinds) > 1 else tuple(kinds)",
        "written = (PARAMS,)",
        "tests/jaxlora/adapters/test_slots.py",
    ),
    _mutant(
        "a checkpoint lacks the states of paused jobs",
        "return parked | {name: read_slot(slot) for name, slot in slots.items()}",
        "return {name: read_slot(slot) for name, slot in slots.items()}",
        f"{_TRAIN}/test_live_requests.py::test_a_run_that_ended_with_a_paused_job_continues",
    ),
    _mutant(
        "a resumed run has the oldest checkpoint",
        "return max(checkpoint_numbers(folder), default=None)",
        "return min(checkpoint_numbers(folder), default=None)",
        "tests/jaxlora/run/test_saved_run.py",
    ),
    _mutant(
        "tensors of a checkpoint are not compared with their checksum",
        "if checksum(array) != self.run.checksums.get(name):",
        "if name not in self.run.checksums:",
        "tests/jaxlora/run/test_saved_run.py",
    ),
    _mutant(
        "tensors of a checkpoint all begin at the first number",
        "parts = np.split(array, ends[:-1])",
        "parts = [array[: math.prod(shape)] for shape in shapes.values()]",
        "tests/jaxlora/run/test_saved_run.py",
    ),
    _mutant(
        "the seal of a record is not compared",
        "if found == FORMAT and seal != checksum(values):",
        "if found == FORMAT and not (seal or checksum(values)):",
        "tests/jaxlora/run/test_saved_run.py",
    ),
    _mutant(
        "what changed before the lock was taken is not read again",
        "self if self.seen == _seen(self.folder) else FoundRun.read(self.folder)",
        "self",
        "tests/jaxlora/run/test_saved_run.py",
    ),
    _mutant(
        "another seed may be given on resume",
        '    "seed": _POSITION,\n',
        "",
        "tests/jaxlora/run/test_identity.py",
    ),
    _mutant(
        "a resumed job with less patience ends at once without a word",
        "if patience and count >= patience:",
        "if patience and count > patience:",
        f"{_TRAIN}/test_resume_checks.py::test_less_patience_needs_a_word_too",
    ),
    _mutant(
        "a resumed job begins its data anew",
        "                batch=job.progress.step,\n",
        "                batch=0,\n",
        f"{_TRAIN}/test_preemption.py::test_a_kill_while_a_job_is_paused",
    ),
    _mutant(
        "a resumed job takes the log-probabilities of other data",
        "if key != _key(job, base) or sizes != wanted:",
        "if sizes != wanted:",
        f"{_TRAIN}/test_preferences.py::test_a_resumed_run_ends_in_the_same_bits",
    ),
    _mutant(
        "a resumed job takes fewer log-probabilities than it has samples",
        "if key != _key(job, base) or sizes != wanted:",
        "if key != _key(job, base):",
        f"{_TRAIN}/test_preferences.py::test_a_resumed_run_ends_in_the_same_bits",
    ),
)

_FILES = (
    _mutant(
        "several processes may hold the lock of a run",
        "def _lock(handle: int, kind: int = fcntl.LOCK_EX)",
        "def _lock(handle: int, kind: int = fcntl.LOCK_SH)",
        f"{_TRAIN}/test_run_lock.py",
    ),
    _mutant(
        "a run does not see that another one has taken its folder over",
        "if found != self._text:",
        "if not found:",
        f"{_TRAIN}/test_run_lock.py",
    ),
    _mutant(
        "a folder that was replaced under a run is not noticed",
        "if self._directory < 0 or _is_same(self._directory, self._folder):",
        "if self._directory < 0 or self._folder.exists():",
        f"{_TRAIN}/test_run_folder.py::test_a_folder_that_is_removed_while_the_run_trains",
    ),
    _mutant(
        "a checkpoint does not wait for the adapters before it",
        "self._start(self._writer, write, event, after=self._pending)",
        "self._start(self._writer, write, event, after=())",
        f"{_TRAIN}/test_run_store.py",
    ),
    _mutant(
        "adapters of a job are written in any order",
        "self._start(self._exporters, write, event, after=earlier)",
        "self._start(self._exporters, write, event, after=())",
        f"{_TRAIN}/test_run_store.py",
    ),
    _mutant(
        "a checkpoint follows an adapter that was not written",
        "            self._has_failed.set()\n",
        "",
        f"{_TRAIN}/test_run_store.py",
    ),
    _mutant(
        "a snapshot shares the memory of the slots",
        "return jax.device_put(x, x.sharding.with_memory_kind(_HOST_MEMORY))",
        "return x",
        f"{_TRAIN}/test_background_writes.py::test_a_snapshot_does_not_follow_the_slots",
    ),
    _mutant(
        "events of rounds that run again stay in the log",
        '_lines(e for e in events if e["round"] <= last)',
        "_lines(events)",
        "tests/jaxlora/run/test_log.py",
    ),
    _mutant(
        "a part of a line stays in the log when the disk is full",
        "                os.ftruncate(self._file, self._size)\n",
        "",
        f"{_TRAIN}/test_full_disk.py::test_the_log",
    ),
    _mutant(
        "what a killed replacement has moved aside is removed",
        "            if not os.path.lexists(path):\n                old.rename(path)",
        "            if os.path.lexists(path):\n                old.rename(path)",
        "tests/jaxlora/test_atomic.py",
    ),
    _mutant(
        "a name is enough to remove a folder",
        "if _TEMPORARY.fullmatch(path.name) and _is_marked(path)",
        "if _TEMPORARY.fullmatch(path.name)",
        "tests/jaxlora/test_atomic.py",
    ),
    _mutant(
        "a key of a run file may occur twice",
        "if key in lines:",
        "if is_merge and key in lines:",
        "tests/jaxlora/test_yaml_file.py",
    ),
    _mutant(
        "merged keys go before a mapping's own",
        "values |= own",
        "values = own | values",
        "tests/jaxlora/test_yaml_file.py",
    ),
)

_JOBS = (
    _mutant(
        "evaluations are one step early",
        "bool(every and step % every == 0)",
        "bool(every and (step + 1) % every == 0)",
        f"{_TRAIN}/test_executor.py::test_a_paused_job_continues_where_it_was",
    ),
    _mutant(
        "early stopping is one evaluation late",
        "bool(patience and self.progress.evals_without_gain >= patience)",
        "bool(patience and self.progress.evals_without_gain > patience)",
        f"{_TRAIN}/test_best_evaluation.py",
        f"{_TRAIN}/test_stream.py::test_early_stopping",
    ),
    _mutant(
        "a gain below the least that counts ends no patience",
        "gained = gain >= 0, gain > self.settings.early_stopping_delta",
        "gained = gain >= 0, gain > 0",
        f"{_TRAIN}/test_best_evaluation.py",
    ),
    _mutant(
        "of equal evaluations, the first one is the best",
        "is_best, gained = gain >= 0,",
        "is_best, gained = gain > 0,",
        f"{_TRAIN}/test_best_evaluation.py",
    ),
    _mutant(
        "each evaluation replaces the best adapter",
        "if is_best and job.settings.keep_best:",
        "if job.settings.keep_best:",
        f"{_TRAIN}/test_trainer.py::test_early_stopping_keeps_the_best",
    ),
    _mutant(
        "a copy keeps the best evaluation of the other job",
        "        best_eval=None,\n        best_step=None,",
        "        best_step=None,",
        f"{_TRAIN}/test_best_evaluation.py",
    ),
    _mutant(
        "a copy starts at the step before",
        "return self.progress.step + (self.parked is None)",
        "return self.progress.step",
        f"{_TRAIN}/test_best_evaluation.py",
    ),
    _mutant(
        "a copy may have another seed",
        '        "steps",\n        "epochs",\n        "learning_rate",',
        '        "steps",\n        "epochs",\n        "learning_rate", "seed",',
        f"{_TRAIN}/test_cloning.py",
    ),
    _mutant(
        "a copy gets the weights of the other job without its moments",
        "state = copy(parent.slot) if has_state else parent.parked",
        "state = parent.parked",
        f"{_TRAIN}/test_sweep.py::test_a_copy_equals_a_job_whose_settings_change",
    ),
    _mutant(
        "the loss is a mean over samples, not over target tokens",
        "weight=1.0 / objective.num_terms(samples),",
        "weight=1.0 / len(samples),",
        f"{_TRAIN}/test_token_weights.py",
    ),
    _mutant(
        "references are those of other samples",
        'self._referred(samples, "train", numbers)',
        'self._referred(samples, "train", numbers[::-1])',
        f"{_TRAIN}/test_preferences.py::test_the_reference_is_the_base_without_the_adapter",
    ),
    _mutant(
        "a warm-up of a share of the steps is rounded down",
        "warmup = math.ceil(job.warmup_ratio * num_steps)",
        "warmup = math.floor(job.warmup_ratio * num_steps)",
        "tests/jaxlora/test_schedules.py",
    ),
    _mutant(
        "a linear schedule ends one step early",
        "return (self.number - self.warmup) / max(1, self.total - self.warmup)",
        "return (self.number - self.warmup) / max(1, self.total - self.warmup - 1)",
        "tests/jaxlora/test_schedules.py",
    ),
    _mutant(
        "a request that was saved replaces a later one",
        "self._asked.setdefault((kind, name), reason)",
        "self._asked[kind, name] = reason",
        f"{_TRAIN}/test_requests.py",
    ),
    _mutant(
        "losses in flight of a job that has left count for the next in its slot",
        "            tick.slots.discard(slot)\n",
        "",
        f"{_TRAIN}/test_mesh_jobs.py::test_an_eventful_run",
    ),
    _mutant(
        "a paused job starts again from its first weights",
        "        if parked is None:\n            self._executor.load(slot",
        "        if True:\n            self._executor.load(slot",
        f"{_TRAIN}/test_executor.py::test_a_paused_job_continues_where_it_was",
        f"{_TRAIN}/test_preemption.py::test_pausing_by_request",
    ),
    _mutant(
        "running jobs leave their slots for jobs of the same priority",
        "any(c.priority >= job.priority for c in leaving)",
        "any(c.priority > job.priority for c in leaving)",
        f"{_SCHEDULER}/test_admission.py",
    ),
    _mutant(
        "the last of the waiting jobs starts first",
        "for job in sorted(waiting, key=",
        "for job in sorted(waiting[::-1], key=",
        f"{_SCHEDULER}/test_admission.py",
    ),
)

_SLOTS = (
    _mutant(
        "a slot that was left keeps its weights and moments",
        "        self._write(slot, {})\n",
        "",
        "tests/jaxlora/adapters/test_slots.py",
    ),
    _mutant(
        "a slot that was left keeps the gradients of its job",
        "_with_row(t, slot, 0, axis) for n, t in pending.gradients.items()",
        "t for n, t in pending.gradients.items()",
        "tests/jaxlora/adapters/test_slots.py",
    ),
    _mutant(
        "the ranks of the job before stay in the settings of a slot",
        "values[:, slot] = new",
        "values[:, slot] = np.maximum(values[:, slot], new)",
        "tests/jaxlora/adapters/test_slots.py",
    ),
    _mutant(
        "all linears of a slot have the scaling of the last one",
        "new[place] = setting.value(adapter, weights)",
        "new[:] = setting.value(adapter, weights)",
        f"{_TRAIN}/test_sections.py::test_sections_train_what_one_program_trains",
        f"{_TRAIN}/test_peft_run.py",
    ),
    _mutant(
        "rows of a job that has left teach the next one in its slot",
        "if ready is not None and ready.samples == _running(part, of):",
        "if ready is not None:",
        f"{_TRAIN}/test_stream.py::test_a_job_that_fails_leaves_nothing_in_its_slot",
        f"{_TRAIN}/test_staged_executor.py::test_a_released_slot_takes_no_further_step",
    ),
    _mutant(
        "passes in flight leave gradients in a slot that was left",
        "            del self._leaving[slot]\n            self.slots.clear(slot)",
        "            del self._leaving[slot]",
        f"{_TRAIN}/test_mesh_failures.py::test_a_gradient_that_is_infinite_on_one_stage",
    ),
    _mutant(
        "a slot steps before its batch is complete",
        "taken = inputs.step_mask & is_finite",
        "taken = is_finite",
        f"{_TRAIN}/test_contracts.py::test_a_slot_without_a_whole_batch_stays_as_it_is",
    ),
    _mutant(
        "a gradient that is not finite reaches the weights",
        "taken = inputs.step_mask & is_finite",
        "taken = inputs.step_mask",
        f"{_TRAIN}/test_contracts.py::test_a_batch_that_is_not_finite_leaves_its_slot_as_it_is",
    ),
    _mutant(
        "gradients are clipped where they are small",
        "jnp.where(norm > inputs.max_norm, inputs.max_norm / norm, 1.0)",
        "jnp.where(norm > inputs.max_norm, 1.0, inputs.max_norm / norm)",
        "tests/jaxlora/adapters/test_optimizer_steps.py",
        f"{_TRAIN}/test_optimizers.py::test_each_slot_steps_as_in_optax",
    ),
    _mutant(
        "all jobs have the dropout masks of one seed",
        "seeds = {slot: self._jobs[slot].settings.seed for slot in steps}",
        "seeds = dict.fromkeys(steps, 0)",
        f"{_TRAIN}/test_contracts.py::test_dropout_depends_on_the_seed_and_the_step",
        f"{_TRAIN}/test_contracts.py::test_each_job_has_its_own_dropout",
    ),
    _mutant(
        "all steps have the same dropout masks",
        "step=by_slot(steps, self._shape.num_slots, np.int32),",
        "step=by_slot({}, self._shape.num_slots, np.int32),",
        f"{_TRAIN}/test_contracts.py::test_dropout_depends_on_the_seed_and_the_step",
    ),
    _mutant(
        "the loss of a step is that of its last microbatch",
        "    return np.sum(parts, axis=0)",
        "    return parts[-1]",
        f"{_TRAIN}/test_contracts.py::test_microbatches_in_parts_teach_the_same",
    ),
    _mutant(
        "the last token of a sample predicts the first of the next",
        "    labels[ends - 1] = 0",
        "    labels[-1] = 0",
        "tests/jaxlora/data/test_pack.py",
    ),
    _mutant(
        "rows of a job begin within the block of another",
        "            row = limits.padded(row)\n        row +=",
        "        row +=",
        "tests/jaxlora/data/test_pack.py",
    ),
    _mutant(
        "padding has the positions of a long sample",
        "    positions[by_row(run.of is None for run in runs) > 0] = 0\n",
        "",
        "tests/jaxlora/data/test_pack.py",
    ),
    _mutant(
        "the blocks of a microbatch are all of the first job",
        "run.of[0].slot for run",
        "runs[0].of[0].slot for run",
        "tests/jaxlora/data/test_pack.py",
    ),
    _mutant(
        "the masks of a job depend on what precedes it in a microbatch",
        "first_token = int(batch.starts[group.index])",
        "first_token = row",
        "tests/jaxlora/data/test_pack.py",
    ),
)

_DEVICES = (
    _mutant(
        "a gradient of which each device has a term is not summed along tensor",
        "_sums(own, divided_axes) | _sums(whole, (*axes, *whole_axes))",
        "_sums(own, divided_axes) | _sums(whole, axes)",
        "tests/jaxlora/adapters/test_exchange.py",
        f"{_TRAIN}/test_tensor.py",
    ),
    _mutant(
        "the gradients of the second further replica are lost",
        "for part in self._parts.pop(slot, ()):",
        "for part in self._parts.pop(slot, [])[:1]:",
        f"{_TRAIN}/test_replicas.py::test_equals_one_device",
    ),
    _mutant(
        "a further replica goes on with old weights",
        "            self._further.copy_weights(slots)\n",
        "            pass\n",
        f"{_TRAIN}/test_replicas.py::test_equals_one_device",
    ),
    _mutant(
        "each stage clips by the norm of its own gradients",
        "return [jax.device_put(tuple(measured), place) for place in places]",
        "return [\n"
        "            jax.device_put((one,) * len(stages), place)\n"
        "            for one, place in zip(measured, places, strict=True)\n"
        "        ]",
        f"{_TRAIN}/test_meshes.py::test_norms_are_over_all_stages",
        f"{_TRAIN}/test_meshes.py::test_a_mesh_trains_what_one_device_trains",
    ),
    _mutant(
        "stages step one tick too early",
        "if 0 <= (tick := number - (width - 1 - ahead[stage])) < num_ticks",
        "if 0 <= (tick := number - max(0, width - 2 - ahead[stage])) < num_ticks",
        "tests/sharding/test_pipeline.py",
    ),
    _mutant(
        "stages step one tick too late",
        "if 0 <= (tick := number - (width - 1 - ahead[stage])) < num_ticks",
        "if 0 <= (tick := number - (width - ahead[stage])) < num_ticks",
        "tests/sharding/test_pipeline.py",
    ),
    _mutant(
        "the first stage has a tick too many in flight",
        "while not has_ended and num_ticks < number + width:",
        "while not has_ended and num_ticks <= number + width:",
        "tests/sharding/test_pipeline.py",
    ),
    _mutant(
        "devices of fsdp have no microbatches of their own",
        "return self.data * self.fsdp",
        "return self.data",
        "tests/sharding/test_mesh.py",
    ),
    _mutant(
        "neighbours are along data, and not along tensor",
        "np.array(used).reshape(each)",
        "np.array(used).reshape(each[0], *each[:0:-1]).transpose(0, 4, 3, 2, 1)",
        "tests/sharding/test_mesh.py",
    ),
    _mutant(
        "fsdp divides rows before tensor does",
        "pairs = [(EXPERT, expert), (TENSOR, tensor), (FSDP, fsdp)]",
        "pairs = [(FSDP, fsdp), (EXPERT, expert), (TENSOR, tensor)]",
        "tests/sharding/test_rules.py",
    ),
    _mutant(
        "the head is no work of the last stage",
        "    layers[-1] += seconds(head_work(spec, _TARGET_SHARE))\n",
        "",
        "tests/jaxlora/costs",
    ),
    _mutant(
        "each device along tensor adds a bias of its own",
        "return jnp.where(jax.lax.axis_index(TENSOR) == 0, x, jnp.zeros_like(x))",
        "return x",
        "tests/jaxlora/models/test_tensor_parallel.py::test_losses_gradients_and_norms",
    ),
    _mutant(
        "devices that run at once do not share the steps of jobs",
        "in_flight = num_lanes = len(config.replica_shapes) or sizes.num_lanes",
        "in_flight = num_lanes = 1",
        "tests/jaxlora/test_plan.py::test_devices_in_flight_share_the_steps_of_jobs",
    ),
    _mutant(
        "processes go on from different checkpoints",
        '{f"the newest checkpoint in {folder / CHECKPOINTS}": self.latest},',
        "{},",
        f"{_TRAIN}/test_run_store.py",
    ),
    _mutant(
        "a value that only some processes have is not compared",
        "for name in dict.fromkeys(n for values in all_values for n in values):",
        "for name in first:",
        "tests/jaxlora/distributed",
    ),
)

_PLANS = (
    _mutant(
        "batches of a job may be closer than the pipeline is long",
        "if end < start < end + distance:",
        "if end < start < end + distance - 1:",
        f"{_SCHEDULER}/papers/test_mlora.py",
        f"{_SCHEDULER}/test_plan.py",
        f"{_SCHEDULER}/pack/test_lanes.py::test_finds_violations_of_ticks",
    ),
    _mutant(
        "the next batch of a streamed job comes too early",
        "ready=number + rules.lanes.pipeline.distance,",
        "ready=number + 1,",
        f"{_SCHEDULER}/stream/test_stream.py::test_the_stretches_are_one_legal_schedule",
        f"{_SCHEDULER}/stream/test_stream.py::test_an_unknown_or_early_sample_is_refused",
    ),
    _mutant(
        "the next batch of a planned job comes too early",
        "ready=tick + distance,",
        "ready=tick + 1,",
        f"{_SCHEDULER}/pack/test_whole.py::test_one_job_waits_for_each_of_its_steps",
        f"{_SCHEDULER}/pack/test_whole.py::test_bubbles_stay_small",
    ),
    _mutant(
        "a tick has the shape of its shortest lane",
        "longest = max(padded_tokens(microbatch, self.limits) for microbatch in tick)",
        "longest = min(padded_tokens(microbatch, self.limits) for microbatch in tick)",
        f"{_SCHEDULER}/stream/test_stream.py::test_lanes_of_a_tick_have_the_shape_of_the_longest",
    ),
    _mutant(
        "samples that are left of a batch run again",
        "for i in (range(len(tokens)) if left is None else left)",
        "for i in range(len(tokens))",
        f"{_SCHEDULER}/stream/test_stream.py::test_jobs_join_and_leave_between_any_two_ticks",
    ),
    _mutant(
        "a replica is filled beyond its capacity",
        "return lane.capacity - others - tokens[job]",
        "return lane.capacity - tokens[job]",
        f"{_SCHEDULER}/stream/test_replica_fill.py",
    ),
    _mutant(
        "the blocks of several jobs are padded as if they were one's",
        "return sum(limits.padded(n) for n in tokens_by_job(microbatch).values())",
        "return limits.padded(sum(tokens_by_job(microbatch).values()))",
        f"{_SCHEDULER}/test_packers.py",
    ),
    _mutant(
        "a pass does not wait for the neighboring stage",
        "start = max(start, ends[neighbor][m] + communication)",
        "start = max(start, communication)",
        f"{_SCHEDULER}/test_simulate.py::test_two_stages",
        f"{_SCHEDULER}/test_simulate.py::test_one_microbatch_passes_all_stages_twice",
    ),
    _mutant(
        "a lower bound is above what can be reached",
        "gaps = (len(job) - 1) * (pipeline.distance - 1)",
        "gaps = len(job) * pipeline.distance",
        f"{_SCHEDULER}/test_bounds.py::test_chain_bound_is_reached_by_single_samples",
    ),
    _mutant(
        "a sample moves to a replica that ends later",
        "if not later[target, i] < self._load[source] * (1 - 1e-12):",
        "if not later[target, i] < np.inf:",
        f"{_SCHEDULER}/replicas/test_dispatch.py",
    ),
    _mutant(
        "waiting jobs take slots that are taken",
        "free = [slot for slot in range(num_slots) if slot not in taken]",
        "free = [slot for slot in range(num_slots)]",
        f"{_TRAIN}/test_job_slots.py",
    ),
    _mutant(
        "a checkpoint's copies are not counted in the memory",
        "peak = max(step, self._checkpoint_bytes())",
        "peak = step",
        "tests/jaxlora/plan/memory/test_footprint.py",
    ),
    _mutant(
        "a pipeline is measured by its first stage",
        "return max(stage.total_bytes(num_tokens) for stage in self.stages)",
        "return self.stages[0].total_bytes(num_tokens)",
        "tests/jaxlora/plan/memory/test_largest_fitting.py",
    ),
    _mutant(
        "an automatic capacity is no multiple of its unit",
        "fitting = fitting_tokens // self.unit * self.unit",
        "fitting = fitting_tokens",
        f"{_TRAIN}/test_capacity.py::test_bounds_choose_whole_units",
    ),
    _mutant(
        "the slowest remat that fits is taken",
        "min(fitting, key=lambda one: one.seconds, default=chosen)",
        "max(fitting, key=lambda one: one.seconds, default=chosen)",
        "tests/jaxlora/plan/memory/test_options.py",
    ),
    _mutant(
        "of equally fast meshes, the one with the most devices is taken",
        "simpler = sizes.num_devices, *inner,",
        "simpler = -sizes.num_devices, *inner,",
        "tests/jaxlora/plan/mesh/test_choose.py::test_fewer_devices_are_taken_if_more_are_no_faster",
    ),
    _mutant(
        "weights are gathered between hosts as fast as inside of one",
        "return max(inside, num_bytes / (_NETWORK_SHARE * self.network_bytes))",
        "return inside",
        "tests/jaxlora/costs/test_links.py",
    ),
    _mutant(
        "a product counts one operation for each weight",
        "frozen, adapter = 2 * k * n, 2 * rank * (k + n)",
        "frozen, adapter = k * n, 2 * rank * (k + n)",
        "tests/jaxlora/costs/test_stages.py",
    ),
    _mutant(
        "a foretold job leaves its slot one step late",
        "                self._stream.note_step(slot)\n"
        "                if self._stream.is_done(slot):\n"
        "                    ended.append(slot)\n",
        "                if self._stream.is_done(slot):\n"
        "                    ended.append(slot)\n"
        "                self._stream.note_step(slot)\n",
        "tests/jaxlora/test_plan.py::test_a_plan_is_whole",
        "tests/jaxlora/test_plan.py::test_the_trainer_runs_what_was_planned",
    ),
    _mutant(
        "a changed source file finds the program of the old one",
        "found.update((_PACKAGE / name).read_bytes())",
        "found.update(name.encode())",
        "tests/jaxlora/programs/test_key.py",
    ),
    _mutant(
        "programs for other arguments have the same key",
        "parts = identity, str(tree), [_argument(leaf) for leaf in leaves]",
        "parts = identity, str(tree)",
        "tests/jaxlora/programs/test_key.py",
    ),
    _mutant(
        "a damaged program is loaded",
        "if data[:start] != _HEADER + hashlib.sha256(payload).digest():",
        "if not data.startswith(_HEADER):",
        "tests/jaxlora/programs/test_kept.py",
    ),
    _mutant(
        "a program that others may write is loaded",
        "        check_private(os.fstat(file.fileno()), path)\n",
        "        pass\n",
        "tests/jaxlora/programs/test_kept.py",
    ),
)

_SESSION = "tests/jaxlora/session"

_CALLS = (
    _mutant(
        "positions without weight have no log-probability",
        'is_read=lambda inputs: inputs["loss"] > 0,',
        "is_read=None,",
        f"{_SESSION}/test_engine.py::test_log_probabilities_of_positions_without_weight",
    ),
    _mutant(
        "negative weights have no gradient",
        '(inputs["loss"] > 0) & (inputs["weight"] != 0)',
        '(inputs["loss"] > 0) & (inputs["weight"] > 0)',
        f"{_SESSION}/test_losses.py",
    ),
    _mutant(
        "what rows of other losses hold reaches the gradient",
        "given = (jnp.where(is_own, x, 0.0) for x in read)",
        "given = iter(read)",
        f"{_SESSION}/test_losses.py",
    ),
    _mutant(
        "a clipped ratio has a gradient",
        "(jax.lax.stop_gradient(ratio) if xp is jnp else ratio)",
        "ratio",
        f"{_SESSION}/test_losses.py",
    ),
    _mutant(
        "a step that was skipped counts",
        "one.num_steps = num_steps + is_finite",
        "one.num_steps = num_steps + 1",
        f"{_SESSION}/test_engine.py::test_a_step_that_is_not_finite_is_skipped",
    ),
    _mutant(
        "passes run before the step that comes before them",
        "isinstance(call, StepCall):\n                    break",
        "isinstance(call, StepCall):\n                    continue",
        f"{_SESSION}/test_engine.py::test_calls_run_in_the_order_of_their_adapter",
    ),
    _mutant(
        "a parked adapter comes back without its gradients",
        "            if pending is not None:\n",
        "            if False:\n",
        f"{_SESSION}/test_residence.py::test_gradients_go_with_a_parked_adapter",
    ),
    _mutant(
        "gradients of a parked adapter are finite when it comes back",
        "self._write_gradients(slot, pending, rows.is_finite)",
        "self._write_gradients(slot, pending, True)",
        f"{_SESSION}/test_residence.py",
    ),
    _mutant(
        "rows of an adapter run with the slot of another one",
        "found = [*slots, *itertools.islice(",
        "found = [*slots[::-1], *itertools.islice(",
        f"{_SESSION}/test_losses.py",
    ),
    _mutant(
        "a tenant that was away is owed all that it has missed",
        "start = self._least - self._quantum",
        "start = self._least - 99 * self._quantum",
        "tests/scheduler/stream/test_waiting.py",
    ),
    _mutant(
        "a tenant that is ahead runs as one that is behind",
        "if time > least + queue._quantum:",
        "if time > least + 99 * queue._quantum:",
        "tests/scheduler/stream/test_waiting.py",
    ),
)

_JOBS_OF_SERVERS = (
    _mutant(
        "a job counts operations that are not done",
        "seq, self._seq = self._seq, own.next_seq\n",
        "seq = self._seq\n",
        f"{_JOBS_OVER_HTTP}/test_requests.py::test_jobs_go_on_after_crashes",
    ),
    _mutant(
        "losses of several positions go uphill",
        "return [gradient[place] for place in self._places]",
        "return [-gradient[place] for place in self._places]",
        f"{_JOBS_OVER_HTTP}/test_jobs.py",
    ),
    _mutant(
        "a tenant's job may name any file",
        "if name in self.shared:\n            return self.shared[name]",
        "if name in self.shared or pathlib.Path(name).exists():\n"
        "            return self.shared.get(name, name)",
        f"{_JOBS_OVER_HTTP}/test_requests.py::test_what_a_job_cannot_have",
    ),
)

_SAMPLES = (
    _mutant(
        "a sequence reads what the one before has left in its row",
        "return jnp.where(begins.reshape(-1, *[1] * (whole.ndim - 1)), 0, taken)",
        "return taken",
        f"{_SESSION}/test_samples.py::"
        "test_a_version_that_diverged_does_not_reach_those_after_it",
    ),
    _mutant(
        "the random numbers of a token are those of the first",
        "ints[:, i] = request.slot, place, step, request.seed",
        "ints[:, i] = request.slot, place, 0, request.seed",
        f"{_SESSION}/test_samples.py::test_calls_together_give_the_bits_of_each_alone",
        "tests/jaxlora/generate/test_generator.py",
    ),
    _mutant(
        "a release ends a version that calls still need",
        "if version.num_held or not version.is_released:",
        "if not version.is_released:",
        f"{_SESSION}/test_samples.py::"
        "test_a_release_waits_for_the_calls_that_need_the_version",
    ),
)

MUTANTS = (
    *_ORDER_AND_RESUME,
    *_FILES,
    *_JOBS,
    *_SLOTS,
    *_DEVICES,
    *_PLANS,
    *_CALLS,
    *_SAMPLES,
    *_JOBS_OF_SERVERS,
)
