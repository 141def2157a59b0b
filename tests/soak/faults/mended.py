"""Faults that this project had and fixed, put back."""

from tests.soak.faults.fault import Fault

MENDED = (
    # The model and its weights
    Fault(
        "tied-weight-in-two",
        "tied embeddings become two weights when the model is filled",
        "separate tensor for each\n            self.head.output.weight = self.tok_embeddings.weight",
        "separate tensor for each\n            pass",
    ),
    Fault(
        "infinity-in-hf-config",
        "NaN and infinity pass as numbers of a Hugging Face config",
        "isinstance(value, int | float) and abs(value) <= sys.float_info.max",
        "isinstance(value, int | float)",
    ),
    Fault(
        "imported-model-never-saves",
        "the config of an imported model leaves checkpoint.every at its default, which saves only at the end",
        'sections["checkpoint"] = {"every": SAVE_EVERY}',
        "pass",
    ),
    # Plans
    Fault(
        "true-is-one",
        "units with reshard_after_forward true and 1 become one entry of the plan file",
        "lambda unit: repr(unit.settings)",
        "lambda unit: unit.settings",
    ),
    Fault(
        "leading-zero-lost",
        "a unit named with 09 is read from the plan file as 9",
        "if str(int(number)) != number:",
        "if False:",
    ),
    Fault(
        "reshard-beside-tp",
        "an int reshard_after_forward with tp, with which torch hangs, is accepted",
        'if tp > 1:\n        yield Mistake(\n            "units.reshard_after_forward",',
        'if False:\n        yield Mistake(\n            "units.reshard_after_forward",',
    ),
    Fault(
        "infinite-bound",
        "infinity passes as a number of the config",
        "Amount = Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)]",
        "Amount = Annotated[float, msgspec.Meta(ge=0)]",
    ),
    Fault(
        "impossible-cache-folder",
        "a cache folder of a name that no folder can have ends in a traceback",
        "folder.mkdir(parents=True, exist_ok=True)\n    except (OSError, ValueError) as error:",
        "folder.mkdir(parents=True, exist_ok=True)\n    except OSError as error:",
    ),
    # The planner
    Fault(
        "smaller-group-keeps-nothing",
        "the part that a unit keeps after resharding to a smaller group is not in the predicted memory",
        'weight // size, kind="unsharded"',
        '0, kind="unsharded"',
    ),
    Fault(
        "frozen-has-gradients",
        "frozen parameters have gradients and moments in the predicted memory",
        "return round(self.values(name) * self._work.trained.get(name, 1.0))",
        "return self.values(name)",
    ),
    Fault(
        "ring-shares-with-nobody",
        "more groups share a node's network than there are",
        "max(1, min(gpus // per_node, world_size // size))",
        "max(1, gpus // per_node)",
    ),
    Fault(
        "saving-changes-the-batch",
        "advice on memory gives up data-parallel ranks, and with them a part of the global batch",
        "yield {**keys, **micro, **batch}",
        "yield {**keys, **micro}",
    ),
    # Training
    Fault(
        "bfloat16-norm",
        "the norm of bfloat16 gradients has 8 bits",
        "torch._foreach_norm(shards, 2, torch.float32)",
        "torch._foreach_norm(shards, 2)",
    ),
    Fault(
        "float8-odd-tokens",
        "products in float8 of an odd number of tokens are not padded",
        "pad_inner_dim=True",
        "pad_inner_dim=False",
    ),
    Fault(
        "recompile-unheard",
        "a recompile that torch does not log is not detected",
        "if not reports:  # TORCH_LOGS overrides set_logs",
        "if False:",
    ),
    Fault(
        "loader-error-once",
        "a call of the loader after its error goes on without the step",
        "self._ready[0].result()",
        "self._ready.popleft().result()",
    ),
    Fault(
        "evaluation-drops-the-end",
        "the last tokens of a set, less than a sequence, are not evaluated",
        "-(-(split.tokens - 1) // sequences.seq_len)",
        "(split.tokens - 1) // sequences.seq_len",
    ),
    Fault(
        "undecodable-file-name",
        "a file whose name is no UTF-8 cannot be held out",
        "hashlib.sha256(os.fsencode(name))",
        "hashlib.sha256(name.encode())",
    ),
    # Ends and starts of a run
    Fault(
        "hangup-despite-nohup",
        "a run under nohup stops when its terminal closes",
        "n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN",
        "n in SIGNALS",
    ),
    Fault(
        "restart-taken-for-a-new-start",
        "torchrun's restarts count as starts by hand",
        'training is not None and launch == training.launch != ""',
        "False",
    ),
    Fault(
        "lost-peer-on-gpus",
        "a main thread that cannot return outlives a dead rank",
        "self._peer_is_lost.set()\n        self._wake_thread()",
        "self._peer_is_lost.set()",
    ),
    Fault(
        "lost-peer-at-the-end",
        "a rank that has ended without an error counts as dead",
        'self._send_to_others("goodbye")',
        "pass",
    ),
    Fault(
        "start-of-the-dead",
        "ranks wait in a start whose rank 0 has died",
        "for earlier in range(start - 1, 0, -1):",
        "for earlier in ():",
    ),
    Fault(
        "mesh-timeout",
        "the groups of mesh axes have torch's timeout instead of the run's",
        "list(ranks),\n        timeout=timeout,",
        "list(ranks),",
    ),
    Fault(
        "step-counts-in-all-files",
        "ranks take turns to write tiny tensors, so that a resume opens every rank's file",
        "< SMALL_BYTES:",
        "< 0:",
    ),
    Fault(
        "lost-peer-hides-cause",
        "the loss of a process overwrites in status.json why another process failed",
        "if self._folder is not None and not (lost and self._ended_elsewhere()):",
        "if self._folder is not None:",
    ),
    Fault(
        "unreadable-passed-over",
        "a checkpoint that cannot be read is treated as damaged",
        "except UnreadableError:\n            raise\n        except CheckpointError as error:",
        "except CheckpointError as error:",
    ),
    Fault(
        "foreign-checkpoints-taken",
        "checkpoints of another training in run.dir are taken for this one's",
        "(training and training.settings == settings_of(config))",
        "training",
    ),
    # Tools
    Fault(
        "stale-profiles-of-ranks",
        "profiles of ranks of an earlier run are not deleted",
        'for old in self._folder.glob("rank-*") if self._rank == 0 else ():',
        "for old in ():",
    ),
    Fault(
        "profile-untold",
        "a profile whose first step is never reached is not warned of",
        "if enabled and config.start not in subject.remaining_steps:",
        "if False:",
    ),
    Fault(
        "launching-is-no-communication",
        "gloo's copies at the launch of a collective are not counted",
        "np.concatenate([spans_of(self.transfers), self.launching])",
        "spans_of(self.transfers)",
    ),
    Fault(
        "compare-silent",
        "two runs are called the same though one lacks a curve",
        "elif first or second:",
        "if False:",
    ),
    Fault(
        "noise-wins",
        "a sweep names a winner though its runs overlap those of another variant",
        "if max(sign * value for value in values[first]) >= min(others):",
        "if False:",
    ),
    Fault(
        "sweep-hears-hangup",
        "a sweep under nohup ends when its terminal closes",
        "for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN",
        "for number in SIGNALS",
    ),
    Fault(
        "failed-trial-passes",
        "a trial of the doctor whose process fails counts as passed",
        """                code = process.wait(LIMIT_S)
""",
        """                process.wait(LIMIT_S)
                code = 0
""",
    ),
)
